"""A tiny dense encoder ranks a collection on disk by every way to start."""

import pytest

from benchmarks.run.table import read
from benchmarks.studies import beir, from_dense
from sparse_losses import SpladeEncoder
from tests.representation.tiny_models import pair


def test_every_way_and_start_has_a_row_and_one_is_the_packages(folder, monkeypatch):
    path, output = folder.parent / "tiny" / "model", folder.parent / "study.csv"
    model, words = pair("bert")
    for part in (model.base_model, words):
        part.save_pretrained(path)
    monkeypatch.setenv("MINILM", str(path))
    monkeypatch.setattr(from_dense, "STARTS", (8, 20))
    monkeypatch.setattr(from_dense, "LENGTH", 40)
    for _ in range(2):  # the second time nothing is missing
        from_dense.main(["--data", str(folder), "--output", str(output)])
    rows = read(output)
    assert len(rows) == 1 + 2 * 7
    assert [row["start"] for row in rows if row["way"] == "shift"] == ["8", "20"]
    one = beir.load(folder)
    for row in rows:
        if row["way"] != "dense":
            assert float(row["document"]) == pytest.approx(float(row["start"]), abs=0.6)
        if row["way"] == "bias by token: its mean":
            options = {"start_active": int(row["start"]), "max_length": from_dense.LENGTH}
            encoder = SpladeEncoder.from_dense(path, one.documents, **options)
            x, y = (encoder.encode(texts).to_dense() for texts in (one.queries, one.documents))
            own = beir.ranked(x @ y.T, one.relevant)["ndcg_10"]
            assert sum(own) / len(own) == pytest.approx(float(row["ndcg_10"]), abs=0.02)
