"""Distillation: its formula, its theorems, its edges."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from sparse_losses.functional import distillation_loss
from tests.cases import assert_follows_the_formula, to_tensors
from tests.instruments import assert_keeps_digits, in_double, value_and_gradients
from tests.strategies import draw, score_problems, seeds

KL, MSE = {"alpha_kl": 1.0, "alpha_mse": 0.0}, {"alpha_kl": 0.0, "alpha_mse": 1.0}

modes = pytest.mark.parametrize("standardize", ["batch", "row"])


@given(score_problems())
def test_value_is_the_formula_for_any_scores(problem):
    arrays, options = problem
    assert_follows_the_formula("distillation", arrays, **options)


def textbook(s, z, temperature, alpha_kl, alpha_mse, standardize):
    """Both parts as the source writes them, which is exact enough in float64."""
    log_q, log_p = ((v / temperature).log_softmax(-1) for v in (s, z))
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    dims = (0, 1) if standardize == "batch" else 1
    zs, zt = ((v - v.mean(dims, True)) / (v.std(dims, keepdim=True) + 1e-8) for v in (s, z))
    return alpha_kl * temperature**2 * kl + alpha_mse * F.mse_loss(zs, zt)


@given(seeds, st.floats(-5, 5), st.sampled_from(["batch", "row"]))
def test_it_is_zero_if_the_scores_agree_up_to_a_shift(seed, shift, standardize):
    s, z = draw(seed, 4, 5), draw(seed + 1, 4, 5)
    loss = distillation_loss(z + shift, z, standardize=standardize)
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    assert distillation_loss(s, z, standardize=standardize).item() > 1e-4
    rows = z + shift * torch.arange(1.0, 5.0)[:, None]  # a shift of each row its own
    both = distillation_loss(rows, z, standardize=standardize).item()
    if standardize == "row":
        assert both == pytest.approx(0.0, abs=1e-12)
    elif abs(shift) > 0.1:
        assert both > 1e-6


@given(score_problems())
def test_the_gradient_of_the_forward_pass_is_that_of_the_formula(problem):
    """A learned temperature leaves the gradient to autograd."""
    arrays, options = problem
    tensors = to_tensors(arrays)
    s, temperature = tensors.pop("student_scores"), torch.tensor(options["temperature"])
    options["temperature"] = temperature.item()
    own, (_, *by_formula) = (
        value_and_gradients(lambda s, o=o: distillation_loss(s, **tensors, **o), s)
        for o in (options, options | {"temperature": temperature.requires_grad_()})
    )
    torch.testing.assert_close(own[1:], by_formula, rtol=1e-9, atol=1e-9)


@modes
@pytest.mark.parametrize("constant", [0.0, 0.3, -1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_constant_scores_have_a_zero_z_and_no_gradient_from_the_mse(standardize, constant, dtype):
    constants, z = torch.full((3, 4), constant, dtype=dtype), draw(0, 3, 4).to(dtype)
    options = {"standardize": standardize, "alpha_mse": 1.0}
    # the other side's z has unit unbiased variance: 3 of 4 degrees of freedom in a row, 11 of 12
    expected = pytest.approx(3 / 4 if standardize == "row" else 11 / 12, rel=1e-5)
    for student, teacher, alpha_kl in ((constants, z, 0), (constants, z, 1), (z, constants, 0)):
        loss, gradient = value_and_gradients(
            lambda s, t=teacher, a=alpha_kl: distillation_loss(s, t, alpha_kl=a, **options), student
        )
        assert alpha_kl or loss.item() == expected
        assert gradient.abs().max() < 10
        assert student is z or gradient.any() == alpha_kl
    assert distillation_loss(constants, torch.full_like(z, -7.1), **options) == 0.0


@modes
@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12, 1e20, 3e38])
def test_the_mse_part_neither_overflows_nor_underflows(standardize, scale):
    """The range of [-3e38, 3e38] is infinite in fp32; z sees no scale, and no other rounding."""
    z = torch.tensor([[1.0, -1.0, 0.0, 0.3], [-1.0, 0.3, 1.0, 0.7]])
    s = torch.tensor([[1.0, 3.0, -2.0, 0.5], [0.0, 1.0, 5.0, -1.0]]) / 5
    options = {**MSE, "standardize": standardize}

    def call(function, factor):
        return lambda s: function(factor * s, factor * z.to(s.dtype), **options)

    exact = call(functools.partial(textbook, temperature=1.0), scale)
    digits = {"of_value": 1e-5, "of_gradients": 1e-4, "exact": exact}
    assert_keeps_digits(call(distillation_loss, scale), s, **digits)


@modes
@pytest.mark.parametrize("temperature", [1.0, 1e4])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("alphas", [KL, MSE], ids=["kl", "mse"])
def test_single_precision_keeps_the_digits_of_small_differences(
    standardize, temperature, offset, alphas
):
    s = (draw(0, 7, 50) + offset).float()
    z = (s + 0.1 * draw(1, 7, 50)).float()
    options = {"temperature": temperature, "standardize": standardize, **alphas}
    both = distillation_loss, textbook
    ours, exact = (lambda s, f=f: f(s, z.to(s.dtype), **options) for f in both)
    # Scores are rounded to 1e-7 of the offset, log-probabilities to 1e-7: that is what differences
    # of 0.1, and of 0.1 / T, lose. `p log(p / q)` alone would lose the value, (0.1 / T)^2 / 2.
    close = 2e-5 * max(1.0, offset / 10, temperature / 4)
    assert_keeps_digits(ours, s, of_value=close, of_gradients=close, exact=exact)


@pytest.mark.parametrize("lead", [8.0, 12.0, 30.0, 60.0])
def test_an_easy_row_keeps_the_digits_of_its_gradient(lead):
    # By itself, minus the others' sum would be the difference of two numbers next to 1.
    s, z = torch.tensor([[[lead, 0.0, 0.5, -1.0]], [[lead + 1, 0.0, 0.3, -1.0]]])

    def loss(s):
        return distillation_loss(s, z.to(s.dtype), temperature=1.0, **KL)

    gradient, expected = value_and_gradients(loss, s)[1], in_double(loss, s)[1]
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-5, atol=0)


@pytest.mark.parametrize("temperature", [1e20, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_huge_temperature_leaves_the_mse(temperature, dtype):
    """T^2 is infinite in fp32, and both distributions are uniform: 0 * inf would be NaN."""
    s, z = draw(0, 3, 4).to(dtype), draw(1, 3, 4).to(dtype)
    alone, both = (
        value_and_gradients(
            lambda s, a=a: distillation_loss(s, z, temperature=temperature, alpha_kl=a), s
        )
        for a in (0.0, 0.7)
    )
    torch.testing.assert_close(both, alone)
    assert alone[1].any()


@modes
def test_one_score_that_differs_by_a_rounding_has_its_z_score(standardize):
    s = torch.full((4, 64), 1000.0)
    s[1, 5] = s[1, 5].nextafter(torch.tensor(torch.inf))
    z = draw(0, 4, 64).float()
    options = {**MSE, "standardize": standardize}
    exact = distillation_loss(s.double(), z.double(), **options)
    assert distillation_loss(s, z, **options).item() == pytest.approx(exact.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [  # a student that rules out a candidate, scores whose range overflows
        ([0.0, -math.inf], [0.0, 0.0], math.inf),
        ([1.0, 0.0, 0.0], [3e38, -3e38, 0.0], math.log(1 + 2 / math.e)),
    ],
)
def test_extreme_scores_have_a_kl(student, teacher, expected):
    scores = torch.tensor([student]), torch.tensor([teacher])
    assert distillation_loss(*scores, temperature=1.0, **KL).item() == pytest.approx(expected)


@modes
def test_a_hidden_nan_does_not_hide_a_gap(standardize):
    teacher = torch.tensor([[math.nan, -math.inf, 1.0, 0.0, 2.0]])
    student = torch.tensor([[0.5, 3.0, 0.2, -0.1, 0.4]])
    mask = torch.tensor([[False, True, True, True, True]])
    value = distillation_loss(student, teacher, candidate_mask=mask, standardize=standardize)
    expected = distillation_loss(student[:, 2:], teacher[:, 2:], standardize=standardize)
    torch.testing.assert_close(value, expected)


def test_two_weights_of_zero_are_zero_with_a_graph():
    s = torch.full((3, 4), torch.nan)
    options = {"alpha_kl": 0.0, "alpha_mse": 0.0}
    value, slope = value_and_gradients(lambda s: distillation_loss(s, s, **options), s)
    assert not value.any()
    assert not slope.any()


@pytest.mark.parametrize(
    ("width", "standardize"), [(0, "batch"), (1, "batch"), (0, "row"), (1, "row"), (2, "row")]
)
def test_too_few_candidates_are_refused(width, standardize):
    with pytest.raises(ValueError, match=rf"candidate.*{width}"):
        distillation_loss(torch.rand(3, width), torch.rand(3, width), standardize=standardize)


@pytest.mark.parametrize("value", [1e-18, 1e-8, 1e18])
def test_a_learned_temperature_has_a_finite_gradient(value):
    scores = draw(0, 2, 3, 4).float()
    _, slope = value_and_gradients(
        lambda t: distillation_loss(*scores, temperature=t, alpha_mse=0.0), torch.tensor(value)
    )
    assert slope.isfinite()
