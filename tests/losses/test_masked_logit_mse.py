"""Masked logit MSE: its formula, its theorems, its edges."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import masked_logit_mse_loss
from tests.cases import assert_follows_the_formula
from tests.strategies import draw, seeds

thresholds = st.floats(-2.0, 2.0)


@given(seeds, thresholds)
def test_value_is_the_formula_for_any_logits(seed, threshold):
    rng = np.random.default_rng(seed)
    shape = (rng.integers(1, 5), rng.integers(1, 9))
    logits = {f"{whose}_logits": rng.normal(size=shape) * 2 for whose in ("student", "teacher")}
    assert_follows_the_formula("masked_logit_mse", logits, threshold=threshold)


@given(seeds, thresholds)
def test_below_every_logit_it_is_the_mean_squared_error(seed, threshold):
    student, teacher = draw(seed, 4, 7), draw(seed + 1, 4, 7)
    lowest = min(student.min().item(), teacher.min().item()) - 1.0
    value = masked_logit_mse_loss(student, teacher, threshold=lowest)
    torch.testing.assert_close(value, torch.nn.functional.mse_loss(student, teacher))
    # A constant on both sides and on the threshold changes nothing.
    before = masked_logit_mse_loss(student, teacher, threshold=threshold)
    after = masked_logit_mse_loss(student + 3.0, teacher + 3.0, threshold=threshold + 3.0)
    torch.testing.assert_close(after, before)


@given(seeds)
def test_it_is_quadratic_symmetric_and_zero_only_for_equal_active_logits(seed):
    student, teacher = draw(seed, 5, 6), draw(seed + 1, 5, 6)
    value = masked_logit_mse_loss(student, teacher)
    torch.testing.assert_close(masked_logit_mse_loss(teacher, student), value)
    torch.testing.assert_close(masked_logit_mse_loss(3 * student, 3 * teacher), 9 * value)
    lower = torch.where(student > 0, student, student - 2.0)  # silent dimensions are not copied
    assert masked_logit_mse_loss(lower, student) == 0.0


def test_a_nan_shows_on_either_side_and_infinite_silence_does_not():
    for side in (0, 1):
        logits = [torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0, -2.0]])]
        logits[side][0, 1] = math.nan
        assert masked_logit_mse_loss(*logits).isnan()
    student = torch.tensor([[1.0, -math.inf]], requires_grad=True)
    value = masked_logit_mse_loss(student, torch.tensor([[3.0, -math.inf]]))
    assert value == 4.0
    (slope,) = torch.autograd.grad(value, student)
    assert slope.tolist() == [[-4.0, 0.0]]
