"""Encoding is measured beside sentence-transformers, with equal vectors."""

from pathlib import Path

from benchmarks.run.table import read
from benchmarks.studies import encode


def test_all_ways_are_measured_and_agree(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(encode, "BATCH_SIZES", (2,))
    monkeypatch.setattr(encode, "SIZES", {**encode.SIZES, "hidden_size": 32})
    options = ["--budget", "0.01", "--texts", "5", "--vocabulary", "300"]
    assert encode.main([*options, "--output", str(tmp_path / "encode.csv")]) == 0
    rows = read(tmp_path / "encode.csv")
    assert [row["variant"] for row in rows] == [*encode.VARIANTS]
    assert all(float(row["texts_per_second"]) > 0 for row in rows)
    assert all(float(row["error"]) < 1e-4 for row in rows)
    assert "| 2 | SpladeEncoder |" in capsys.readouterr().out
