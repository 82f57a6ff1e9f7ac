import importlib.util

import pytest

EXTRA = ("babel", "bm25s", "matplotlib", "rich", "tokenizers")
if any(importlib.util.find_spec(name) is None for name in EXTRA):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def inline(monkeypatch):
    """A pool of processes that works at once, in this one."""

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
