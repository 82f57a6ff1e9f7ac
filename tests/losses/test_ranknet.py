"""RankNet: its formula, its theorems, its edges; and ListNet, which distillation is."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import distillation_loss, ranknet_loss
from tests.cases import assert_follows_the_formula
from tests.strategies import draw, score_problems, seeds, temperatures


@given(score_problems())
def test_value_is_the_formula_for_any_scores(problem):
    arrays, options = problem
    assert_follows_the_formula("ranknet", arrays, temperature=options["temperature"])


@given(seeds, temperatures)
def test_of_two_candidates_it_is_the_logistic_loss_of_their_gap(seed, temperature):
    student, teacher = draw(seed, 6, 2), draw(seed + 1, 6, 2)
    label = (teacher[:, 0] > teacher[:, 1]).double()
    gap = (student[:, 0] - student[:, 1]) / temperature
    expected = torch.nn.functional.binary_cross_entropy_with_logits(gap, label)
    torch.testing.assert_close(ranknet_loss(student, teacher, temperature=temperature), expected)


@given(seeds)
def test_only_the_order_of_the_teacher_and_the_gaps_of_the_student_count(seed):
    student, teacher = draw(seed, 4, 5), draw(seed + 1, 4, 5)
    rows = ranknet_loss(student, teacher, reduction="none")
    ranks = teacher.argsort(1).argsort(1).double()
    torch.testing.assert_close(ranknet_loss(student + 7.0, ranks, reduction="none"), rows)
    order = torch.tensor([3, 0, 4, 1, 2])
    moved = ranknet_loss(student[:, order], teacher[:, order], reduction="none")
    torch.testing.assert_close(moved, rows)
    assert (rows > 0).all()


@given(seeds, st.floats(1.0, 50.0))
def test_the_cold_limit_counts_the_gaps_of_swapped_pairs(seed, scale):
    student, teacher = draw(seed, 3, 4) * scale, draw(seed + 1, 3, 4)
    temperature = 1e-6
    rows = temperature * ranknet_loss(student, teacher, temperature=temperature, reduction="none")
    gaps = student[:, None, :] - student[:, :, None]
    swapped = (teacher[:, :, None] > teacher[:, None, :]).double() * gaps.clamp(min=0)
    torch.testing.assert_close(rows, swapped.sum((1, 2)) / 6, rtol=1e-5, atol=1e-5)


def test_a_row_of_ties_is_not_valid_and_hides_its_nan():
    student = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan]], requires_grad=True)
    teacher = torch.tensor([[2.0, 1.0], [5.0, 5.0]])
    mean = ranknet_loss(student, teacher)
    assert mean.item() == pytest.approx(math.log1p(math.e))
    (gradient,) = torch.autograd.grad(mean, student)
    assert gradient[0].all()
    assert not gradient[1].any()


def test_plus_infinity_is_the_best_and_a_nan_shows():
    student = torch.tensor([[0.0, 2.0, 1.0]])
    best = ranknet_loss(student, torch.tensor([[torch.inf, 2.0, 1.0]]))
    assert best == ranknet_loss(student, torch.tensor([[3.0, 2.0, 1.0]]))
    student.requires_grad_()
    ranknet_loss(student, torch.tensor([[torch.nan, 1.0, 1.0]])).backward()
    assert student.grad.isnan().any(), "and the value is then a NaN, too"


@given(seeds)
def test_distillation_without_temperature_and_mse_is_listnet(seed):
    """Cross-entropy of the softmax of the grades, but for the entropy of the grades."""
    student, grades = draw(seed, 4, 5).requires_grad_(), draw(seed + 1, 4, 5).round()
    target = grades.softmax(1)
    listnet = -(target * student.log_softmax(1)).sum(1).mean()
    loss = distillation_loss(student, grades, temperature=1.0, alpha_kl=1.0, alpha_mse=0.0)
    entropy = -(target * target.log()).sum(1).mean()
    torch.testing.assert_close(loss, listnet - entropy)
    torch.testing.assert_close(*(torch.autograd.grad(x, student)[0] for x in (loss, listnet)))
