import importlib.util

import pytest
import torch

EXTRA = ("tokenizers", "bm25s", "rich", "matplotlib")
if any(importlib.util.find_spec(name) is None for name in EXTRA):
    collect_ignore_glob = ["test_*.py"]
else:
    from sparse_losses.demo.corpus import Corpus, split
    from sparse_losses.demo.model import ModelSize
    from sparse_losses.demo.training import Settings
    from tests.demo.artificial import make_rows


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus() -> "Corpus":
    return split(make_rows(), ("name → document", "summary → rest"), {"artificial": "1"}, 40)


@pytest.fixture
def settings() -> "Settings":
    return Settings(
        steps=12,
        batch_size=8,
        vocab_size=400,
        size=ModelSize(hidden=32, layers=1, heads=2),
        probe_every=5,
        probe_rows=20,
    )
