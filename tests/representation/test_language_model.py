"""The head of a language model, with and without adapters, and what is refused by name."""

import copy

import peft
import pytest
import torch
from torch import nn
from transformers import MobileBertConfig, MobileBertForMaskedLM

from sparse_losses import SpladeEncoder, SpladeHead
from sparse_losses.functional import splade_pool
from sparse_losses.representation._language_model import head_of
from tests.representation.tiny_models import ARCHITECTURES, SIZES, language_model, pair, with_lora

V = 97


def inputs(rows=3, length=9):
    ids = torch.randint(5, V, (rows, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_head_shares_the_parameters_and_leaves_the_model_alone(architecture):
    model, batch = language_model(architecture, V), inputs()
    model.train()
    next(m for m in model.modules() if isinstance(m, nn.LayerNorm)).eval()
    modes = [module.training for module in model.modules()]
    state, names = copy.deepcopy(model.state_dict()), [n for n, _ in model.named_modules()]

    head = SpladeHead.from_masked_lm(model)
    assert [module.training for module in model.modules()] == modes
    assert [n for n, _ in model.named_modules()] == names
    assert not any(module._forward_hooks for module in model.modules())
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    theirs = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for parameter in head.parameters()} < theirs
    assert head.weight is model.get_output_embeddings().weight
    assert model.eval()(**batch).logits.shape == (3, 9, V)


def test_product_that_a_layer_computes_itself_is_found():
    """DeBERTa's trained head multiplies with the word embeddings, and names another layer."""
    model, batch = language_model("deberta-v2", V, legacy=False), inputs()
    head, hidden = SpladeHead.from_masked_lm(model), model.base_model(**batch)[0]
    assert head.weight is model.get_input_embeddings().weight
    expected = splade_pool(model(**batch).logits, batch["attention_mask"])
    torch.testing.assert_close(head(hidden, batch["attention_mask"]), expected)


def test_compiled_model_is_the_model_inside():
    model, words = pair("bert")
    encoder = SpladeEncoder(torch.compile(model, backend="eager"), words)
    assert encoder.model is model
    expected = SpladeEncoder(model, words).encode(["a"], output="dense")
    assert torch.equal(encoder.encode(["a"], output="dense"), expected)


def packed():
    """Two weights of four bits in a byte, as bitsandbytes stores them."""
    model = language_model("llama", V)
    bytes_of_two = torch.zeros(model.lm_head.weight.numel() // 2, 1, dtype=torch.uint8)
    model.lm_head.weight = nn.Parameter(bytes_of_two, requires_grad=False)
    return model


def doubled():
    model = language_model("distilbert", V)
    model.vocab_projector.register_forward_hook(lambda module, args, output: output * 2)
    return model


NONE, MOBILE = "masked or causal language model", {**SIZES, "vocab_size": V, "embedding_size": 8}


def test_other_models_are_refused_by_name():
    for model, why in [
        (language_model("bert", V).base_model, f"{NONE}.*BertModel"),
        (nn.Linear(2, 2), f"{NONE} of transformers.*got Linear"),
        (MobileBertForMaskedLM(MobileBertConfig(**MOBILE)), "got Mobile.*transform=layers"),
        (packed(), "embeddings are no matrix but a Linear"),
        (doubled(), "give no product with its hidden states"),
    ]:
        with pytest.raises(TypeError, match=why):
            SpladeHead.from_masked_lm(model)


CHANGES = {
    "sigmoid": torch.sigmoid,
    "clamp": lambda x: x.clamp(max=50.0),
    "one column": lambda x: x - nn.functional.one_hot(torch.tensor(5), V),
    "sign": lambda x: -x,
    "parameter": lambda x: x * nn.Parameter(torch.ones(())),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_logits_are_refused_by_name(change):
    model = language_model("llama", V)
    model.register_forward_hook(lambda _, __, x: type(x)(logits=change(x.logits)))
    with pytest.raises(TypeError, match="its logits are not the output of its output"):
        SpladeHead.from_masked_lm(model)


def test_model_with_a_nan_has_a_head():
    model = language_model("bert", V)
    with torch.no_grad():
        model.get_output_embeddings().bias[3] = float("nan")
    assert SpladeHead.from_masked_lm(model)(torch.randn(1, 2, 16))[0, 3].isnan()


def test_scale_and_soft_cap_are_found_also_in_half_precision():
    """test_every_language_model has those of all other classes."""
    assert head_of(language_model("granite", V)).logit_scale == 0.125
    model = language_model("gemma2", V, final_logit_softcapping=30.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # small logits: cap and 1 agree
        assert head_of(model.to(dtype)).softcap == 30.0


@pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_that_a_merge_would_change_are_refused(target, tied):
    model = with_lora(language_model("llama", V, tie_word_embeddings=tied), [target])
    if target == "embed_tokens" and not tied:
        SpladeHead.from_masked_lm(model)
    else:
        with pytest.raises(TypeError, match=r"adapters on its output .* tied .*modules_to_save"):
            SpladeHead.from_masked_lm(model)


def test_prompt_tuning_is_refused_by_name():
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(language_model("llama", V), config)
    with pytest.raises(TypeError, match="such as LoRA, got PROMPT_TUNING"):
        SpladeHead.from_masked_lm(model)
