"""An encoder keeps as many dimensions as it is calibrated to, saved and exported too."""

import copy

import pytest
import torch
from transformers import AutoModelForMaskedLM

from sparse_losses import SpladeEncoder
from tests.representation.tiny_models import CORPUS, ISSUE, TEXTS, VARIANTS, make, pair

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
def test_calibrated_texts_keep_the_target(architecture, variant, target):
    encoder = make(architecture, **VARIANTS[variant])
    with torch.no_grad():
        if not encoder.expansion:  # logits of both signs
            encoder.importance[-1].bias.fill_(-0.1)
    before, bias = active(encoder), bias_of(encoder).clone()
    t = encoder.calibrate(DOCUMENTS, target)
    assert active(encoder) == pytest.approx(target, rel=0.02)
    assert (t > 0) == (target < before)
    torch.testing.assert_close(bias_of(encoder), bias - t)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.0, 0.1])  # of the bias before
@pytest.mark.parametrize("target", [12, 33.3])
def test_model_in_half_precision_keeps_the_target(dtype, spread, target):
    encoder = make()
    with torch.no_grad():
        encoder.head.bias.normal_(std=spread, generator=torch.Generator().manual_seed(0))
        encoder.head.bias += 1.0
    encoder.to(dtype)
    bias = bias_of(encoder).clone()
    t = encoder.calibrate(DOCUMENTS, target)
    assert torch.equal(bias_of(encoder), bias - t)
    assert active(encoder) == pytest.approx(target, rel=0.02)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batch_size_and_training_mode_have_no_effect(batch_size):
    encoder = make("modernbert")
    other = copy.deepcopy(encoder).train()
    other.model.base_model.eval()
    modes = [module.training for module in other.modules()]
    expected = encoder.calibrate(DOCUMENTS, 16)
    assert other.calibrate(DOCUMENTS, 16, batch_size=batch_size) == pytest.approx(expected, 1e-4)
    assert [module.training for module in other.modules()] == modes


def test_logits_of_all_positions_are_never_computed():
    encoder = make()

    def refuse(*_):
        raise AssertionError("the vocabulary projection ran on all positions")

    encoder.model.get_output_embeddings().register_forward_pre_hook(refuse)
    encoder.calibrate(DOCUMENTS, 16)
    assert active(encoder) == pytest.approx(16, rel=0.02)


def test_equal_texts_are_kept_or_dropped_together():
    encoder = make()
    encoder.calibrate([TEXTS[0]] * 7, 10.2)  # 71 entries: ten tokens of seven texts are nearest
    assert active(encoder, [TEXTS[0]]) == 10
    encoder.calibrate([TEXTS[0]] * 7, 1 / 7)  # of equal entries at the top all stay
    assert active(encoder, [TEXTS[0]]) == 1


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
    encoder.calibrate(DOCUMENTS, 9)
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
        encoder.calibrate(DOCUMENTS, 9)


@pytest.mark.parametrize(
    ("options", "texts", "target", "message"),
    [
        ({}, DOCUMENTS, 1e4, r"`target_active` of at most \d+, the mean that can .* got 1000"),
        ({"expansion": False}, ["the dog", "the the"], 2, "of at most 1.5, the mean that can be"),
        ({}, ["the dog"], 0.1, "at least one dimension, got 1 texts and a `target_active` of"),
        ({}, DOCUMENTS, 0, "`target_active`"),
    ],
)
def test_wrong_input_is_an_error_and_the_bias_is_unchanged(options, texts, target, message):
    encoder = make(**options)
    bias = bias_of(encoder).clone()
    with pytest.raises(ValueError, match=message):
        encoder.calibrate(texts, target)
    assert torch.equal(bias_of(encoder), bias)


def test_nan_logits_are_an_error():
    encoder = make()
    with torch.no_grad():
        encoder.head.bias[3] = torch.nan
    with pytest.raises(ValueError, match="expected finite logits"):
        encoder.calibrate(DOCUMENTS, 9)
