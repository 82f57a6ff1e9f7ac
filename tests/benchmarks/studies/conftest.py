import dataclasses
import importlib.util
import json
import random

import pytest

PACKAGES = ("bm25s", "rich", "tokenizers")
if any(importlib.util.find_spec(name) is None for name in PACKAGES):
    collect_ignore_glob = ["test_*.py"]
else:
    from benchmarks.studies import runs
    from examples.demo.corpus import split
    from examples.demo.model import ModelSize
    from tests.examples.demo.artificial import TINY, TOPICS, make_rows


@pytest.fixture
def inline(monkeypatch):
    """Replaces the pool of processes: jobs run in this one."""

    class Inline:
        def Pool(self, *_):
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def imap_unordered(self, work, jobs):
            return map(work, jobs)

    monkeypatch.setattr("multiprocessing.get_context", lambda _: Inline())


@pytest.fixture(scope="session")
def corpus():
    return split(make_rows(), ("name → document", "summary → rest"), {"artificial": "1"}, 40)


@pytest.fixture
def small(inline, monkeypatch, corpus):
    """Returns a function that shrinks the settings of a study; all corpora are artificial."""
    monkeypatch.setattr(runs, "LOADERS", dict.fromkeys(runs.LOADERS, lambda: corpus))

    def shrink(study):
        settings_of = study.settings_of

        def tiny(*arguments, **steps):
            settings = settings_of(*arguments, **steps)
            size = ModelSize(hidden=32, layers=1, heads=2, bias=settings.size.bias)
            return dataclasses.replace(settings, size=size, **TINY)

        monkeypatch.setattr(study, "settings_of", tiny)

    return shrink


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
