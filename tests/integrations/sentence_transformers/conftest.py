"""Tiny models, made on the spot."""

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from tests.integrations.sentence_transformers.runs import NO_DROPOUT, sparse_encoder
from tests.representation.tiny_models import pair, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("tiny"), *pair("bert", **NO_DROPOUT))


@pytest.fixture
def sparse(folder):
    """Makes the same sparse encoder every time.

    In double precision: in single, rounding may flip a maximum or a hinge, and weights part.
    """
    return lambda: sparse_encoder(folder).double()


@pytest.fixture
def dense(folder):
    def make():
        transformer = Transformer(folder)
        pooling = Pooling(transformer.get_embedding_dimension())
        return SentenceTransformer(modules=[transformer, pooling], device="cpu").double()

    return make
