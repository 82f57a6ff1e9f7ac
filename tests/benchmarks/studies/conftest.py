import importlib.util
import json
import random

import pytest

if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]

TOPICS = {
    "graph": "node edge path shortest weight neighbour cycle tree vertex connected",
    "matrix": "row column inverse determinant rank eigenvalue diagonal transpose norm trace",
    "file": "open read write close folder name copy delete line encoding",
    "date": "year month day hour zone parse format week calendar second",
}


@pytest.fixture
def folder(tmp_path):
    """Sixty documents of three sentences on four topics, and a query for each topic."""
    rng, names = random.Random(3), sorted(TOPICS)
    words = [[rng.sample(TOPICS[name].split(), 7) for _ in "abc"] for name in names * 15]
    texts = [". ".join(" ".join(sentence) for sentence in sentences) for sentences in words]
    grades = [f"{names[n % 4]}\td{n}\t{(n < 4) + (n < 20)}" for n in range(24)]
    lines = {
        "corpus.jsonl": [json.dumps({"_id": f"d{n}", "text": t}) for n, t in enumerate(texts)],
        "queries.jsonl": [json.dumps({"_id": n, "text": f"{n} zebra"}) for n in (*names, "other")],
        "qrels/test.tsv": ["query-id\tcorpus-id\tscore", *grades],
    }
    (tmp_path / "toy/qrels").mkdir(parents=True)
    for name, own in lines.items():
        (tmp_path / "toy" / name).write_text("\n".join(own) + "\n", encoding="utf-8")
    return tmp_path / "toy"


@pytest.fixture(params=[True, False], ids=["with its head", "without"])
def pretrained(request, tmp_path, monkeypatch):
    """Returns the folder of a tiny model with its tokenizer, and both of them."""
    from benchmarks.studies import collection
    from tests.representation import tiny_models

    monkeypatch.setattr(collection, "LENGTHS", (32, 200))  # its tokens are letters
    model, tokenizer = tiny_models.pair("bert", max_position_embeddings=200)
    model = model if request.param else model.bert
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "tiny" / "model")
    return tmp_path / "tiny" / "model", model, tokenizer
