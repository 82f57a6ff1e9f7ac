"""FLOPS: its formula, its theorems, its edges."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import flops_loss, idf_flops_loss
from tests import oracles
from tests.cases import assert_follows_the_formula
from tests.instruments import in_double, value_and_gradients
from tests.strategies import activations, seeds


@given(activations(), seeds, st.none() | st.integers(0, 12), st.booleans())
def test_value_is_the_formula_for_any_weight_and_threshold(x, seed, threshold, weighs):
    arrays = {"activations": x}
    if weighs:
        arrays["token_weight"] = np.random.default_rng(seed).random(x.shape[1])
    for estimator in ("biased", "unbiased")[: min(len(x), 2)]:
        assert_follows_the_formula("flops", arrays, threshold=threshold, estimator=estimator)


@given(activations(min_rows=2), st.integers(0, 12), st.sampled_from(["biased", "unbiased"]))
def test_a_row_up_to_the_threshold_is_a_row_of_zeros(x, threshold, estimator):
    x = torch.from_numpy(x).requires_grad_()
    kept = (x.detach() != 0).sum(1) > threshold
    loss = flops_loss(x, estimator=estimator, threshold=threshold)
    torch.testing.assert_close(loss, flops_loss(x.detach() * kept[:, None], estimator=estimator))
    (gradient,) = torch.autograd.grad(loss, x)
    assert not gradient[~kept].any()
    assert flops_loss(x, estimator=estimator, threshold=threshold + 1) <= loss + 1e-12


def test_a_threshold_hides_no_nan():
    x = torch.tensor([[1.0, 2.0, 3.0], [torch.nan, 0.0, 0.0]])
    assert flops_loss(x, threshold=2).isnan()
    assert idf_flops_loss(x, torch.ones(3), threshold=2).isnan()


@given(activations(), seeds)
def test_it_is_linear_in_the_weight_and_a_weight_inside_the_square_is_squared(x, seed):
    weight = torch.from_numpy(np.random.default_rng(seed).random(x.shape[1]))
    x = torch.from_numpy(x)
    torch.testing.assert_close(flops_loss(x, torch.ones_like(weight)), flops_loss(x))
    torch.testing.assert_close(flops_loss(x, 3 * weight), 3 * flops_loss(x, weight))
    torch.testing.assert_close(flops_loss(x, weight**2), flops_loss(x * weight))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_on_one_hot_rows_it_counts_shared_columns(columns):
    batch = len(columns)
    x = torch.nn.functional.one_hot(torch.tensor(columns), 5).double()
    counts = np.bincount(columns, minlength=5)
    assert flops_loss(x).item() == pytest.approx((counts**2).sum() / batch**2)
    if batch > 1:
        pairs = (counts * (counts - 1)).sum() / (batch * (batch - 1))
        assert flops_loss(x, estimator="unbiased").item() == pytest.approx(pairs, abs=1e-12)


@given(activations(min_rows=3))
def test_unbiased_has_the_same_expectation_at_any_batch_size(x):
    whole = oracles.flops(x, estimator="unbiased")
    x = torch.from_numpy(x)
    for size in range(2, len(x)):
        subsets = [list(rows) for rows in combinations(range(len(x)), size)]
        values = [flops_loss(x[rows], estimator="unbiased").item() for rows in subsets]
        assert np.mean(values) == pytest.approx(whole, rel=1e-9, abs=1e-9)


@given(activations(min_rows=2))
def test_biased_is_off_by_the_variance_over_the_batch_size(x):
    x = torch.from_numpy(x)
    gap = flops_loss(x) - flops_loss(x, estimator="unbiased")
    torch.testing.assert_close(gap, x.var(dim=0).sum() / len(x), atol=1e-9, rtol=1e-9)
    assert gap >= -1e-12


@given(activations(), st.floats(0.1, 10.0))
def test_it_is_quadratic_in_the_scale(x, scale):
    x = torch.from_numpy(x)
    torch.testing.assert_close(flops_loss(x * scale), flops_loss(x) * scale**2)
    assert (flops_loss(x) > 0) == x.any()


@pytest.mark.parametrize("batch", [2, 5])
def test_unbiased_keeps_the_digits_of_a_column_that_is_nearly_one_rows(batch):
    x = torch.full((batch, 3), 1e-5)
    x[0, 1] = x[1, 2] = 8.0
    weight, options = torch.tensor([1.0, 0.5, 2.0]), {"estimator": "unbiased"}
    for function in (flops_loss, idf_flops_loss):

        def loss(x, function=function):
            return function(x, weight, **options)

        (value, gradient), (exact, expected) = value_and_gradients(loss, x), in_double(loss, x)
        assert value.item() == pytest.approx(exact.item(), rel=1e-6)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=0)
    pair = flops_loss(torch.tensor([[8.0], [1e-5]]), **options)
    assert pair.item() == pytest.approx(8e-5, rel=1e-6)


def test_signed_logits_cancel_in_the_mean():
    x = torch.tensor([[2.0, -3.0], [-2.0, 3.0]])  # what the documentation warns of
    assert flops_loss(x) == 0.0
    assert idf_flops_loss(x, torch.ones(2)) == 0.0
