"""IDF-weighted FLOPS: its formula, its theorems, its edges."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import idf_flops_loss
from tests.cases import assert_follows_the_formula
from tests.strategies import activations, seeds

betas = st.floats(0.0, 3.0)


@given(activations(), seeds, betas, st.none() | st.integers(0, 12))
def test_value_is_the_formula_for_any_activations(x, seed, beta, threshold):
    rng = np.random.default_rng(seed)
    arrays = {"activations": x * rng.choice([-1, 1]), "token_penalty": rng.random(x.shape[1])}
    for estimator in ("biased", "unbiased")[: min(len(x), 2)]:
        options = {"beta": beta, "estimator": estimator, "threshold": threshold}
        assert_follows_the_formula("idf_flops", arrays, **options)


@given(activations(), seeds, betas)
def test_it_is_linear_in_the_penalty(x, seed, beta):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(x)
    one, two = (torch.from_numpy(rng.random(x.shape[1])) for _ in range(2))
    parts = 2 * idf_flops_loss(x, one, beta=beta) + 3 * idf_flops_loss(x, two, beta=beta)
    torch.testing.assert_close(idf_flops_loss(x, 2 * one + 3 * two, beta=beta), parts)
    assert (parts > 0) == x.any()


def test_without_its_squares_a_large_mean_is_its_weighted_absolute_value():
    """Its square is infinite in fp32, and 0 times that a NaN."""
    x = torch.tensor([[1e30, 2.0]], requires_grad=True)
    loss = idf_flops_loss(x, torch.tensor([0.5, 3.0]), beta=0.0)
    loss.backward()
    assert loss.item() == pytest.approx(5e29)
    assert x.grad.tolist() == [[0.5, 3.0]]


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
def test_an_unused_column_has_no_gradient_whatever_its_penalty(estimator):
    x = torch.tensor([[0.0, 1.0]] * 3, requires_grad=True)
    idf_flops_loss(x, torch.full((2,), 100.0), estimator=estimator).backward()
    assert not x.grad[:, 0].any()
    assert x.grad[:, 1].all()
