"""MarginMSE: its formula, its theorems, its edges."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import distillation_loss, margin_mse_loss
from tests.cases import assert_follows_the_formula
from tests.strategies import draw, seeds


@given(seeds, st.integers(0, 6), st.none() | st.integers(0, 3), st.booleans())
def test_value_is_the_formula_for_any_number_of_negatives(seed, batch, count, masks):
    rng, arrays = np.random.default_rng(seed), {}
    several = batch if count is None else (batch, count)
    for name in ("student_positive", "student_negative", "teacher_positive", "teacher_negative"):
        scores = rng.normal(size=several if name.endswith("negative") else batch, scale=20)
        is_absent = rng.random(scores.shape) < 0.3 * name.startswith("teacher")
        arrays[name] = np.where(is_absent, -np.inf, scores)
    if masks:
        arrays["candidate_mask"] = rng.random(several) < 0.6
    assert_follows_the_formula("margin_mse", arrays)


@pytest.mark.parametrize(
    ("student", "teacher", "mask", "name"),
    [
        ((2, 3), (2,), None, "teacher_negative"),
        ((2,), (2, 3), None, "teacher_negative"),
        ((2,), (2,), (2, 3), "candidate_mask"),
        ((2, 3), (2, 3), (2,), "candidate_mask"),
    ],
)
def test_the_negatives_and_their_mask_have_one_shape(student, teacher, mask, name):
    mask = None if mask is None else torch.ones(mask)
    scores = (torch.ones(shape) for shape in ((2,), student, (2,), teacher))
    with pytest.raises(ValueError, match=f"`{name}` of the shape of `student_negative`"):
        margin_mse_loss(*scores, candidate_mask=mask)


@given(seeds, st.floats(-9, 9), st.floats(-9, 9))
def test_it_sees_margins_only(seed, shift, other):
    sp, sn, tp, tn = draw(seed, 4, 5)
    moved = margin_mse_loss(sp + shift, sn + shift, tp + other, tn + other)
    torch.testing.assert_close(moved, margin_mse_loss(sp, sn, tp, tn))
    assert moved > 0


@given(seeds, st.floats(0.1, 10.0))
def test_it_is_quadratic_in_the_scale(seed, scale):
    scores = draw(seed, 4, 5)
    loss = margin_mse_loss(*scores)
    assert loss > 0
    torch.testing.assert_close(margin_mse_loss(*(scale * v for v in scores)), scale**2 * loss)


@given(seeds)
def test_the_hot_limit_of_distillation_over_two_candidates_is_an_eighth_of_it(seed):
    sp, sn, tp, tn = draw(seed, 4, 5)
    student, teacher = torch.stack([sp, sn], dim=1), torch.stack([tp, tn], dim=1)
    hot = distillation_loss(student, teacher, temperature=1e3, alpha_kl=1.0, alpha_mse=0.0)
    assert 8 * hot.item() == pytest.approx(margin_mse_loss(sp, sn, tp, tn).item(), rel=1e-2)


def test_plus_infinity_of_the_teacher_is_not_hidden():
    sp, sn, tp, tn = draw(0, 4, 5)
    tp[0] = torch.inf
    assert margin_mse_loss(sp, sn, tp, tn) == torch.inf


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of sizes, which are compared
@pytest.mark.parametrize("loss", [margin_mse_loss, distillation_loss])
def test_a_trace_without_gaps_masks_later_ones(loss):
    scores = torch.rand(4, 3), torch.rand(4, 3)
    if loss is margin_mse_loss:
        scores = scores[0][:, 0], scores[0], scores[1][:, 0], scores[1]
    mask, all_there = torch.rand(4, 3) < 0.5, torch.ones(4, 3, dtype=torch.bool)
    traced = torch.jit.trace(lambda mask: loss(*scores, candidate_mask=mask), (all_there,))
    for each in (all_there, mask):
        torch.testing.assert_close(traced(each), loss(*scores, candidate_mask=each))
