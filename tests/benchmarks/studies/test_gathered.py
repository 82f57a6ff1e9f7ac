"""Ranks send entries, not rows, and get the value and the gradient of one process."""

from pathlib import Path

from benchmarks.run.table import read
from benchmarks.studies import gathered


def test_of_sparse_vectors_entries_are_sent(tmp_path: Path, capsys):
    output = tmp_path / "gathered.csv"
    sizes = ("--ranks", "2", "--pairs", "3", "--vocabulary", "400", "--active", "0.02")
    assert gathered.main([*sizes, "--output", str(output)]) == 0
    dense, entries = read(output)
    # Rows of documents in one direction, their gradients in the other.
    assert float(dense["mib_sent"]) >= 2 * (2 * 3 * 400 * 4) / 2**20
    assert 0 < float(entries["mib_sent"]) < float(dense["mib_sent"]) / 10
    for row in (dense, entries):
        assert float(row["value_difference"]) < 1e-9
        assert float(row["gradient_difference"]) < 1e-9
    assert "| CSR |" in capsys.readouterr().out
