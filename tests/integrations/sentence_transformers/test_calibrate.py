"""Calibration of a ``SparseEncoder``: its bias is shifted and saved with its folder."""

import pytest
import torch
from sentence_transformers import SparseEncoder

import sparse_losses
from sparse_losses.integrations.sentence_transformers import use_splade_head
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
    assert torch.equal(one.head.bias, other.head.bias)


def test_wrong_models_and_targets_are_named(sparse):
    with pytest.raises(ValueError, match="expected `target_active` of at most"):
        sparse_losses.calibrate(sparse(), CORPUS, 10_000)
    with pytest.raises(TypeError, match="expected a SpladeEncoder, or a SparseEncoder"):
        sparse_losses.calibrate(torch.nn.Linear(2, 2), CORPUS, 9)
    with pytest.raises(TypeError, match="`texts`"):
        sparse_losses.calibrate(sparse(), "a text", 9)
    with pytest.raises(ValueError, match="`method`"):
        sparse_losses.calibrate(sparse(), CORPUS, 9, method="prune")
