"""The training step is measured, resumed and checked, as far as a CPU can show it."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("transformers")

from benchmarks.run.table import read
from benchmarks.studies import training_step


def test_a_large_step_needs_a_gpu():
    with pytest.raises(SystemExit, match="--tiny"):
        training_step.main(["--device", "cpu"])


def _step(words: list[str], output: Path) -> tuple[int, list[dict[str, str]]]:
    options = ["--device", "cpu", "--tiny", "--budget", "0.01", "--output", str(output)]
    return training_step.main([*options, *words]), read(output)


def test_a_step_is_measured_and_resumed(tmp_path: Path, capsys):
    code, rows = _step([], tmp_path / "step.csv")
    assert code == 0
    keys = [(row["case"], row["variant"]) for row in rows]
    assert keys == [("pairs=2", head) for head in ("eager", "ours")]
    for row in rows:
        assert row["status"].startswith("ok")
        assert float(row["seconds"]) > 0
        assert float(row["tokens_per_second"]) > 0
        assert float(row["gradient_difference"]) < training_step.ALLOWED_GRADIENT
    assert "| pairs=2 | ours | 2 |" in capsys.readouterr().out
    before = (tmp_path / "step.csv").read_text()
    # What is lost of a file is measured again, and nothing else.
    (tmp_path / "step.csv").write_text("".join(before.splitlines(keepends=True)[:-1]))
    code, again = _step([], tmp_path / "step.csv")
    assert again[:-1] == rows[:-1]
    assert [(row["case"], row["variant"]) for row in again] == keys


def test_a_wrong_head_is_not_timed(tmp_path: Path, monkeypatch):
    from benchmarks.losses.splade_head import plain

    def wrong(*tensors: torch.Tensor) -> torch.Tensor:
        return plain(*tensors) * 2

    def broken(*tensors: torch.Tensor) -> torch.Tensor:
        raise ValueError("expected a GPU")

    heads = {"eager": plain, "wrong": wrong, "broken": broken}
    monkeypatch.setattr(training_step, "HEADS", heads)
    code, rows = _step([], tmp_path / "step.csv")
    assert code == 1
    status = {(row["case"], row["variant"]): row for row in rows}
    assert status["pairs=2", "wrong"]["status"].startswith("MISMATCH")
    assert status["pairs=2", "broken"]["status"] == "failed: ValueError: expected a GPU"
    assert status["pairs=2", "wrong"]["seconds"] == ""
