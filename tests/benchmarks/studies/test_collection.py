"""Trainings on a collection on disk, from scratch and of a pretrained model."""

import pytest
import torch

from benchmarks.run.table import read
from benchmarks.studies import beir, collection, learn
from sparse_losses import SpladeEncoder


def test_the_cut_model_gives_the_vectors_of_the_whole(folder, pretrained):
    path, model, tokenizer = pretrained
    read = beir.load(folder)
    task = collection.Task([read], str(path))
    assert len(task.kept) < len(tokenizer)
    if not task.is_trained:
        return  # its head is the studies' own
    ((_, _, documents),) = task.tests
    vectors = learn.vectors(collection.Tower(task.make(), task.kept).eval(), documents)
    whole = SpladeEncoder(model, tokenizer).encode(read.documents, output="dense")
    torch.testing.assert_close(vectors, whole[:, task.kept])


def test_pretrained_models_and_one_from_scratch_are_trained(folder, pretrained, monkeypatch):
    path, output = pretrained[0], folder.parent / "study.csv"
    monkeypatch.setattr(collection, "START", 20)
    monkeypatch.setattr(collection, "POINTS", [(4, 8)])
    options = ["--data", str(folder), "--steps", "2", "--seeds", "0", "--output", str(output)]
    options += ["--arms", "prune", "topk16"]
    for model in ([], ["--model", str(path)]):
        collection.main([*options, *model])
    rows = read(output)
    names = [(row["model"], row["arm"], row["asked_document"]) for row in rows]
    start = "" if "MaskedLM" in pretrained[1].__class__.__name__ else "start 20, "
    assert names == [
        (model, start + arm, asked)
        for model, start in (("scratch", "start 1/4, "), ("tiny", start))
        for arm in ("nothing", "topk 16 from 75%")
        for asked in ("", "8")
    ]
    assert all(0 <= float(row["ndcg_10"]) <= 1 for row in rows)
    assert [row["source"][:24] for row in rows] == ["60 documents, 4 queries,"] * len(rows)


def test_a_missing_model_ends_with_a_sentence(folder):
    nowhere = str(folder / "nowhere")  # not the name of a repository: nobody is asked
    with pytest.raises(SystemExit, match=f"error: cannot load the --model {nowhere}"):
        collection.main(["--data", str(folder), "--model", nowhere])
