"""IDF-weighted FLOPS: its formula, its theorems, its edges."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import idf_flops_loss, language_penalty_loss
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


@given(activations(), seeds)
def test_without_the_squares_it_is_the_language_penalty(x, seed):
    w = torch.from_numpy(np.random.default_rng(seed).random(x.shape[1]))
    x = torch.from_numpy(x)
    torch.testing.assert_close(idf_flops_loss(x, w, beta=0.0), language_penalty_loss(x, w))


@given(activations(min_rows=3), seeds, betas)
def test_only_the_squares_see_the_batch_size_and_unbiased_not_even_they(x, seed, beta):
    w = torch.from_numpy(np.random.default_rng(seed).random(x.shape[1]))
    x = torch.from_numpy(x)

    def average(size, **options):
        subsets = [list(rows) for rows in combinations(range(len(x)), size)]
        values = [idf_flops_loss(x[rows], w, **options) for rows in subsets]
        return torch.stack(values).mean()

    for size in range(2, len(x)):
        whole = idf_flops_loss(x, w, beta=beta, estimator="unbiased")
        torch.testing.assert_close(average(size, beta=beta, estimator="unbiased"), whole)
        torch.testing.assert_close(average(size, beta=0.0), idf_flops_loss(x, w, beta=0.0))
    gap = idf_flops_loss(x, w, beta=beta) - idf_flops_loss(x, w, beta=beta, estimator="unbiased")
    variance = x.var(dim=0, unbiased=True)
    torch.testing.assert_close(gap, beta * (w * variance).sum() / len(x), atol=1e-9, rtol=1e-7)


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
