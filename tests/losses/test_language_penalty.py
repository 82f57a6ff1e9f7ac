"""Language penalty: its formula, its theorems, its edges."""

import numpy as np
import torch
from hypothesis import given

from sparse_losses import language_penalty
from sparse_losses.functional import language_penalty_loss
from tests.cases import assert_follows_the_formula
from tests.strategies import activations, seeds


@given(activations(), seeds)
def test_value_is_the_formula_for_any_penalty(x, seed):
    penalty = np.random.default_rng(seed).choice([0.0, 1.5, 100.0], size=x.shape[1])
    assert_follows_the_formula("language_penalty", {"activations": x, "token_penalty": penalty})


@given(activations(), seeds)
def test_texts_of_the_wanted_languages_cost_nothing_and_are_left_alone(x, seed):
    allowed = torch.from_numpy(np.random.default_rng(seed).random(x.shape[1]) < 0.5)
    p = language_penalty(x.shape[1], allowed.nonzero()[:, 0])
    x = (torch.from_numpy(x) * allowed).requires_grad_()
    rows = language_penalty_loss(x, p, reduction="none")
    assert not rows.any()
    (slope,) = torch.autograd.grad(rows.sum(), x)
    assert not slope[:, allowed].any()
    assert (slope[:, ~allowed] == 100).all()  # a ReLU that is silent does not let it through
