"""An encoder keeps as many dimensions as it is calibrated to: pruned, or with a shifted bias."""

import copy

import pytest
import torch
from transformers import AutoModelForMaskedLM

from sparse_losses import SpladeEncoder
from tests.representation.tiny_models import CORPUS, ISSUE, VARIANTS, make, pair

DOCUMENTS = [*CORPUS[:7], "dogs over the fox", "추천 메뉴", "U.S.A. weight"]


def bias_of(encoder):
    return encoder.head.bias if encoder.expansion else encoder.importance[-1].bias


def active(encoder, texts=DOCUMENTS):
    return len(encoder.encode(texts).values()) / len(texts)


@pytest.mark.parametrize(
    ("architecture", "variant", "target"),
    [
        *(("bert", "gate", target) for target in (20, 110)),
        *(("bert", "all", target) for target in (2, 4.5)),
        *(("bert", "plain", target) for target in (0.3, 7.4, 110, 150)),  # 150: all
        *((architecture, "gate", 33.3) for architecture in ISSUE[1:]),
    ],
)
def test_texts_with_a_shifted_bias_keep_the_target(architecture, variant, target):
    encoder = make(architecture, **VARIANTS[variant])
    with torch.no_grad():
        if not encoder.expansion:  # logits of both signs
            encoder.importance[-1].bias.fill_(-0.1)
    before, bias = active(encoder), bias_of(encoder).clone()
    t = encoder.calibrate(DOCUMENTS, target, method="shift")
    assert active(encoder) == pytest.approx(target, rel=0.02)
    assert (t > 0) == (target < before)
    torch.testing.assert_close(bias_of(encoder), bias - t)


@pytest.mark.parametrize("target", [12, 33.3])
def test_shift_of_a_bias_in_half_precision_is_near_the_target(target):
    encoder = make().to(torch.bfloat16)
    bias = bias_of(encoder).clone()
    t = encoder.calibrate(DOCUMENTS, target, method="shift")
    assert torch.equal(bias_of(encoder), bias - t)
    assert active(encoder) == pytest.approx(target, rel=0.05)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batch_size_and_training_mode_have_no_effect(batch_size):
    encoder = make("modernbert")
    other = copy.deepcopy(encoder).train()
    other.model.base_model.eval()
    modes = [module.training for module in other.modules()]
    options = {"target_active": 16, "method": "shift"}
    expected = encoder.calibrate(DOCUMENTS, **options)
    t = other.calibrate(DOCUMENTS, batch_size=batch_size, **options)
    assert t == pytest.approx(expected, 1e-4)
    assert [module.training for module in other.modules()] == modes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("bert", {}), ("modernbert", {}), ("modernbert", {"decoder_bias": False})],
)
@pytest.mark.parametrize("gated", [True, False])
def test_calibration_survives_saving_and_export(architecture, settings, tied, gated, tmp_path):
    SparseEncoder = pytest.importorskip("sentence_transformers").SparseEncoder
    model, words = pair(architecture, tie_word_embeddings=tied, **settings)
    encoder = SpladeEncoder(model, words, gate=gated).eval()
    encoder.calibrate(DOCUMENTS, 9, method="shift")
    encoder.save_pretrained(tmp_path)
    vectors = encoder.encode(DOCUMENTS, output="dense")
    loaded = SpladeEncoder.from_pretrained(tmp_path)
    assert torch.equal(loaded.encode(DOCUMENTS, output="dense"), vectors)
    assert active(loaded) == pytest.approx(9, rel=0.02)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again.get_output_embeddings().bias, encoder.head.bias)
    embeddings = again.get_input_embeddings().weight, again.get_output_embeddings().weight
    assert torch.equal(*embeddings) == tied
    if not gated:
        batch = encoder.tokenize(DOCUMENTS)
        with torch.no_grad():
            logits = again(**batch).logits
        pooled = logits.masked_fill(batch["attention_mask"][..., None] == 0, -torch.inf).amax(1)
        torch.testing.assert_close(pooled.relu().log1p(), vectors)
        theirs = SparseEncoder(str(tmp_path), device="cpu")
        torch.testing.assert_close(
            theirs.encode(DOCUMENTS, convert_to_sparse_tensor=False).cpu(), vectors
        )


def test_model_without_bias_and_decoder_bias_is_an_error():
    model, words = pair("bert")
    model.get_output_embeddings().bias = None
    encoder = SpladeEncoder(model, words)
    with pytest.raises(ValueError, match="`decoder_bias` to add one, got BertFor"):
        encoder.calibrate(DOCUMENTS, 9, method="shift")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("side", ["document", "query"])
@pytest.mark.parametrize(
    ("variant", "target"), [("plain", 7.4), ("gate", 20), ("idf", 5), ("all", 2), ("log1p", 9)]
)
def test_pruned_texts_keep_the_target_and_the_weights_that_stay(
    variant, target, side, dtype, tmp_path
):
    options = {"activation": "log1p_relu"} if variant == "log1p" else VARIANTS[variant]
    encoder = make(**options).to(dtype)
    encode = getattr(encoder, f"encode_{side}")
    other = encoder.encode_query if side == "document" else encoder.encode_document
    before, bias = encode(DOCUMENTS, output="dense"), bias_of(encoder).clone()
    encoder.calibrate(DOCUMENTS, 1.5, side=side)
    t = encoder.calibrate(DOCUMENTS, target, side=side)  # again of all dimensions
    after = encode(DOCUMENTS, output="dense")
    assert (after > 0).sum(1).double().mean().item() == pytest.approx(target, rel=0.02)
    assert after.max() == before.max() > 0
    kept = after > 0
    # The smallest of the weights that stay is above all that go, but for the idf weights.
    if variant not in ("idf", "all"):
        assert after[kept].min() > before[~kept].max()
    assert torch.equal(after, before.where(kept, 0.0))
    assert torch.equal(bias_of(encoder), bias)
    assert torch.equal(other(DOCUMENTS, output="dense"), before)
    batch = encoder.tokenize(DOCUMENTS)
    with torch.no_grad():
        assert (encoder(**batch) > 0).sum() > kept.sum(), "without a side nothing is pruned"
        pruned, logits = encoder(**batch, side=side, return_logits=True)
        assert torch.equal(logits, encoder(**batch, return_logits=True)[1])
    assert torch.equal(pruned.float() > 0, encode(DOCUMENTS, output="dense", batch_size=99) > 0)
    assert f"{side}_threshold={t!r}" in repr(encoder)
    encoder.save_pretrained(tmp_path)
    again = SpladeEncoder.from_pretrained(tmp_path, dtype=dtype)
    assert getattr(again, f"{side}_threshold") == t
    torch.testing.assert_close(getattr(again, f"encode_{side}")(DOCUMENTS, output="dense"), after)


@pytest.mark.parametrize("method", ["prune", "shift"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"target_active": 1e4},
            ValueError,
            r"at most .*, the mean that (are|can be) active, got 1",
        ),
        ({"target_active": 0.01}, ValueError, "at least one dimension, got 10 texts and a"),
        ({"target_active": 0}, ValueError, "`target_active`"),
        ({"side": "both"}, ValueError, "`side`"),
        ({"method": "cut"}, ValueError, "`method`"),
        ({"texts": "a text"}, TypeError, "`texts`"),
    ],
)
def test_wrong_input_is_an_error_and_changes_nothing(options, error, message, method):
    encoder = make(document_threshold=0.5)
    bias = bias_of(encoder).clone()
    defaults = {"texts": DOCUMENTS, "target_active": 5, "method": method}
    with pytest.raises(error, match=message):
        encoder.calibrate(**(defaults | options))
    assert encoder.document_threshold == 0.5
    assert torch.equal(bias_of(encoder), bias)


def test_nan_logits_are_an_error():
    encoder = make()
    with torch.no_grad():
        encoder.head.bias[3] = torch.nan
    for method in ("prune", "shift"):
        with pytest.raises(ValueError, match="expected finite logits"):
            encoder.calibrate(DOCUMENTS, 9, method=method)
