import pytest

from examples.demo.corpus import Corpus, split
from examples.demo.model import ModelSize
from examples.demo.training import Settings
from tests.examples.demo.artificial import TINY, make_rows


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return split(make_rows(), ("name → document", "summary → rest"), {"artificial": "1"}, 40)


@pytest.fixture
def settings() -> Settings:
    size = ModelSize(hidden=32, layers=1, heads=2)
    return Settings(steps=12, size=size, document_active=12, query_active=6, **TINY)
