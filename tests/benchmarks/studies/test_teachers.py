"""A teacher's scores in several forms train a model on a collection on disk."""

import pytest
import torch

pytest.importorskip("sentence_transformers")

from benchmarks.run.table import read
from benchmarks.studies import teachers


@pytest.mark.parametrize("pretrained", [True], indirect=True)
def test_every_form_is_trained_once(folder, pretrained, monkeypatch):
    import sentence_transformers

    path, output = str(pretrained[0]), folder.parent / "teachers.csv"

    class BiEncoder:
        def __init__(self, *_: object, **options: object) -> None: ...

        def encode(self, texts: list[str], **options: object) -> torch.Tensor:
            seeds = (torch.Generator().manual_seed(len(text)) for text in texts)
            rows = torch.stack([torch.randn(8, generator=seed) for seed in seeds])
            return torch.nn.functional.normalize(rows)

    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", BiEncoder)
    monkeypatch.setattr(teachers, "POINTS", [(4, 8)])
    options = ["--data", str(folder), "--model", path, "--teacher", "any", "--steps", "2"]
    for _ in range(2):  # what is there is not trained again
        assert teachers.main([*options, "--seeds", "0", "--output", str(output)]) == 0
    rows = read(output)
    forms = ["none", *(f"{form}{mixed}" for form in teachers.FORMS for mixed in ("", ", mixed"))]
    assert [row["teacher"] for row in rows] == [form for form in forms for _ in range(2)]
    by_form = {row["teacher"]: row for row in rows}
    same = ("ndcg_10", "query", "document", "products")
    # Mixed scores have neither shift nor scale.
    assert [by_form["cosines, mixed"][x] for x in same] == [
        by_form["logits, mixed"][x] for x in same
    ]
