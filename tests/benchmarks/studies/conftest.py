import dataclasses
import importlib.util

import pytest

PACKAGES = ("bm25s", "matplotlib", "rich", "tokenizers")
if any(importlib.util.find_spec(name) is None for name in PACKAGES):
    collect_ignore_glob = ["test_*.py"]
else:
    from benchmarks.studies import runs
    from examples.demo.corpus import split
    from examples.demo.model import ModelSize
    from tests.examples.demo.artificial import TINY, make_rows


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
