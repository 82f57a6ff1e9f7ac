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


def test_without_its_squares_a_large_mean_is_its_weighted_absolute_value():
    """Its square is infinite in fp32, and 0 times that a NaN."""
    x = torch.tensor([[1e30, 2.0]], requires_grad=True)
    loss = idf_flops_loss(x, torch.tensor([0.5, 3.0]), beta=0.0)
    loss.backward()
    assert loss.item() == pytest.approx(5e29)
    assert x.grad.tolist() == [[0.5, 3.0]]
