"""Pooling, beyond the contract that it keeps (tests/losses/test_contract.py)."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses import explain
from sparse_losses.functional import splade_pool, token_weights
from tests import oracles
from tests.strategies import seeds


@st.composite
def texts(draw):
    rng = np.random.default_rng(draw(seeds))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(3))
    logits = rng.normal(size=shape) * 2
    if draw(st.booleans()):  # with ties
        logits = rng.integers(-2, 3, size=shape).astype(np.float64)
    return logits, rng.random(shape[:2]) < draw(st.sampled_from([0.0, 0.6, 1.0]))


@pytest.mark.parametrize("impl", ["definition", "nonzeros"])
@given(texts())
def test_values_and_gradients_are_those_of_the_formula(impl, text):
    x, m = torch.from_numpy(text[0]).requires_grad_(), torch.from_numpy(text[1])
    alone = splade_pool(x, m, impl=impl)
    activations, pooled = splade_pool(x, m, return_logits=True, impl=impl)
    assert torch.equal(activations, alone)
    for values, oracle in (
        (alone, oracles.splade_pool),
        (pooled, oracles.pooled_logits),
        (token_weights(x, m), oracles.token_weights),
    ):
        np.testing.assert_allclose(values.detach(), oracle(*text), rtol=1e-12, atol=1e-12)
    factor = torch.linspace(0.5, 1.5, pooled.numel()).double().reshape(pooled.shape)
    (gradient,) = torch.autograd.grad((factor * (activations + 3 * pooled)).sum(), x)
    slope = torch.where(pooled > 0, 1 / (1 + pooled.clamp(min=0)), 0.0) + 3
    expected = torch.where(m.any(1)[:, None], factor * slope, 0.0)
    place = x.detach().masked_fill(~m[..., None], -torch.inf).numpy().argmax(1)  # the first
    expected = torch.zeros_like(x).scatter(1, torch.from_numpy(place)[:, None], expected[:, None])
    torch.testing.assert_close(gradient, expected)


FUNCTIONS = {"token_weights": token_weights}
for impl in ("definition", "nonzeros"):
    alone = FUNCTIONS[impl] = functools.partial(splade_pool, impl=impl)
    FUNCTIONS[f"logits of {impl}"] = lambda x, m, f=alone: f(x, m, return_logits=True)[1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masked_position_hides_everything_and_a_text_without_positions_is_zero(name):
    function, mask = FUNCTIONS[name], torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    logits = torch.randn(2, 4, 7, dtype=torch.float64)
    plain = function(logits, mask)
    for bad in (torch.nan, torch.inf):
        leaf = logits.masked_fill(mask[..., None] == 0, bad).requires_grad_()
        out = function(leaf, mask)
        assert torch.equal(out, plain)
        out.sum().backward()
        assert (leaf.grad.any(2) <= mask).all()
        assert leaf.grad.isfinite().all()
        assert leaf.grad.any()
    logits = torch.zeros(2, 0, 7, requires_grad=True)
    out = function(logits, torch.ones(2, 0))
    assert out.shape == ((2, 0) if name == "token_weights" else (2, 7))
    assert not out.any()
    out.sum().backward()


@pytest.mark.cpu_only
def test_auto_uses_nonzeros_for_large_texts_that_are_long_or_sparse():
    """Elsewhere the definition is faster: twice, where all entries of short texts are active."""
    short, masked = torch.randn(3, 16, 5000), torch.arange(16) >= 8  # do not count as active
    sparse = torch.where(torch.arange(5000) % 5 == 0, short, -short.abs())
    halved = torch.where(masked[:, None], 1.0, -short.abs())
    for logits, mask, whole, expected in [
        (short, torch.ones(3, 16), False, "definition"),
        (sparse, torch.ones(3, 16), False, "nonzeros"),
        (sparse, torch.ones(3, 16), True, "definition"),
        (torch.randn(3, 64, 1024), torch.ones(3, 64), True, "nonzeros"),
        (short[:0], torch.ones(0, 16), False, "definition"),
        (halved, (~masked).repeat(3, 1), False, "nonzeros"),
    ]:
        assert f'takes "{expected}"' in explain(splade_pool, logits, mask, return_logits=whole)


@pytest.mark.parametrize("impl", ["definition", "nonzeros"])
def test_threshold_per_token_leaves_the_weights_above_it_and_the_pooled_logits(impl):
    logits = torch.tensor([[[1.0, 2.0, 3.0, -1.0]], [[2.0, 1.0, 3.0, torch.nan]]])
    options = {"threshold": torch.tensor([1.0, 1.5, -5.0, 0.5]), "return_logits": True}
    out, pooled = splade_pool(logits.requires_grad_(), torch.ones(2, 1), impl=impl, **options)
    expected = [[0.0, math.log(3), math.log(4), 0.0], [math.log(3), 0.0, math.log(4), math.nan]]
    torch.testing.assert_close(out, torch.tensor(expected), equal_nan=True)
    torch.testing.assert_close(pooled, logits[:, 0], equal_nan=True)
    (gradient,) = torch.autograd.grad(out[0].sum(), logits)
    assert gradient[0, 0].bool().tolist() == [False, True, True, False]


def test_soft_cap_of_infinite_logits_is_the_cap():
    logits = torch.tensor([[[torch.inf, -torch.inf]]], requires_grad=True)
    out, pooled = splade_pool(logits, torch.ones(1, 1), softcap=2.0, return_logits=True)
    assert pooled.tolist() == [[2.0, -2.0]]
    (grad,) = torch.autograd.grad(out.sum(), logits)
    assert grad.tolist() == [[[0.0, 0.0]]]


WRONG = [("activation", "identity"), ("softcap", 0.0), ("softcap", math.nan)]
WRONG += [("threshold", x) for x in (math.inf, torch.ones(3), torch.ones(1, 2), True)]


def test_wrong_options_are_named():
    for name, value in WRONG:
        with pytest.raises((TypeError, ValueError), match=f"`{name}`"):
            splade_pool(torch.randn(1, 2, 2), torch.ones(1, 2), **{name: value})
    with pytest.raises(ValueError, match=r"`logits` with V >= 1, got \[2, 3, 0\]"):
        token_weights(torch.zeros(2, 3, 0), torch.ones(2, 3))
