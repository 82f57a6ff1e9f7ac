"""The head: from hidden states to sparse vectors, without the logits in between."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_losses
from sparse_losses import SpladeHead
from sparse_losses.functional import info_nce_loss, splade_head, splade_pool
from sparse_losses.representation import head
from tests.representation import head_oracle as oracle
from tests.strategies import seeds

WAYS = [(screening, tile) for screening in (False, True) for tile in (None, 7)]
RAGGED = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]])


@pytest.fixture(params=WAYS, ids=lambda way: f"screening_{way[0]}-tile_{way[1]}")
def way(request, monkeypatch):
    """Run a test with and without screening, over one tile and over many."""
    screening, tile = request.param
    monkeypatch.setattr(head, "SCREENING", screening)
    monkeypatch.setattr(head, "TILE", tile)


every_way = pytest.mark.usefixtures("way")


@st.composite
def problems(draw) -> dict:
    """Draw the arrays of a call; fp32 computes their logits exactly, ties and zeros included."""
    rng = np.random.default_rng(draw(seeds))
    batch, length, vocab = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 6)),
        draw(st.integers(1, 17)),
    )
    width = draw(st.integers(1, 6))
    lattice = draw(st.booleans())
    size = {"bits": 1, "scale": 1.0} if lattice else {}
    arrays = {
        "hidden": oracle.grid(rng, (batch, length, width), **size),
        "weight": oracle.grid(rng, (vocab, width), **size),
        "bias": None,
        "attention_mask": None,
        "gate": None,
    }
    assert oracle.is_exact(arrays["hidden"], arrays["weight"], 2.0**-12)
    if draw(st.booleans()):
        arrays["bias"] = oracle.grid(rng, vocab, **size)
    if draw(st.booleans()):
        arrays["attention_mask"] = rng.random((batch, length)) < draw(
            st.sampled_from([0.0, 0.3, 0.7, 1.0])
        )
    if draw(st.booleans()):
        arrays["gate"] = rng.choice([0.0, 0.25, 0.5, 1.0], size=(batch, vocab))
    return arrays


def to_tensors(arrays: dict, dtype: torch.dtype) -> dict:
    tensors = {}
    for name, array in arrays.items():
        tensor = None if array is None else torch.from_numpy(np.asarray(array))
        floating = tensor is not None and tensor.is_floating_point()
        tensors[name] = tensor.to(dtype) if floating else tensor
    return tensors


def pooled_by_oracle(tensors: dict) -> np.ndarray:
    arrays = {
        name: None if tensor is None else tensor.detach().double().numpy()
        for name, tensor in tensors.items()
    }
    return oracle.logits(
        arrays["hidden"],
        arrays["weight"],
        arrays.get("bias"),
        arrays.get("attention_mask"),
        arrays.get("gate"),
    )


def example(dtype=torch.float64, vocab=23, width=8, **others) -> dict:
    """Build a call whose logits are exact in fp32, with ragged masks that have holes."""
    rng = np.random.default_rng(7)
    batch, length = RAGGED.shape
    bits = 7 if dtype == torch.bfloat16 else 9
    arrays = {
        "hidden": oracle.grid(rng, (batch, length, width), bits),
        "weight": oracle.grid(rng, (vocab, width), bits),
        "bias": oracle.grid(rng, vocab, bits),
        "attention_mask": RAGGED.numpy(),
    }
    return {**to_tensors(arrays, dtype), **others}


def sparser(tensors: dict) -> dict:
    """Silence about half of the columns."""
    return {**tensors, "bias": tensors["bias"] - 80 * (torch.arange(23) % 2 == 0)}


def with_gate(tensors: dict) -> dict:
    batch, vocab = len(tensors["hidden"]), len(tensors["weight"])
    steps = torch.arange(batch * vocab).reshape(batch, vocab)
    return {**tensors, "gate": (steps * 3 % 5).to(tensors["hidden"].dtype) / 4}


def watch(tensors: dict, *names: str) -> dict:
    """Make the named tensors (or all floating ones) leaves that want a gradient; return them."""
    leaves = {}
    for name, tensor in tensors.items():
        if tensor is None or not tensor.is_floating_point() or (names and name not in names):
            continue
        leaves[name] = tensors[name] = tensor.detach().clone().requires_grad_()
    return leaves


def plain(hidden, weight, bias=None, attention_mask=None, *, gate=None):
    """Compute what the head computes by way of all the logits."""
    logits = hidden @ weight.mT
    if bias is not None:
        logits = logits + bias
    if attention_mask is None:
        attention_mask = torch.ones(hidden.shape[:2])
    _, pooled = splade_pool(logits, attention_mask, return_logits=True)
    if gate is not None:
        pooled = torch.where(attention_mask.bool().any(1)[:, None], gate * pooled, 0.0)
    return torch.relu(pooled).log1p(), pooled


def weigh(out: torch.Tensor) -> torch.Tensor:
    """Weigh all entries differently, so that a misplaced gradient shows."""
    return (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()


def gradients(value: torch.Tensor, leaves: dict, **options) -> dict:
    return dict(
        zip(leaves, torch.autograd.grad(value, list(leaves.values()), **options), strict=True)
    )


def close(actual: dict, expected: dict, rtol: float = 1e-5, atol: float = 2e-5) -> None:
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], rtol=rtol, atol=atol, msg=name)


# ------------------------------------------------------------------------------------------------
# The formula


@every_way
@given(problems(), st.sampled_from([torch.float32, torch.float64]))
def test_values_are_the_formula(arrays, dtype):
    tensors = to_tensors(arrays, dtype)
    expected = pooled_by_oracle(tensors)
    activations, pooled = splade_head(**tensors, return_logits=True)
    assert activations.dtype == pooled.dtype == dtype
    np.testing.assert_array_equal(pooled.double().numpy(), expected)
    rtol = 1e-6 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(activations, oracle.activations(expected), rtol=rtol, atol=0.0)
    alone = splade_head(**tensors)
    np.testing.assert_array_equal((alone > 0).numpy(), expected > 0)
    np.testing.assert_allclose(alone, oracle.activations(expected), rtol=rtol, atol=0.0)


@every_way
@given(problems(), st.sampled_from([torch.float32, torch.float64]), st.booleans(), seeds)
def test_gradients_are_the_formula(arrays, dtype, return_logits, seed):
    tensors = to_tensors(arrays, dtype)
    leaves = watch(tensors)
    rng = np.random.default_rng(seed)
    shape = (len(arrays["hidden"]), len(arrays["weight"]))
    upstream = rng.normal(size=shape)
    upstream_logits = rng.normal(size=shape) if return_logits else None
    names = ("hidden", "weight", "bias", "attention_mask", "gate")
    expected = oracle.gradients(*(arrays[name] for name in names), upstream, upstream_logits)
    out = splade_head(**tensors, return_logits=return_logits)
    activations, pooled = out if return_logits else (out, None)
    value = (activations * torch.from_numpy(upstream)).sum()
    if return_logits:
        value = value + (pooled * torch.from_numpy(upstream_logits)).sum()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    for name, gradient in gradients(value, leaves).items():
        assert gradient.dtype == dtype
        np.testing.assert_allclose(gradient, expected[name], rtol=tolerance, atol=tolerance)


@every_way
def test_one_text_by_hand():
    hidden = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]], requires_grad=True)
    weight = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [3.0, 0.0]], requires_grad=True)
    bias = torch.tensor([1.0, 0.5, -3.0], requires_grad=True)
    mask = torch.tensor([[1, 1, 0]])
    out, pooled = splade_head(hidden, weight, bias, mask, return_logits=True)
    assert pooled.tolist() == [[3.0, -0.5, 0.0]]
    assert out[0].tolist() == pytest.approx([np.log(4), 0.0, 0.0])
    out.sum().backward()
    assert hidden.grad.tolist() == [[[0.0, 0.0], [0.25, 0.25], [0.0, 0.0]]]
    assert weight.grad.tolist() == [[0.0, 0.5], [0.0, 0.0], [0.0, 0.0]]
    assert bias.grad.tolist() == [0.25, 0.0, 0.0]


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_it_is_splade_pool_of_the_product(dtype, gated):
    generator = torch.Generator().manual_seed(3)
    sizes = {"hidden": (3, 5, 16), "weight": (61, 16), "bias": (61,)} | (
        {"gate": (3, 61)} if gated else {}
    )
    tensors = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if gated:
        tensors["gate"] = tensors["gate"].clamp(0, 1)
    tensors["attention_mask"] = RAGGED
    leaves = watch(tensors)
    expected, expected_pooled = plain(**tensors)
    out, pooled = splade_head(**tensors, return_logits=True)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    tolerance = tolerance or {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(out, expected, **tolerance)
    torch.testing.assert_close(pooled, expected_pooled, **tolerance)
    assert 0.2 < (out > 0).double().mean() < 0.95
    close(gradients(weigh(out), leaves), gradients(weigh(expected), leaves), **tolerance)


@every_way
def test_it_keeps_the_digits_of_a_long_dot_product():
    hidden, weight = torch.randn(2, 9, 768), torch.randn(64, 768)
    _, pooled = splade_head(hidden, weight, return_logits=True)
    _, exact = plain(hidden.double(), weight.double())
    assert (pooled.double() - exact).abs().max() < 1e-6 * 768
    assert splade_head(hidden, weight).any()


def test_the_signature_is_the_promised_one():
    def bare(function):
        parameters = inspect.signature(function).parameters.values()
        empty = inspect.Parameter.empty
        return str(inspect.Signature([p.replace(annotation=empty) for p in parameters]))

    assert bare(splade_head) == (
        "(hidden, weight, bias=None, attention_mask=None, *, gate=None, return_logits=False, "
        "sparse_grad=False, impl='auto')"
    )
    assert bare(SpladeHead) == (
        "(weight, bias=None, *, transform=None, sparse_grad=False, impl='auto')"
    )
    assert bare(SpladeHead.forward) == (
        "(self, hidden, attention_mask=None, *, gate=None, return_logits=False)"
    )


def test_it_is_exported():
    assert "splade_head" in sparse_losses.__all__
    assert "splade_head" in sparse_losses.functional.__all__
    assert "SpladeHead" in sparse_losses.__all__
    assert sparse_losses.splade_head is splade_head is head.splade_head


# ------------------------------------------------------------------------------------------------
# Which position, and what has a gradient


@every_way
def test_a_tie_goes_to_the_lowest_attended_position():
    row = torch.tensor([0.5, 1.25, -3.0])
    hidden = torch.stack([row, row, -row, row]).expand(2, 4, 3).clone().requires_grad_()
    weight = torch.eye(3).repeat(4, 1).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    splade_head(hidden, weight, None, mask).sum().backward()
    one = torch.tensor([4 / 1.5, 4 / 2.25, 0.0])
    minus = torch.tensor([0.0, 0.0, 4 / 4.0])
    nothing = torch.zeros(3)
    torch.testing.assert_close(hidden.grad[0], torch.stack([one, nothing, minus, nothing]))
    torch.testing.assert_close(hidden.grad[1], torch.stack([nothing, one, minus, nothing]))


@every_way
def test_only_the_largest_position_of_an_active_entry_has_a_gradient():
    tensors = example(vocab=1)
    hidden = watch(tensors, "hidden")["hidden"]
    top, position = oracle.maxima(hidden.detach(), tensors["weight"], RAGGED)
    for shift in (-1.0, 1.0):
        hidden.grad = None
        tensors["bias"] = torch.from_numpy(-top.max(0) + shift)
        out = splade_head(**tensors)
        out.sum().backward()
        expected = np.zeros(RAGGED.shape, bool)
        for i in np.flatnonzero(out.detach()[:, 0]):
            expected[i, position[i, 0]] = True
        assert expected.any() == (shift > 0)
        np.testing.assert_array_equal(hidden.grad.any(-1).numpy(), expected)


@every_way
def test_a_logit_of_exactly_zero_is_silent():
    hidden = torch.tensor([[[1.5, -1.5], [0.0, 0.0]]], requires_grad=True)
    weight = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -1.5], requires_grad=True)
    out = splade_head(hidden, weight, bias)
    out.sum().backward()
    for tensor in (out, hidden.grad, weight.grad, bias.grad):
        assert not tensor.any()
    assert splade_head(hidden, weight, bias + 1).all()


@every_way
def test_the_signed_maximum_repairs_what_relu_cannot():
    tensors = example(bias=torch.full((23,), -1000.0, dtype=torch.float64))
    leaves = watch(tensors)
    out, pooled = splade_head(**tensors, return_logits=True)
    assert (pooled < 0).all()
    for gradient in gradients(out.sum(), leaves, retain_graph=True).values():
        assert not gradient.any()
    alive = gradients(weigh(pooled), leaves)
    close(alive, gradients(weigh(plain(**tensors)[1]), leaves), 1e-12, 1e-12)
    assert all(gradient.any() for gradient in alive.values())


@every_way
def test_both_results_may_be_used_at_once():
    tensors = with_gate(example())
    leaves = watch(tensors)
    out, pooled = splade_head(**tensors, return_logits=True)
    expected, expected_pooled = plain(**tensors)
    value, reference = weigh(out) + 3 * weigh(pooled), weigh(expected) + 3 * weigh(expected_pooled)
    close(gradients(value, leaves), gradients(reference, leaves), 1e-11, 1e-11)


@every_way
def test_a_gate_scales_and_shuts():
    tensors = example(attention_mask=None)
    leaves = watch(tensors)
    ungated, pooled = splade_head(**tensors, return_logits=True)
    assert (pooled > 0).any(1).all()
    ones = torch.ones_like(pooled)
    assert torch.equal(splade_head(**tensors, gate=ones), ungated)
    assert not splade_head(**tensors, gate=0 * ones).any()
    half = splade_head(**tensors, gate=0.5 * ones)
    torch.testing.assert_close(half, torch.relu(0.5 * pooled).log1p(), rtol=1e-12, atol=0)
    only = (torch.arange(23) % 3 == 0).double().expand_as(ones)
    shut = splade_head(**tensors, gate=only)
    assert torch.equal(shut, ungated * only)
    close(gradients(weigh(shut), leaves), gradients(weigh(ungated * only), leaves), 1e-12, 1e-12)
    rows = splade_head(**tensors, gate=only)
    (gradient,) = torch.autograd.grad(rows.sum(), leaves["weight"])
    assert not gradient[torch.arange(23) % 3 != 0].any()


@every_way
def test_a_shut_gate_still_learns_from_the_logits():
    tensors = example(gate=torch.zeros(3, 23, dtype=torch.float64))
    leaves = watch(tensors, "gate", "weight")
    out, pooled = splade_head(**tensors, return_logits=True)
    assert not out.any()
    found = gradients(pooled.sum(), leaves)
    np.testing.assert_array_equal(found["gate"], pooled_by_oracle({**tensors, "gate": None}))
    assert not found["weight"].any()


@every_way
@pytest.mark.parametrize("return_logits", [False, True])
def test_upstream_gradients_of_any_layout(return_logits):
    tensors = example()
    leaves = watch(tensors)
    out = splade_head(**tensors, return_logits=return_logits)
    expected = plain(**tensors)
    out, reference = (out[1], expected[1]) if return_logits else (out, expected[0])
    factor = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.mT.shape)
    close(
        gradients((out.mT * factor).sum(), leaves),
        gradients((reference.mT * factor).sum(), leaves),
        1e-11,
        1e-11,
    )
    out = splade_head(**tensors, return_logits=return_logits)
    out, reference = (out[1], plain(**tensors)[1]) if return_logits else (out, plain(**tensors)[0])
    close(gradients(out.sum(), leaves), gradients(reference.sum(), leaves), 1e-11, 1e-11)


# ------------------------------------------------------------------------------------------------
# Masks


@every_way
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_masked_position_hides_everything(bad):
    tensors = example(torch.float32)
    expected_leaves = watch(expected_tensors := dict(tensors))
    clean = splade_head(**expected_tensors)
    expected = gradients(weigh(clean), expected_leaves)
    tensors["hidden"] = tensors["hidden"].masked_fill(RAGGED[..., None] == 0, bad)
    leaves = watch(tensors)
    out = splade_head(**tensors)
    assert torch.equal(out, clean)
    found = gradients(weigh(out), leaves)
    close(found, expected, 1e-6, 1e-6)
    assert not found["hidden"][RAGGED == 0].any()
    assert found["hidden"][RAGGED == 1].any()


@every_way
def test_padding_and_the_order_of_positions_change_nothing():
    tensors = example(torch.float32)
    clean = splade_head(**tensors)
    order = torch.tensor([3, 1, 4, 0, 2])
    moved = {
        **tensors,
        "hidden": tensors["hidden"][:, order],
        "attention_mask": tensors["attention_mask"][:, order],
    }
    assert torch.equal(splade_head(**moved), clean)
    longer = {
        **tensors,
        "hidden": torch.cat([tensors["hidden"], torch.full((3, 4, 8), 50.0)], 1),
        "attention_mask": torch.cat([RAGGED, torch.zeros(3, 4, dtype=torch.long)], 1),
    }
    assert torch.equal(splade_head(**longer), clean)
    assert clean.any(1).all()


@every_way
def test_no_mask_attends_to_everything():
    tensors = example(attention_mask=None)
    full = {**tensors, "attention_mask": torch.ones_like(RAGGED)}
    assert torch.equal(splade_head(**tensors), splade_head(**full))
    assert not torch.equal(splade_head(**tensors), splade_head(**example()))


@every_way
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.float32, torch.float64], ids=str
)
def test_masks_are_bool_int_or_float(dtype):
    tensors = example(torch.float32)
    out = splade_head(**{**tensors, "attention_mask": RAGGED.to(dtype)})
    assert out.dtype == torch.float32
    assert torch.equal(out, splade_head(**tensors))


@every_way
@pytest.mark.parametrize("return_logits", [False, True])
def test_a_fully_masked_text_between_others_is_zero_without_gradient(return_logits):
    tensors = with_gate(example())
    tensors["attention_mask"] = RAGGED * torch.tensor([[1], [0], [1]])
    tensors["bias"] = tensors["bias"].abs() + 1
    others = {k: v[[0, 2]] if len(v) == 3 else v for k, v in tensors.items()}
    for name in ("hidden", "gate"):
        tensors[name][1] = torch.nan
    leaves, other_leaves = watch(tensors), watch(others)
    out = splade_head(**tensors, return_logits=return_logits)
    expected = splade_head(**others, return_logits=return_logits)
    if return_logits:
        assert not out[0][1].any()
        out, expected = out[1], expected[1]
    assert not out[1].any()
    assert torch.equal(out[[0, 2]], expected)
    found = gradients(out.sum(), leaves)
    others_found = gradients(expected.sum(), other_leaves)
    for name, gradient in found.items():
        if name in ("hidden", "gate"):
            assert not gradient[1].any()
            gradient = gradient[[0, 2]]
        torch.testing.assert_close(gradient, others_found[name], rtol=1e-12, atol=1e-12)
        assert gradient.any()


@every_way
def test_nothing_attended_at_all_is_zero_with_a_graph():
    tensors = with_gate(example(attention_mask=torch.zeros_like(RAGGED)))
    tensors["bias"] = tensors["bias"].abs() + 1
    leaves = watch(tensors)
    out, pooled = splade_head(**tensors, return_logits=True)
    assert out.shape == pooled.shape == (3, 23)
    assert not out.any()
    assert not pooled.any()
    for gradient in gradients((out + pooled).sum(), leaves).values():
        assert not gradient.any()
    assert splade_head(**{**tensors, "attention_mask": None}).any()


# ------------------------------------------------------------------------------------------------
# Shapes and layouts


@every_way
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)], ids=str)
def test_empty_batches_and_empty_texts(shape, gated):
    tensors = {
        "hidden": torch.zeros(*shape, 3, requires_grad=True),
        "weight": torch.ones(9, 3, requires_grad=True),
        "bias": torch.ones(9, requires_grad=True),
    }
    gate = torch.ones(shape[0], 9) if gated else None
    for mask in (None, torch.ones(shape)):
        out, pooled = splade_head(**tensors, attention_mask=mask, gate=gate, return_logits=True)
        assert out.shape == pooled.shape == (shape[0], 9)
        assert not out.any()
        assert not pooled.any()
        (out.sum() + pooled.sum()).backward()
        alone = splade_head(**tensors, attention_mask=mask, gate=gate)
        assert alone.shape == (shape[0], 9)
        alone.sum().backward()
        for tensor in tensors.values():
            assert tensor.grad is None or not tensor.grad.any()
    assert splade_head(torch.ones(1, 1, 3), *list(tensors.values())[1:]).all()


@every_way
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1), (3, 1, 11, 4), (2, 4, 1, 3), (2, 3, 13, 1), (5, 2, 7, 3), (1, 9, 8, 2)],
    ids=str,
)
def test_sizes_of_one_and_odd_sizes(sizes):
    batch, length, vocab, width = sizes
    rng = np.random.default_rng(1)
    arrays = {
        "hidden": oracle.grid(rng, (batch, length, width)),
        "weight": oracle.grid(rng, (vocab, width)),
    }
    tensors = to_tensors(arrays, torch.float32)
    tensors["weight"][0] = tensors["hidden"][0, 0]  # something is active
    arrays["weight"][0] = arrays["hidden"][0, 0]
    leaves = watch(tensors)
    out, pooled = splade_head(**tensors, return_logits=True)
    np.testing.assert_array_equal(pooled.detach(), oracle.logits(**arrays))
    assert out.any()
    upstream = np.ones((batch, vocab))
    expected = oracle.gradients(*arrays.values(), None, None, None, upstream)
    for name, gradient in gradients(out.sum(), leaves).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-5)


def spread(tensor):
    return torch.stack([tensor, torch.full_like(tensor, 1)], -1)[..., 0]


LAYOUTS = {
    "every other": spread,
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else spread(x),
    "positions first": lambda x: (
        x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else spread(x)
    ),
    "a slice": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_non_contiguous_inputs_are_the_same_inputs(layout, dtype):
    tensors = with_gate(example(dtype))
    leaves = watch(tensors)
    out = splade_head(**tensors)
    expected = gradients(weigh(out), leaves)
    laid = {name: layout(tensor) for name, tensor in tensors.items()}
    assert not laid["hidden"].is_contiguous()
    laid_leaves = {name: laid[name].detach().requires_grad_() for name in leaves}
    assert laid_leaves["weight"].stride() == laid["weight"].stride()
    actual = splade_head(**{**laid, **laid_leaves})
    assert torch.equal(actual, out)
    close(gradients(weigh(actual), laid_leaves), expected, 1e-6, 1e-6)


@every_way
def test_expanded_inputs():
    tensors = example(torch.float32)
    one = tensors["hidden"][:1]
    expanded = splade_head(one.expand(3, 5, 8), *list(tensors.values())[1:])
    assert torch.equal(expanded, splade_head(one.repeat(3, 1, 1), *list(tensors.values())[1:]))
    assert expanded.any(1).all()


def test_inputs_are_left_as_they_were():
    tensors = with_gate(example(torch.float32))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    watch(tensors)
    weigh(splade_head(**tensors)).backward()
    for name, tensor in before.items():
        assert torch.equal(tensors[name].detach(), tensor), name


# ------------------------------------------------------------------------------------------------
# Who wants a gradient


@every_way
@pytest.mark.parametrize("sparse_grad", [False, True])
@pytest.mark.parametrize("return_logits", [False, True])
@pytest.mark.parametrize(
    "wanted",
    [("hidden",), ("weight",), ("bias",), ("gate",), ("hidden", "bias"), ("weight", "gate")],
    ids="-".join,
)
def test_only_what_is_wanted_gets_a_gradient(wanted, return_logits, sparse_grad):
    everything = with_gate(example(torch.float32))
    options = {"return_logits": return_logits, "sparse_grad": sparse_grad}
    some = dict(everything)
    all_leaves, leaves = watch(everything), watch(some, *wanted)

    def backward(tensors):
        out = splade_head(**tensors, **options)
        (weigh(out[0]) + weigh(out[1]) if return_logits else weigh(out)).backward()

    backward(everything)
    backward(some)
    for name in all_leaves:
        if name not in wanted:
            assert some[name].grad is None
            continue
        actual, expected = leaves[name].grad, all_leaves[name].grad
        assert actual.is_sparse == expected.is_sparse == (name == "weight" and sparse_grad)
        actual, expected = actual.to_dense(), expected.to_dense()
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        assert actual.any()


@every_way
@pytest.mark.parametrize("sparse_grad", [False, True])
def test_nothing_wanted_and_no_graph(sparse_grad):
    tensors = with_gate(example(torch.float32))
    quiet = splade_head(**tensors, sparse_grad=sparse_grad)
    assert not quiet.requires_grad
    watch(tensors)
    loud = splade_head(**tensors, sparse_grad=sparse_grad)
    assert loud.requires_grad
    assert torch.equal(loud, quiet)
    assert quiet.any()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, pooled = splade_head(**tensors, sparse_grad=sparse_grad, return_logits=True)
            inside = splade_head(tensors["hidden"] * 1.0, tensors["weight"], gate=tensors["gate"])
        assert not out.requires_grad
        assert not pooled.requires_grad
        assert torch.equal(out, quiet)
        assert inside.any()


@every_way
@pytest.mark.parametrize("sparse_grad", [False, True])
def test_a_second_backward_gives_the_same_bits(sparse_grad):
    tensors = with_gate(example(torch.float32))
    leaves = watch(tensors)
    value = weigh(splade_head(**tensors, sparse_grad=sparse_grad))
    value.backward(retain_graph=True)
    first = {name: leaf.grad.to_dense().clone() for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad.zero_()  # it belongs to the leaf: nobody else may still need it
        leaf.grad = None
    value.backward()
    for name, leaf in leaves.items():
        assert first[name].any()
        assert torch.equal(leaf.grad.to_dense(), first[name]), name


@every_way
def test_two_runs_give_the_same_bits():
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(4, 9, 24, generator=generator, requires_grad=True)
    weight = torch.randn(211, 24, generator=generator, requires_grad=True)
    bias = torch.randn(211, generator=generator, requires_grad=True)
    leaves = {"hidden": hidden, "weight": weight, "bias": bias}
    runs = []
    for _ in range(2):
        out, pooled = splade_head(**leaves, return_logits=True)
        runs.append({"out": out, "pooled": pooled, **gradients(weigh(out), leaves)})
    for name, tensor in runs[0].items():
        assert tensor.any()
        assert torch.equal(tensor, runs[1][name]), name


@every_way
def test_the_number_of_threads_changes_rounding_at_most():
    hidden, weight = torch.randn(4, 16, 48), torch.randn(700, 48)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(splade_head(hidden, weight, return_logits=True)[1])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert found[0].any()


# ------------------------------------------------------------------------------------------------
# Sparse gradients


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_sparse_gradient_has_the_rows_of_the_active_entries(dtype):
    tensors = sparser(example(dtype))
    leaves = watch(tensors)
    dense = gradients(weigh(splade_head(**tensors)), leaves)
    out = splade_head(**tensors, sparse_grad=True)
    found = gradients(weigh(out), leaves)
    gradient = found["weight"]
    assert gradient.layout == torch.sparse_coo
    assert gradient.is_coalesced()
    assert gradient.shape == (23, 8)
    assert gradient.dtype == dtype
    assert gradient.sparse_dim() == gradient.dense_dim() == 1
    active = (out > 0).any(0)
    assert 0 < active.sum() < 23
    assert torch.equal(gradient.indices()[0], active.nonzero()[:, 0])
    for name in leaves:
        assert found[name].is_sparse == (name == "weight")
        close({name: found[name].to_dense()}, {name: dense[name]}, 1e-2, 1e-6)
    weigh(splade_head(**tensors, sparse_grad=True)).backward()
    kept = leaves["weight"].grad  # PyTorch forgets on the way to a leaf that it was coalesced
    assert torch.equal(kept._indices(), gradient.indices())
    assert torch.equal(kept._values(), gradient.values())


@every_way
@pytest.mark.parametrize("gated", [False, True])
def test_a_sparse_gradient_of_the_logits_is_the_dense_one(gated):
    tensors = with_gate(example()) if gated else example()
    leaves = watch(tensors)
    both = splade_head(**tensors, return_logits=True)
    dense = gradients(weigh(both[0]) + weigh(both[1]), leaves)
    both = splade_head(**tensors, return_logits=True, sparse_grad=True)
    gradient = gradients(weigh(both[0]) + weigh(both[1]), leaves)["weight"]
    assert gradient.is_sparse
    assert gradient.is_coalesced()
    torch.testing.assert_close(gradient.to_dense(), dense["weight"], rtol=1e-12, atol=1e-12)


@every_way
def test_a_sparse_gradient_of_nothing_is_empty():
    tensors = example(bias=torch.full((23,), -1e4, dtype=torch.float64))
    weight = watch(tensors, "weight")["weight"]
    splade_head(**tensors, sparse_grad=True).sum().backward()
    assert weight.grad.is_sparse
    assert weight.grad.shape == (23, 8)
    assert weight.grad._nnz() == 0
    splade_head(**{**tensors, "bias": None}, sparse_grad=True).sum().backward()
    assert weight.grad.to_dense().any()


def test_sparse_gradients_accumulate():
    tensors = example()
    weight = watch(tensors, "weight")["weight"]
    values = [weigh(splade_head(**tensors)), splade_head(**tensors, gate=torch.ones(3, 23)).sum()]
    expected = sum(torch.autograd.grad(value, weight)[0] for value in values)
    weigh(splade_head(**tensors, sparse_grad=True)).backward()
    splade_head(**tensors, sparse_grad=True).sum().backward()
    assert weight.grad.is_sparse
    torch.testing.assert_close(weight.grad.to_dense(), expected, rtol=1e-12, atol=1e-12)


@every_way
def test_sparse_adam_moves_the_active_rows_only():
    tensors = sparser(example(torch.float32))
    weight = tensors["weight"] = nn.Parameter(tensors["weight"])
    before = weight.detach().clone()
    optimizer = torch.optim.SparseAdam([weight], lr=0.1)
    out = splade_head(**tensors, sparse_grad=True)
    out.sum().backward()
    optimizer.step()
    moved = (weight.detach() != before).any(1)
    assert torch.equal(moved, (out > 0).any(0))
    assert 0 < moved.sum() < 23


@every_way
@pytest.mark.parametrize("sparse", [False, True])
def test_tied_embeddings_get_both_gradients(sparse):
    embedding = nn.Embedding(23, 8, sparse=sparse, dtype=torch.float64)
    ids = torch.randint(0, 23, RAGGED.shape)
    reference, _ = plain(embedding(ids).tanh(), embedding.weight, None, RAGGED)
    weigh(reference).backward()
    expected, embedding.weight.grad = embedding.weight.grad.to_dense(), None
    out = splade_head(embedding(ids).tanh(), embedding.weight, None, RAGGED, sparse_grad=sparse)
    weigh(out).backward()
    assert embedding.weight.grad.is_sparse == sparse
    assert expected.any()
    torch.testing.assert_close(embedding.weight.grad.to_dense(), expected, rtol=1e-11, atol=1e-12)


# ------------------------------------------------------------------------------------------------
# Precision


@every_way
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_half_precision_is_computed_in_fp32(dtype, gated):
    tensors = with_gate(example(dtype)) if gated else example(dtype)
    leaves = watch(tensors)
    out, pooled = splade_head(**tensors, return_logits=True)
    assert out.dtype == pooled.dtype == torch.float32
    np.testing.assert_array_equal(pooled.detach(), pooled_by_oracle(tensors))
    exact_tensors = {
        name: tensor.detach().double() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    exact_leaves = watch(exact_tensors)
    exact, _ = plain(**exact_tensors)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-7)
    expected = gradients(weigh(exact), exact_leaves)
    once = torch.finfo(dtype).eps
    for name, gradient in gradients(weigh(out), leaves).items():
        assert gradient.dtype == dtype
        assert gradient.any()
        torch.testing.assert_close(gradient.double(), expected[name], rtol=once, atol=1e-4)


@every_way
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_gradients_are_summed_in_fp32(dtype):
    hidden = torch.ones(300, 1, 1, dtype=dtype, requires_grad=True)
    weight = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    bias = torch.zeros(1, dtype=dtype, requires_grad=True)
    splade_head(hidden, weight, bias).sum().backward()
    assert weight.grad.item() == bias.grad.item() == 150.0  # in bf16, 128 + 1/2 is 128
    one, many = hidden.detach()[:1].requires_grad_(), weight.detach().repeat(300, 1)
    splade_head(one, many).sum().backward()
    assert one.grad.item() == 150.0


@every_way
def test_a_dot_product_beyond_fp16_is_a_number():
    hidden = torch.full((1, 2, 4), 6e4, dtype=torch.float16)
    weight = torch.full((3, 4), 100.0, dtype=torch.float16)
    weight[1] *= -1
    out, pooled = splade_head(hidden, weight, return_logits=True)
    value = 4 * hidden[0, 0, 0].item() * 100
    assert pooled[0].tolist() == [value, -value, value]
    assert out[0].tolist() == pytest.approx([np.log1p(value), 0, np.log1p(value)], rel=1e-6)


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_changes_nothing(dtype):
    tensors = with_gate(example(dtype))
    leaves = watch(tensors)
    out = splade_head(**tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = splade_head(**tensors)
    assert cast.dtype == torch.float32
    assert torch.equal(cast, out)
    expected = gradients(weigh(out), leaves)
    for name, gradient in gradients(weigh(cast), leaves).items():
        assert gradient.dtype == dtype
        assert torch.equal(gradient, expected[name])
        assert gradient.any()


@every_way
@pytest.mark.parametrize("odd", ["hidden", "weight", "bias", "gate"])
@pytest.mark.parametrize(
    ("dtype", "other", "result"),
    [
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.float64, torch.float64),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_mixed_dtypes_promote(odd, dtype, other, result):
    tensors = with_gate(example(torch.bfloat16))
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}
    tensors[odd] = tensors[odd].to(other)
    leaves = watch(tensors)
    out, pooled = splade_head(**tensors, return_logits=True)
    assert out.dtype == pooled.dtype == result
    np.testing.assert_array_equal(pooled.detach(), pooled_by_oracle(tensors))
    if result == torch.float64:
        np.testing.assert_allclose(
            out.detach(), oracle.activations(pooled_by_oracle(tensors)), rtol=1e-14
        )
    for name, gradient in gradients(weigh(out), leaves).items():
        assert gradient.dtype == tensors[name].dtype
        assert gradient.any()


# ------------------------------------------------------------------------------------------------
# Second derivatives, transforms


def generic(seed: int = 0, sizes=(2, 4, 9, 3)) -> dict:
    batch, length, vocab, width = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "hidden": (batch, length, width),
        "weight": (vocab, width),
        "bias": (vocab,),
        "gate": (batch, vocab),
    }
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    tensors["gate"] = tensors["gate"].sigmoid()
    tensors["attention_mask"] = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    return tensors


@every_way
@pytest.mark.parametrize("result", ["activations", "logits"])
@pytest.mark.parametrize(
    "names",
    [("hidden", "weight", "bias", "gate"), ("hidden",), ("weight",), ("hidden", "bias")],
    ids="-".join,
)
def test_gradcheck_and_gradgradcheck(names, result):
    tensors = generic()
    leaves = watch(tensors, *names)
    if len(names) < 4:
        del tensors["gate"]

    def function(*values):
        given = {**tensors, **dict(zip(leaves, values, strict=True))}
        out, pooled = splade_head(**given, return_logits=True)
        return out if result == "activations" else pooled

    values = tuple(leaves.values())
    found = torch.autograd.grad(function(*values).sum(), values)
    assert all(gradient.any() for gradient in found)
    assert torch.autograd.gradcheck(function, values, fast_mode=len(names) < 4)
    assert torch.autograd.gradgradcheck(function, values, fast_mode=True)


@every_way
def test_second_derivatives_survive_a_sum_with_another_loss():
    tensors = generic(1)
    leaves = watch(tensors)
    other = generic(2)["gate"].abs()

    def loss(leaves):
        out = splade_head(**{**tensors, **leaves})
        return info_nce_loss(out, other) + 0.5 * sum(x.square().sum() for x in leaves.values())

    first = gradients(loss(leaves), leaves, create_graph=True)
    directions = {name: torch.randn_like(leaf) for name, leaf in leaves.items()}
    product = sum((first[name] * directions[name]).sum() for name in leaves)
    second = gradients(product, leaves)
    step = 1e-5
    moved = []
    for sign in (1, -1):
        shifted = {
            name: (leaf + sign * step * directions[name]).detach().requires_grad_()
            for name, leaf in leaves.items()
        }
        moved.append(gradients(loss(shifted), shifted))
    expected = {name: (moved[0][name] - moved[1][name]) / (2 * step) for name in leaves}
    close(second, expected, 1e-4, 1e-5)
    assert any((second[name] - directions[name]).abs().max() > 1e-3 for name in leaves)


def test_a_gradient_penalty_in_fp32():
    tensors = {k: v.float() if v.is_floating_point() else v for k, v in generic(3).items()}
    leaves = watch(tensors)
    doubles = {k: v.detach().double() if v.is_floating_point() else v for k, v in tensors.items()}
    double_leaves = watch(doubles)
    found = []
    for function, given_tensors, own in (
        (splade_head, tensors, leaves),
        (lambda **t: plain(**t)[0], doubles, double_leaves),
    ):
        value = weigh(function(**given_tensors))
        first = gradients(value, own, create_graph=True)
        penalty = value + sum(gradient.square().sum() for gradient in first.values())
        found.append(gradients(penalty, own))
    for name, gradient in found[0].items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), found[1][name], rtol=1e-4, atol=1e-4)


@every_way
@pytest.mark.parametrize("through", ["weight", "gate"])
def test_second_derivatives_when_one_input_comes_from_another(through):
    """Tied embeddings: the hidden states come from the weight; or the gate from the states."""
    start = generic(4)
    ids = torch.tensor([[1, 5, 2, 0], [3, 3, 8, 1]])

    def penalty(function, weight):
        hidden = weight[ids].tanh()
        gate = (hidden.mean(1) @ weight.mT).sigmoid() if through == "gate" else None
        scores = weight.detach() if through == "gate" else weight
        value = weigh(function(hidden, scores, start["bias"], start["attention_mask"], gate=gate))
        (first,) = torch.autograd.grad(value, weight, create_graph=True)
        return first, torch.autograd.grad(weigh(first.square()), weight)[0]

    weight = start["weight"].requires_grad_()
    expected = penalty(lambda *args, **kwargs: plain(*args, **kwargs)[0], weight)
    for actual, wanted in zip(penalty(splade_head, weight), expected, strict=True):
        assert wanted.any()
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)


def test_transforms_are_refused_not_answered_wrongly():
    tensors = generic(4)
    mask = tensors["attention_mask"]
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda h: splade_head(h, tensors["weight"], None, mask).sum())(
            tensors["hidden"]
        )
    with pytest.raises(RuntimeError):
        torch.vmap(lambda w: splade_head(tensors["hidden"], w, None, mask))(
            tensors["weight"].expand(2, 9, 3)
        )


# ------------------------------------------------------------------------------------------------
# One graph


COMPILED = {
    "bias": {},
    "no bias, no mask": {"bias": None, "attention_mask": None},
    "gate and logits": {"gate": True, "return_logits": True},
    "sparse_grad": {"sparse_grad": True},
}


def compiled_like_eager(options: dict, backend: str) -> None:
    torch._dynamo.reset()
    tensors = example(torch.float32)
    if "gate" in options:
        tensors = with_gate(tensors)
    tensors |= {name: value for name, value in options.items() if name in tensors and value is None}
    flags = {k: v for k, v in options.items() if k in ("return_logits", "sparse_grad")}
    leaves = watch(tensors)
    out = torch.compile(splade_head, fullgraph=True, backend=backend)(**tensors, **flags)
    expected = splade_head(**tensors, **(flags | {"sparse_grad": False}))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    if flags.get("return_logits"):
        out, expected = weigh(out[0]) + weigh(out[1]), weigh(expected[0]) + weigh(expected[1])
    found = gradients(weigh(out), leaves)
    assert all(not gradient.is_sparse and gradient.any() for gradient in found.values())
    close(found, gradients(weigh(expected), leaves))


@pytest.mark.parametrize("screening", [False, True])
@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED.keys())
def test_it_compiles_into_one_graph(options, screening, monkeypatch):
    monkeypatch.setattr(head, "SCREENING", screening)
    compiled_like_eager(options, "aot_eager")


@pytest.mark.parametrize("options", [{}, COMPILED["gate and logits"]], ids=["bias", "gate"])
def test_it_compiles_with_inductor(options):
    compiled_like_eager(options, "inductor")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_compiled_dtypes_are_the_eager_ones(dtype):
    torch._dynamo.reset()
    tensors = with_gate(example(dtype))
    tensors["bias"] = tensors["bias"].float()
    leaves = watch(tensors)
    expected = splade_head(**tensors)
    out = torch.compile(splade_head, fullgraph=True, backend="aot_eager")(**tensors)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)
    found, wanted = gradients(weigh(out), leaves), gradients(weigh(expected), leaves)
    close(found, wanted, rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert all(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("poisoned", ["hidden", "weight", "gate", "masked hidden", "masked gate"])
def test_compiled_nan_is_eager_nan(poisoned):
    torch._dynamo.reset()
    tensors = with_gate(example(torch.float32))
    tensors["attention_mask"] = RAGGED * torch.tensor([[1], [0], [1]])
    index = {"hidden": (0, 2, 1), "weight": (4, 3), "gate": (0, 5)}
    index |= {"masked hidden": (0, 1, 1), "masked gate": (1, 5)}
    tensors[poisoned.split()[-1]][index[poisoned]] = torch.nan
    expected = splade_head(**tensors)
    assert expected.isnan().any() == (not poisoned.startswith("masked"))
    out = torch.compile(splade_head, fullgraph=True, backend="aot_eager")(**tensors)
    torch.testing.assert_close(out, expected, equal_nan=True)


def test_one_graph_serves_every_batch_size():
    torch._dynamo.reset()
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(splade_head, fullgraph=True, dynamic=True, backend=count)
    weight, bias = torch.randn(23, 8), torch.randn(23)
    for batch, length in ((2, 5), (3, 5), (4, 7), (5, 6), (6, 3)):
        hidden = torch.randn(batch, length, 8)
        mask = (torch.rand(batch, length) < 0.7).long()
        expected = splade_head(hidden, weight, bias, mask)
        torch.testing.assert_close(compiled(hidden, weight, bias, mask), expected)
        assert expected.any()
    assert len(graphs) == 1


def test_gradients_of_a_dynamic_batch():
    torch._dynamo.reset()
    compiled = torch.compile(splade_head, fullgraph=True, backend="aot_eager")
    weight, bias = torch.randn(23, 8, requires_grad=True), torch.randn(23, requires_grad=True)
    for batch in (2, 3, 5):
        leaves = {"hidden": torch.randn(batch, 4, 8, requires_grad=True)}
        leaves |= {"weight": weight, "bias": bias}
        mask = torch.tensor([[1, 0, 1, 1]]).expand(batch, 4).contiguous()
        for tensor in (leaves["hidden"], mask):
            torch._dynamo.mark_dynamic(tensor, 0)
        out = compiled(**leaves, attention_mask=mask)
        expected = splade_head(**leaves, attention_mask=mask)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        close(gradients(weigh(out), leaves), gradients(weigh(expected), leaves))


def test_the_module_compiles_into_one_graph():
    torch._dynamo.reset()
    tensors = example(torch.float32)
    hidden, mask = tensors["hidden"], tensors["attention_mask"]
    module = SpladeHead(nn.Parameter(tensors["weight"]), nn.Parameter(tensors["bias"]))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    out = compiled(hidden, mask)
    torch.testing.assert_close(out, module(hidden, mask))
    weigh(out).backward()
    assert module.weight.grad.any()
    assert module.bias.grad.any()


# ------------------------------------------------------------------------------------------------
# Memory


class Recorder(TorchDispatchMode):
    """Remember the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self.largest = max(self.largest, tensor.numel())
        return out


@every_way
@pytest.mark.parametrize("options", ["bare", "everything", "sparse_grad"])
def test_it_never_holds_the_logits_of_every_position(options):
    batch, length, width = 16, 64, 8
    vocab = 40000 if head.TILE is None else 1500
    tensors = {
        "hidden": torch.randn(batch, length, width),
        "weight": torch.randn(vocab, width),
        "bias": torch.randn(vocab) - 6,
    }
    flags = {}
    if options == "everything":
        tensors["gate"] = torch.rand(batch, vocab)
        flags["return_logits"] = True
    elif options == "sparse_grad":
        flags["sparse_grad"] = True
    leaves = watch(tensors)
    tensors["attention_mask"] = torch.ones(batch, length)
    saved = {}

    def keep(tensor):
        saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Recorder() as seen:
        out = splade_head(**tensors, **flags)
        value = sum(each.sum() for each in out) if flags.get("return_logits") else out.sum()
        assert seen.largest >= batch * vocab  # the recorder sees
        value.backward()
    assert all(leaf.grad.to_dense().any() for leaf in leaves.values())
    assert seen.largest < batch * length * vocab / 2
    assert sum(saved.values()) < batch * length * vocab / 2


def test_second_derivatives_do_not_hold_them_either():
    batch, length, vocab, width = 16, 64, 40000, 8
    hidden = torch.randn(batch, length, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    with Recorder() as seen:
        value = splade_head(hidden, weight).sum()
        first = torch.autograd.grad(value, (hidden, weight), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (hidden, weight))
    assert all(gradient.any() for gradient in second)
    assert seen.largest < batch * length * vocab / 2


def test_the_recorder_notices_the_logits():
    with Recorder() as seen:
        plain(torch.randn(2, 5, 3), torch.randn(7, 3))
    assert seen.largest >= 2 * 5 * 7


# ------------------------------------------------------------------------------------------------
# NaN in, NaN out


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("return_logits", [False, True])
def test_a_nan_in_an_attended_position_makes_its_text_nan(dtype, return_logits):
    def run(tensors):
        out = splade_head(**tensors, return_logits=return_logits)
        return out[1] if return_logits else out

    tensors = example(dtype)
    tensors["weight"][4] = 0.0
    clean = run(tensors)
    tensors["hidden"][0, 2, 5] = torch.nan
    out = run(tensors)
    assert out[0].isnan().all()
    assert torch.equal(out[1:], clean[1:])
    hidden = watch(tensors, "hidden")["hidden"]
    run(tensors).sum().backward()
    assert hidden.grad[1:].isfinite().all()
    assert hidden.grad[1:].any()


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["weight", "bias"])
@pytest.mark.parametrize("return_logits", [False, True])
def test_a_nan_of_a_token_makes_its_column_nan(dtype, where, return_logits):
    def run(tensors):
        out = splade_head(**tensors, return_logits=return_logits)
        return out[1] if return_logits else out

    tensors = example(dtype)
    tensors["attention_mask"] = RAGGED * torch.tensor([[1], [1], [0]])
    tensors["hidden"][0, 0] = 0.0
    clean = run(tensors)
    tensors[where][(9, 3) if where == "weight" else 9] = torch.nan
    out = run(tensors)
    assert out[:2, 9].isnan().all()
    assert not out[2].any()  # nothing is attended there
    others = torch.arange(23) != 9
    assert torch.equal(out[:, others], clean[:, others])


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_nan_of_the_gate_shows(dtype):
    tensors = example(dtype)
    clean, pooled = splade_head(**tensors, return_logits=True)
    tensors["gate"] = torch.ones_like(clean)
    silent, active = (pooled[0] < 0).nonzero()[0].item(), (pooled[0] > 0).nonzero()[0].item()
    tensors["gate"][0, [silent, active]] = torch.nan
    out = splade_head(**tensors)
    expected = clean.clone()
    expected[0, [silent, active]] = torch.nan
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": torch.ones(3, 8)}, ValueError, ["hidden", "[3, 8]"]),
        ({"hidden": torch.ones(3, 5, 8, 1)}, ValueError, ["hidden", "[3, 5, 8, 1]"]),
        ({"hidden": torch.ones(3, 5, 8).long()}, TypeError, ["hidden", "int64"]),
        ({"hidden": torch.ones(3, 5, 8).bool()}, TypeError, ["hidden", "bool"]),
        ({"hidden": torch.ones(3, 5, 8, dtype=torch.complex64)}, TypeError, ["hidden"]),
        ({"hidden": [[[1.0] * 8] * 5] * 3}, TypeError, ["hidden", "list"]),
        ({"hidden": None}, TypeError, ["hidden"]),
        ({"weight": torch.ones(23, 7)}, ValueError, ["weight", "[23, 7]", "8"]),
        ({"weight": torch.ones(8, 23)}, ValueError, ["weight", "[8, 23]"]),
        ({"weight": torch.ones(23)}, ValueError, ["weight", "[23]"]),
        ({"weight": torch.ones(23, 8).int()}, TypeError, ["weight", "int32"]),
        ({"weight": None}, TypeError, ["weight"]),
        ({"weight": torch.ones(23, 8, device="meta")}, ValueError, ["weight", "meta"]),
        ({"bias": torch.ones(22)}, ValueError, ["bias", "[22]", "23"]),
        ({"bias": torch.ones(1)}, ValueError, ["bias", "[1]"]),
        ({"bias": torch.ones(1, 23)}, ValueError, ["bias", "[1, 23]"]),
        ({"bias": torch.ones(23).long()}, TypeError, ["bias", "int64"]),
        ({"bias": 0.5}, TypeError, ["bias", "float"]),
        ({"bias": torch.ones(23, device="meta")}, ValueError, ["bias", "meta"]),
        ({"attention_mask": torch.ones(3, 4)}, ValueError, ["attention_mask", "[3, 4]", "5"]),
        ({"attention_mask": torch.ones(1, 5)}, ValueError, ["attention_mask", "[1, 5]"]),
        ({"attention_mask": torch.ones(3, 5, 1)}, ValueError, ["attention_mask", "[3, 5, 1]"]),
        ({"attention_mask": torch.ones(5)}, ValueError, ["attention_mask", "[5]"]),
        ({"attention_mask": 2 * torch.ones(3, 5)}, ValueError, ["attention_mask", "2"]),
        ({"attention_mask": -2 * RAGGED}, ValueError, ["attention_mask", "-2"]),
        ({"attention_mask": (1.0 - RAGGED) * -1e4}, ValueError, ["attention_mask", "-10000"]),
        ({"attention_mask": torch.full((3, 5), torch.nan)}, ValueError, ["attention_mask"]),
        ({"attention_mask": [[1] * 5] * 3}, TypeError, ["attention_mask", "list"]),
        ({"attention_mask": torch.ones(3, 5).cfloat()}, TypeError, ["attention_mask"]),
        ({"attention_mask": torch.ones(3, 5, device="meta")}, ValueError, ["attention_mask"]),
        ({"gate": torch.ones(23)}, ValueError, ["gate", "[23]"]),
        ({"gate": torch.ones(1, 23)}, ValueError, ["gate", "[1, 23]", "3"]),
        ({"gate": torch.ones(3, 22)}, ValueError, ["gate", "[3, 22]", "23"]),
        ({"gate": torch.ones(3, 5, 23)}, ValueError, ["gate", "[3, 5, 23]"]),
        ({"gate": 0.5}, TypeError, ["gate", "float"]),
        ({"gate": torch.ones(3, 23).long()}, TypeError, ["gate", "int64"]),
        ({"gate": torch.full((3, 23), 1.5)}, ValueError, ["gate", "1.5"]),
        ({"gate": torch.full((3, 23), -0.25)}, ValueError, ["gate", "-0.25"]),
        ({"gate": torch.ones(3, 23, device="meta")}, ValueError, ["gate", "meta"]),
        ({"return_logits": "False"}, TypeError, ["return_logits", "'False'"]),
        ({"return_logits": None}, TypeError, ["return_logits"]),
        ({"sparse_grad": "yes"}, TypeError, ["sparse_grad", "'yes'"]),
        ({"sparse_grad": 1}, TypeError, ["sparse_grad"]),
    ],
)
def test_errors_name_the_argument_and_show_what_came(change, error, words):
    with pytest.raises(error) as caught:
        splade_head(**{**example(torch.float32), **change})
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.index(words[0]) < 40, "the argument comes first"


def test_flags_and_the_gate_are_keywords():
    with pytest.raises(TypeError):
        splade_head(*example().values(), torch.ones(3, 23))


# ------------------------------------------------------------------------------------------------
# The module


def module_and_rest(kind: str, **options) -> tuple[SpladeHead, dict]:
    tensors = example()
    make = nn.Parameter if kind == "parameter" else torch.clone
    module = SpladeHead(make(tensors.pop("weight")), make(tensors.pop("bias")), **options)
    return module, tensors


kinds = pytest.mark.parametrize("kind", ["parameter", "plain"])


@kinds
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("return_logits", [False, True])
def test_the_module_equals_the_function(kind, gated, return_logits):
    module, rest = module_and_rest(kind)
    options = {"return_logits": return_logits}
    if gated:
        options["gate"] = with_gate(example())["gate"]
    actual = module(**rest, **options)
    expected = splade_head(**example(), **options)
    for one, two in zip(actual, expected, strict=True):
        assert torch.equal(one, two)
        assert two.any()
    assert torch.equal(module(rest["hidden"]), splade_head(**example(attention_mask=None)))


def test_a_parameter_stays_that_very_parameter():
    embedding, bias = nn.Embedding(23, 8), nn.Parameter(torch.zeros(23))
    module = SpladeHead(embedding.weight, bias)
    assert module.weight is embedding.weight
    assert module.bias is bias
    assert dict(module.named_parameters()) == {"weight": embedding.weight, "bias": bias}
    assert not list(module.buffers())
    model = nn.ModuleDict({"embedding": embedding, "head": module})
    assert len(list(model.parameters())) == 2
    ids = torch.randint(0, 23, (2, 5))
    module(embedding(ids)).sum().backward()
    assert embedding.weight.grad.any()
    twin = copy.deepcopy(model)
    assert twin["head"].weight is twin["embedding"].weight
    assert twin["head"].weight is not embedding.weight
    with torch.no_grad():
        embedding.weight.mul_(2)
    assert torch.equal(module.weight, embedding.weight)
    model.double()
    assert module.weight is embedding.weight


def test_a_plain_tensor_is_frozen():
    module, rest = module_and_rest("plain")
    assert not list(module.parameters())
    assert set(dict(module.named_buffers())) == {"weight", "bias"}
    hidden = rest["hidden"].requires_grad_()
    module(**rest).sum().backward()
    assert hidden.grad.any()
    assert module.weight.grad is None
    single = module.float()(hidden.float(), rest["attention_mask"])
    assert single.dtype == torch.float32
    mixed = SpladeHead(nn.Parameter(torch.ones(23, 8)), torch.ones(23))
    assert set(dict(mixed.named_parameters())) == {"weight"}
    assert set(dict(mixed.named_buffers())) == {"bias"}


@kinds
def test_the_module_survives_copying_pickling_and_its_state_dict(kind):
    module, rest = module_and_rest(kind)
    expected = module(**rest)
    assert expected.any()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(**rest), expected)
        assert type(twin.weight) is type(module.weight)
    state = module.state_dict()
    assert set(state) == {"weight", "bias"}
    make = nn.Parameter if kind == "parameter" else torch.clone
    fresh = SpladeHead(make(torch.zeros(23, 8).double()), make(torch.zeros(23).double()))
    assert not fresh(**rest).any()
    fresh.load_state_dict(state)
    assert torch.equal(fresh(**rest), expected)


def test_a_module_without_a_bias():
    tensors = example()
    module = SpladeHead(nn.Parameter(tensors["weight"]))
    assert module.bias is None
    assert set(module.state_dict()) == {"weight"}
    out = module(tensors["hidden"], RAGGED)
    assert torch.equal(out, splade_head(**{**tensors, "bias": None}))
    assert torch.equal(copy.deepcopy(module)(tensors["hidden"], RAGGED), out)
    assert out.any()


def test_the_decoder_of_a_model():
    decoder = nn.Linear(8, 23, dtype=torch.float64)
    tensors = example()
    hidden, mask = tensors["hidden"], tensors["attention_mask"]
    module = SpladeHead(decoder.weight, decoder.bias)
    expected = splade_pool(decoder(hidden), mask)
    torch.testing.assert_close(module(hidden, mask), expected, rtol=1e-12, atol=1e-12)
    assert expected.any()


def test_the_module_gives_sparse_gradients():
    module, rest = module_and_rest("parameter", sparse_grad=True)
    module(**rest).sum().backward()
    assert module.weight.grad.is_sparse
    assert module.weight.grad.to_dense().any()
    module.weight.grad = None
    module.sparse_grad = False
    module(**rest).sum().backward()
    assert not module.weight.grad.is_sparse


def test_repr_shows_the_sizes():
    text = repr(SpladeHead(torch.ones(91, 17), sparse_grad=True))
    assert text.startswith("SpladeHead(")
    assert "91" in text
    assert "17" in text
    assert "sparse_grad=True" in text


@pytest.mark.parametrize(
    ("weight", "bias", "options", "name"),
    [
        (torch.ones(3), None, {}, "weight"),
        (torch.ones(3, 2, 1), None, {}, "weight"),
        ([[1.0]], None, {}, "weight"),
        (torch.ones(3, 2), torch.ones(2), {}, "bias"),
        (torch.ones(3, 2), torch.ones(3, 1), {}, "bias"),
        (torch.ones(3, 2), 1.0, {}, "bias"),
        (torch.ones(3, 2), None, {"sparse_grad": "False"}, "sparse_grad"),
    ],
)
def test_the_module_refuses_what_it_cannot_use(weight, bias, options, name):
    with pytest.raises((ValueError, TypeError), match=name):
        SpladeHead(weight, bias, **options)(torch.ones(1, 1, 2))


def test_a_vocabulary_of_nothing_is_refused_and_a_width_of_nothing_is_the_bias():
    with pytest.raises(ValueError, match="weight"):
        splade_head(torch.ones(2, 3, 4), torch.ones(0, 4))
    bias = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
    activations = splade_head(torch.ones(2, 3, 0), torch.ones(3, 0), bias)
    activations.sum().backward()
    torch.testing.assert_close(activations[1].detach(), torch.log1p(torch.tensor([0.0, 0.0, 1.0])))
    torch.testing.assert_close(bias.grad, torch.tensor([0.0, 0.0, 1.0]))


@pytest.mark.parametrize("screening", [False, True])
def test_a_closed_gate_hides_no_nan(screening, monkeypatch):
    monkeypatch.setattr(head, "SCREENING", screening)
    hidden = torch.ones(1, 2, 3)
    hidden[0, 1, 0] = torch.nan
    assert splade_head(hidden, torch.ones(4, 3), gate=torch.zeros(1, 4)).isnan().all()
