"""The head of a language model of transformers, whatever its architecture and its adapters."""

import copy

import peft
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, MobileBertConfig, MobileBertForMaskedLM

from sparse_losses import SpladeHead
from sparse_losses.functional import splade_pool
from tests.representation.tiny_models import ARCHITECTURES, CAUSAL, SIZES, causal_lm, masked_lm

V = 97


def inputs(rows=3, length=9):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, V, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [*((name, {}) for name in ARCHITECTURES), ("xlm-roberta", {"return_dict": False})],
)
def test_head_equals_pooling_of_the_models_logits(architecture, settings):
    model, batch = masked_lm(architecture, V, **settings), inputs()
    head = SpladeHead.from_masked_lm(model)
    upstream = torch.randn(3, V, generator=torch.Generator().manual_seed(1))

    expected = splade_pool(model(**batch)[0], batch["attention_mask"])
    (expected * upstream).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    hidden = model.base_model(**batch)[0]
    ours = head(hidden, batch["attention_mask"])
    (ours * upstream).sum().backward()
    assert 0.05 < (expected > 0).double().mean() < 0.99
    torch.testing.assert_close(ours, expected)
    assert gradients
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4)
        else:
            assert parameter.grad is None, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_head_shares_the_parameters_and_leaves_the_model_alone(architecture):
    model, batch = masked_lm(architecture, V), inputs()
    model.train()
    frozen = next(m for m in model.modules() if isinstance(m, torch.nn.LayerNorm))
    frozen.eval()
    modes = [module.training for module in model.modules()]
    state, names = copy.deepcopy(model.state_dict()), [n for n, _ in model.named_modules()]

    head = SpladeHead.from_masked_lm(model)
    assert [module.training for module in model.modules()] == modes
    assert [n for n, _ in model.named_modules()] == names
    assert not any(module._forward_hooks for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    theirs = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for parameter in head.parameters()} < theirs
    assert head.weight is model.get_output_embeddings().weight
    assert model.eval()(**batch).logits.shape == (3, 9, V)


def test_transform_is_applied_first():
    layer, hidden = torch.nn.Linear(4, 4), torch.randn(2, 3, 4)
    weight = torch.randn(7, 4)
    head = SpladeHead(weight, transform=layer)
    torch.testing.assert_close(head(hidden), SpladeHead(weight)(layer(hidden)))
    assert set(dict(head.named_parameters())) == {"transform.weight", "transform.bias"}


def test_other_models_are_refused():
    with pytest.raises(
        TypeError, match=r"expected `model` to be a masked or causal language model.*BertModel"
    ):
        SpladeHead.from_masked_lm(BertModel(BertConfig(vocab_size=V, **SIZES)))
    with pytest.raises(TypeError, match=r"causal language model of transformers.*got Linear"):
        SpladeHead.from_masked_lm(torch.nn.Linear(2, 2))
    # Its scores are of the projection and of another matrix beside it.
    unusual = MobileBertForMaskedLM(MobileBertConfig(vocab_size=V, **SIZES, embedding_size=8))
    with pytest.raises(TypeError, match=r"got MobileBertForMaskedLM: .*transform=layers"):
        SpladeHead.from_masked_lm(unusual)


def test_model_that_changes_the_projections_output_is_refused():
    model = masked_lm("distilbert", V)
    model.vocab_projector.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(TypeError, match="give no product with the states before them"):
        SpladeHead.from_masked_lm(model)


class Packed(nn.Linear):
    """Two weights of four bits in a byte, as bitsandbytes stores them."""

    def __init__(self, linear):
        super().__init__(1, 1, bias=False)
        packed = torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)


def test_quantised_projection_is_refused_by_name():
    model = causal_lm("llama", V)
    model.lm_head = Packed(model.lm_head)
    with pytest.raises(TypeError, match="its output embeddings are quantised, a Packed"):
        SpladeHead.from_masked_lm(model)


def test_model_with_a_nan_has_a_head():
    model = masked_lm("bert", V)
    with torch.no_grad():
        model.get_output_embeddings().bias[3] = float("nan")
    head = SpladeHead.from_masked_lm(model)
    hidden = torch.randn(1, 2, 16)
    assert head(hidden)[0, 3].isnan()


# ------------------------------------------------------------------------------------------------
# Decoder models


def test_scale_and_soft_cap_are_found():
    found = {kind: SpladeHead.from_masked_lm(causal_lm(kind, V)) for kind in CAUSAL}
    assert {kind: (head.logit_scale, head.softcap) for kind, head in found.items()} == {
        "llama": (1.0, None),
        "qwen3": (1.0, None),
        "gemma2": (1.0, 3.0),
        "gemma3": (1.0, None),
        "cohere": (0.0625, None),
        "granite": (0.125, None),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_soft_cap_of_a_model_in_half_precision_is_found(dtype):
    """Its logits are small here, where cap and identity agree."""
    model = causal_lm("gemma2", V, final_logit_softcapping=30.0).to(dtype)
    assert SpladeHead.from_masked_lm(model).softcap == 30.0


@pytest.mark.parametrize(
    "change",
    [torch.sigmoid, lambda x: x.clamp(max=50.0), lambda x: x + 1, lambda x: -x, lambda x: 0 * x],
    ids=["sigmoid", "clamp", "shift", "sign", "zero"],
)
def test_other_changes_of_the_logits_are_refused(change):
    model = causal_lm("llama", V)
    model.register_forward_hook(
        lambda module, args, output: type(output)(logits=change(output.logits))
    )
    with pytest.raises(TypeError, match="its logits are not the output of its output embeddings"):
        SpladeHead.from_masked_lm(model)


# ------------------------------------------------------------------------------------------------
# Adapters


def with_lora(model, targets, **options):
    """Return a PeftModel whose adapters change the outputs."""
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules=targets, **options)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.5)
    return model


ADAPTED = {
    "body": (["query", "q_proj"], {}),
    "projection": (["decoder", "lm_head"], {}),
    "both, rank-stabilised": (["query", "q_proj", "decoder", "lm_head"], {"use_rslora": True}),
    "transform": (["dense"], {}),
    "trained copy": (["query", "q_proj"], {"modules_to_save": ["decoder", "lm_head"]}),
}


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")  # BERT's are
@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("place", ADAPTED)
def test_head_of_an_adapted_model_equals_pooling_of_its_logits(kind, place):
    targets, options = ADAPTED[place]
    if (kind, place) == ("llama", "transform"):
        targets = ["gate_proj"]  # it has no layers before its projection
    make = masked_lm if kind == "bert" else causal_lm
    model, batch = with_lora(make(kind, V), targets, **options), inputs()
    plain = make(kind, V)(**batch).logits
    head = SpladeHead.from_masked_lm(model)
    upstream = torch.randn(3, V, generator=torch.Generator().manual_seed(1))
    learned = {n: p for n, p in model.named_parameters() if p.requires_grad}

    logits = model(**batch).logits
    assert place == "trained copy" or not torch.allclose(logits, plain, atol=0.1)
    expected = splade_pool(logits, batch["attention_mask"])
    wanted = torch.autograd.grad((expected * upstream).sum(), list(learned.values()))

    hidden = model.get_base_model().base_model(**batch)[0]
    ours = head(hidden, batch["attention_mask"])
    torch.testing.assert_close(ours, expected)
    actual = torch.autograd.grad((ours * upstream).sum(), list(learned.values()))
    for name, a, b in zip(learned, actual, wanted, strict=True):
        assert b.any(), name
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, msg=name)


def test_adapters_that_are_switched_off_or_merged_count_as_the_model_counts_them():
    model, batch = with_lora(causal_lm("llama", V), ["lm_head"]), inputs()
    head, hidden = SpladeHead.from_masked_lm(model), torch.randn(3, 9, 16)
    mask = batch["attention_mask"]

    def expected():
        return splade_pool(model.get_base_model().lm_head(hidden), mask)

    active = head(hidden, mask)
    torch.testing.assert_close(active, expected())
    with model.disable_adapter():
        torch.testing.assert_close(head(hidden, mask), expected())
        assert not torch.allclose(head(hidden, mask), active)
    model.merge_adapter()
    torch.testing.assert_close(head(hidden, mask), active)


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
@pytest.mark.parametrize(
    ("config", "why"),
    [
        (peft.LoraConfig(target_modules=["lm_head"], lora_dropout=0.1), r"got lora_dropout=0.1"),
        (peft.LoraConfig(target_modules=["lm_head"], use_dora=True), "got DoRA"),
        (peft.LoraConfig(target_modules=["lm_head"], lora_bias=True), "got lora_bias"),
        (
            peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
            r"expected LoRA as the only adapter of the output embeddings, got a peft.*ia3",
        ),
        (
            peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
            "expected adapters inside the layers, such as LoRA, got PROMPT_TUNING",
        ),
    ],
    ids=["dropout", "dora", "bias", "ia3", "prompt"],
)
def test_other_adapters_of_the_projection_are_refused_by_name(config, why):
    model = peft.get_peft_model(causal_lm("llama", V), config)
    with pytest.raises(TypeError, match=why):
        SpladeHead.from_masked_lm(model)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"logit_scale": -1.0}, ValueError),
        ({"logit_scale": None}, TypeError),
        ({"threshold": torch.ones(3)}, ValueError),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options, error):
    with pytest.raises(error, match=f"expected `{next(iter(options))}`"):
        SpladeHead(nn.Parameter(torch.randn(4, 2)), **options)
