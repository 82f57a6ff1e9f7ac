"""Minimum activation: its formula, its theorems, its edges."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import min_activation_loss, splade_pool
from tests.cases import assert_follows_the_formula
from tests.strategies import activations, seeds

thresholds = st.floats(-1.0, 4.0)


@given(st.data(), activations(), thresholds, st.booleans(), seeds)
def test_value_is_the_formula_for_any_activations(data, x, threshold, counted, seed):
    arrays = {"activations": x}
    if counted:
        arrays["token_counts"] = np.random.default_rng(seed).integers(0, 15, size=len(x))
    top_k = data.draw(st.integers(1, x.shape[1]))
    assert_follows_the_formula("min_activation", arrays, top_k=top_k, threshold=threshold)


@given(activations(min_vocab=3), st.floats(5.0, 50.0))
def test_a_larger_top_k_never_lowers_it(x, threshold):
    x = torch.from_numpy(x)
    rows = [
        min_activation_loss(x, top_k=k, threshold=threshold, reduction="none")
        for k in range(1, x.shape[1] + 1)
    ]
    for fewer, more in pairwise(rows):
        assert (more >= fewer - 1e-12).all()
    torch.testing.assert_close(rows[-1], (threshold - x.mean(-1)).clamp(min=0))


@given(activations(min_vocab=5))
def test_a_satisfied_row_has_no_gradient(x):
    x = torch.from_numpy(x).requires_grad_()
    mean = x.detach().topk(5).values.mean(-1)
    rows = min_activation_loss(x, threshold=0.8, reduction="none")
    rows.sum().backward()
    satisfied = mean > 0.8
    assert not rows[satisfied].any()
    assert not x.grad[satisfied].any()
    assert (x.grad[mean < 0.8].sum(-1) < 0).all()


@given(activations(min_vocab=5), st.floats(0.0, 4.0))
def test_of_activations_it_lies_between_zero_and_the_threshold(x, threshold):
    rows = min_activation_loss(torch.from_numpy(x), threshold=threshold, reduction="none")
    assert (rows >= 0).all()
    assert (rows <= threshold).all()
    silent = min_activation_loss(torch.zeros(3, 5), threshold=threshold, reduction="none")
    torch.testing.assert_close(silent, torch.full((3,), threshold))


def test_behind_a_relu_a_silent_text_has_a_gradient_through_its_logits_only():
    logits = torch.full((2, 7, 50), -1.0, requires_grad=True)
    x, pooled = splade_pool(logits, torch.ones(2, 7), return_logits=True)
    loss = min_activation_loss(x)
    assert loss.item() == 0.5
    (dead,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert not dead.any()
    (alive,) = torch.autograd.grad(min_activation_loss(pooled), logits)
    assert alive.sum().item() == pytest.approx(-1)


@pytest.mark.cpu_only
def test_an_entry_below_zero_has_no_rank_among_the_zeros():
    with pytest.raises(ValueError, match=r"expected `activations` >= 0, got -2"):
        min_activation_loss(torch.tensor([[1.0, -2.0]]).to_sparse_csr(), top_k=1)


def test_a_negative_token_count_is_no_token():
    x = torch.rand(2, 6)
    rows = min_activation_loss(x, torch.tensor([-1, 3]), threshold=2.0, reduction="none")
    assert rows[0] == 0.0
    assert rows[1] > 0.0
