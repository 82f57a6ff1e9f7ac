"""``calibrate`` of a ``SparseEncoder``, a ``SpladeHead`` and an encoder of this package."""

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

import sparse_losses
from sparse_losses import SpladeHead
from sparse_losses.integrations.sentence_transformers import remove_splade_head, use_splade_head
from tests.representation.tiny_models import CORPUS, TEXTS, make


def active(model, texts):
    return (model.encode_document(texts).to_dense() > 0).sum(1).double().mean().item()


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_vectors_keep_the_target_and_the_folder_keeps_the_vectors(
    with_head, activation, sparse, tmp_path
):
    model = sparse()
    model[1].activation_function = activation
    if with_head:
        use_splade_head(model)
    assert active(model, CORPUS) > 20
    t = sparse_losses.calibrate(model, CORPUS, 9)
    assert t > 0
    assert active(model, CORPUS) == pytest.approx(9, rel=0.02)
    model.save_pretrained(str(tmp_path))
    again = SparseEncoder(str(tmp_path), device="cpu").double()
    expected = model.encode_document(TEXTS).to_dense()
    torch.testing.assert_close(again.encode_document(TEXTS).to_dense(), expected)


def test_an_encoder_of_this_package_calibrates_itself():
    one, other = make(), make()
    assert sparse_losses.calibrate(one, CORPUS, 9) == other.calibrate(CORPUS, 9)
    assert one.document_threshold == other.document_threshold > 0
    assert sparse_losses.calibrate(one, CORPUS, 5, method="shift") > 0


def test_pruned_vectors_keep_the_target_and_their_weights_in_this_process(sparse, tmp_path):
    model = sparse()
    with pytest.raises(ValueError, match="expected method='shift', or a model with use_splade"):
        sparse_losses.calibrate(model, CORPUS, 9, method="prune")
    before = use_splade_head(model).encode_document(CORPUS).to_dense()
    for target in (5, 9):
        sparse_losses.calibrate(model, CORPUS, target, method="prune")
        assert active(model, CORPUS) == pytest.approx(target, rel=0.02)
    after = model.encode_document(CORPUS).to_dense()
    assert torch.equal(after, before.where(after > 0, 0.0))
    with pytest.raises(ValueError, match="expected `target_active` of at most"):
        sparse_losses.calibrate(model, CORPUS, 10_000, method="prune")
    assert torch.equal(model.encode_document(CORPUS).to_dense(), after)
    with pytest.warns(UserWarning, match="threshold of .* is not saved"):
        model.save_pretrained(str(tmp_path))
    remove_splade_head(model).save_pretrained(str(tmp_path))
    assert active(model, CORPUS) > 20


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("threshold", [None, 0.5, torch.zeros(30)])
def test_a_head_is_pruned(activation, threshold):
    torch.manual_seed(0)
    head = SpladeHead(torch.randn(30, 8), activation=activation, threshold=threshold)
    batches = [(torch.randn(4, 5, 8), torch.ones(4, 5)) for _ in range(3)]
    t = sparse_losses.calibrate(head, iter(batches), 6.5)
    vectors = torch.cat([head(*batch) for batch in batches])
    assert (vectors > 0).sum() == 6.5 * 12
    assert head.threshold == t
    assert f"threshold={t}" in repr(head)
    with pytest.raises(ValueError, match="at least one dimension, got 0 texts"):
        sparse_losses.calibrate(head, [], 6.5)
    with pytest.raises(ValueError, match="`method`"):
        sparse_losses.calibrate(head, batches, 6.5, method="shift")
    assert head.threshold == t


@pytest.mark.parametrize("with_head", [False, True])
def test_the_document_side_of_a_router_is_calibrated(with_head, sparse, tmp_path):
    theirs = sparse()
    static = SparseStaticEmbedding(theirs.tokenizer, torch.rand(len(theirs.tokenizer)))
    sides = {"query_modules": [static], "document_modules": list(theirs)}
    model = SparseEncoder(modules=[Router.for_query_document(**sides)], device="cpu")
    if with_head:
        use_splade_head(model)
    queries = model.encode_query(TEXTS).to_dense()
    assert sparse_losses.calibrate(model, CORPUS, 9) > 0
    assert active(model, CORPUS) == pytest.approx(9, rel=0.02)
    model.save_pretrained(str(tmp_path))
    again = SparseEncoder(str(tmp_path), device="cpu").double()
    documents = model.encode_document(TEXTS).to_dense().double()
    torch.testing.assert_close(again.encode_document(TEXTS).to_dense().double(), documents)
    assert torch.equal(model.encode_query(TEXTS).to_dense(), queries)


def test_wrong_models_and_targets_are_named(sparse):
    with pytest.raises(ValueError, match="expected `target_active` of at most"):
        sparse_losses.calibrate(sparse(), CORPUS, 10_000)
    with pytest.raises(TypeError, match="expected a SpladeEncoder, a SpladeHead, or a Spa"):
        sparse_losses.calibrate(torch.nn.Linear(2, 2), CORPUS, 9)
