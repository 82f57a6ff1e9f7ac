"""The training step is measured and checked, as far as a CPU can show it."""

from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")

from benchmarks.run.table import read
from benchmarks.studies import training_step


def test_a_large_step_needs_a_gpu():
    with pytest.raises(SystemExit, match="--tiny"):
        training_step.main(["--device", "cpu"])


def test_a_step_is_measured(tmp_path: Path, capsys):
    output = tmp_path / "step.csv"
    options = ["--device", "cpu", "--tiny", "--budget", "0.01", "--output", str(output)]
    assert training_step.main(options) == 0
    rows = read(output)
    assert [(row["pairs"], row["variant"]) for row in rows] == [("2", "eager"), ("2", "ours")]
    for row in rows:
        assert row["status"] == "ok"
        assert float(row["seconds"]) > 0
        assert float(row["tokens_per_second"]) > 0
        assert float(row["peak_bytes"]) > 0
        assert float(row["gradient_difference"]) < training_step.ALLOWED_GRADIENT
    assert "| 2 | ours |" in capsys.readouterr().out
