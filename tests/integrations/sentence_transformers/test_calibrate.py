"""``calibrate`` of a ``SparseEncoder``, with the head of this package and without it."""

import copy

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

from sparse_losses import calibrate
from sparse_losses.integrations.sentence_transformers import use_splade_head
from tests.representation.tiny_models import CORPUS, TEXTS

pytestmark = pytest.mark.parametrize("with_head", [False, True])
BOTH = {"queries": TEXTS, "query_target": 4, "verbose": False}


def active(vectors):
    return (vectors.to_dense() > 0).sum(1).double().mean().item()


def vectors_of(model):
    return model.encode_document(CORPUS).to_dense(), model.encode_query(TEXTS).to_dense()


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_both_sides_are_pruned_in_this_process(with_head, activation, sparse):
    model = sparse()
    model[1].activation_function = activation
    if with_head:
        use_splade_head(model)
    before = vectors_of(model)
    model.max_active_dims = 7  # as a saved folder may have it
    for target in (5, 9):
        found = calibrate(model.train(), CORPUS, target, **BOTH)
        assert found.before.document_active > 100, "of whole vectors"
        assert active(model.encode_document(CORPUS)) == pytest.approx(target, rel=0.02)
    assert model.max_active_dims is None, "it would cut what the threshold keeps"
    after = vectors_of(copy.deepcopy(model))
    assert active(after[1]) == pytest.approx(4, rel=0.02)
    for left, whole in zip(after, before, strict=True):
        assert torch.equal(left, whole.where(left > 0, 0.0))
        assert (left > 0).any(1).all()
    assert torch.equal(model.encode(CORPUS).to_dense(), after[0])
    batch = model.train().preprocess(CORPUS)
    assert active(model(batch)["sentence_embedding"]) > 100, "training never prunes"
    with pytest.raises(ValueError, match="only pruning a SpladeEncoder takes several"):
        calibrate(model, CORPUS, (5, 9), verbose=False)
    assert torch.equal(model.encode_document(CORPUS).to_dense(), after[0])


@pytest.mark.parametrize("target", [9, 130])
def test_a_folder_keeps_a_shift(with_head, target, sparse, tmp_path):
    model = use_splade_head(sparse()) if with_head else sparse()
    found = calibrate(model, CORPUS, target, method="shift", verbose=False)
    assert (found.shift > 0) == (target == 9)
    assert active(model.encode_document(CORPUS)) == pytest.approx(target, rel=0.02)
    model.save_pretrained(str(tmp_path))
    again = SparseEncoder(str(tmp_path), device="cpu").double()
    for one, other in zip(vectors_of(again), vectors_of(model), strict=True):
        torch.testing.assert_close(one, other)


def test_the_document_side_of_a_router_is_calibrated(with_head, sparse):
    theirs = sparse()
    static = SparseStaticEmbedding(theirs.tokenizer, torch.rand(len(theirs.tokenizer)))
    sides = {"query_modules": [static], "document_modules": list(theirs)}
    model = SparseEncoder(modules=[Router.for_query_document(**sides)], device="cpu")
    if with_head:
        use_splade_head(model)
    before = vectors_of(model)[1]
    found = calibrate(model, CORPUS, 9, queries=TEXTS, verbose=False)
    documents, queries = vectors_of(model)
    assert active(documents) == pytest.approx(9, rel=0.02)
    assert found.after.query_active == active(queries)
    assert torch.equal(queries, before)
    found = calibrate(model, CORPUS, 9, queries=TEXTS, query_target=2, verbose=False)
    assert found.after.query_active == active(vectors_of(model)[1]) < found.before.query_active
    assert calibrate(model, CORPUS, 5, method="shift", verbose=False).shift > 0
    assert active(model.encode_document(CORPUS)) == pytest.approx(5, rel=0.02)
