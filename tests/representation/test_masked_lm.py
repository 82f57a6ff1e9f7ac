"""The head of a masked language model of transformers, whatever its architecture."""

import copy

import pytest
import torch
from transformers import BertConfig, BertModel, MobileBertConfig, MobileBertForMaskedLM

from sparse_losses import SpladeHead
from sparse_losses.functional import splade_pool
from tests.representation.tiny_models import ARCHITECTURES, SIZES, masked_lm

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


def test_half_precision_and_sparse_gradients():
    model, batch = masked_lm("xlm-roberta", V).bfloat16(), inputs()
    head = SpladeHead.from_masked_lm(model, sparse_grad=True)
    out = head(model.base_model(**batch)[0].detach(), batch["attention_mask"])
    assert out.dtype == torch.float32
    expected = splade_pool(model(**batch).logits, batch["attention_mask"])
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.05)
    out.sum().backward()
    assert head.weight.grad.layout == torch.sparse_coo


def test_transform_is_applied_first():
    layer, hidden = torch.nn.Linear(4, 4), torch.randn(2, 3, 4)
    weight = torch.randn(7, 4)
    head = SpladeHead(weight, transform=layer)
    torch.testing.assert_close(head(hidden), SpladeHead(weight)(layer(hidden)))
    assert set(dict(head.named_parameters())) == {"transform.weight", "transform.bias"}


def test_other_models_are_refused():
    with pytest.raises(
        TypeError, match=r"expected `model` to be a masked language model.*BertModel"
    ):
        SpladeHead.from_masked_lm(BertModel(BertConfig(vocab_size=V, **SIZES)))
    with pytest.raises(TypeError, match=r"masked language model of transformers.*got Linear"):
        SpladeHead.from_masked_lm(torch.nn.Linear(2, 2))
    # Its scores are of the projection and of another matrix beside it.
    unusual = MobileBertForMaskedLM(MobileBertConfig(vocab_size=V, **SIZES, embedding_size=8))
    with pytest.raises(TypeError, match=r"got MobileBertForMaskedLM: .*transform=layers"):
        SpladeHead.from_masked_lm(unusual)


def test_model_that_changes_the_projections_output_is_refused():
    model = masked_lm("distilbert", V)
    model.vocab_projector.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(TypeError, match="its logits are not the output of its output embeddings"):
        SpladeHead.from_masked_lm(model)


def test_model_with_a_nan_has_a_head():
    model = masked_lm("bert", V)
    with torch.no_grad():
        model.get_output_embeddings().bias[3] = float("nan")
    head = SpladeHead.from_masked_lm(model)
    hidden = torch.randn(1, 2, 16)
    assert head(hidden)[0, 3].isnan()
