"""A step of SparseEncoderTrainer is measured with and without the head."""

from pathlib import Path

from benchmarks.run.table import read
from benchmarks.studies import sentence_transformers_step


def test_both_ways_are_measured_and_agree(tmp_path: Path, capsys):
    output = tmp_path / "step.csv"
    options = ["--tiny", "--budget", "0.01", "--output", str(output)]
    assert sentence_transformers_step.main(options) == 0
    rows = read(output)
    assert [row["variant"] for row in rows] == [*sentence_transformers_step.VARIANTS]
    theirs, ours = (float(row["peak_mib"]) for row in rows)
    assert 0 < ours <= theirs
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert all(float(row["gradient_difference"]) < 1e-3 for row in rows)
    assert "| 500 | use_splade_head |" in capsys.readouterr().out
