"""Pairwise contrastive: its formula, its theorems, its edges."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import pairwise_contrastive_loss
from tests.cases import assert_follows_the_formula
from tests.instruments import in_double, value_and_gradients
from tests.strategies import draw, seeds, sizes, vectors

margins = st.floats(0.0, 5.0)


@given(st.data(), sizes, margins)
def test_value_is_the_formula_for_any_pairs(data, batch, margin):
    arrays = {name: data.draw(vectors(batch, 3)) for name in ("x1", "x2")}
    arrays["same"] = np.array(data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch)))
    assert_follows_the_formula("pairwise_contrastive", arrays, margin=margin)


@given(st.data(), sizes, margins)
def test_it_is_never_negative_and_zero_where_satisfied(data, batch, margin):
    """0 for the same at one point and for the different from the margin on, and nowhere else."""
    x1, x2 = (torch.from_numpy(data.draw(vectors(batch, 3))) for _ in range(2))
    x2 = torch.where(torch.rand(batch, 1) < 0.3, x1, x2)
    same = torch.arange(batch) % 2 == 0
    rows = pairwise_contrastive_loss(x1, x2, same, margin=margin, reduction="none")
    distance = (x1 - x2).norm(dim=1)
    assert (rows >= 0).all()
    assert not rows[same & (distance == 0)].any()
    assert not rows[~same & (distance >= margin * (1 + 1e-9))].any()
    assert (rows[same & (distance > 1e-6)] > 0).all()
    assert (rows[~same & (distance < margin - 1e-6)] > 0).all()


SAME = torch.tensor([True])
ALTERNATE = torch.tensor([True, False, True, False])


@given(seeds, margins, st.floats(0.01, 2.0))
def test_it_is_symmetric_sees_no_shift_and_no_larger_margin_lowers_it(seed, margin, more):
    x1, x2, shift = draw(seed, 4, 3), draw(seed + 1, 4, 3), draw(seed + 2, 3)
    options = {"margin": margin, "reduction": "none"}
    low = pairwise_contrastive_loss(x1, x2, ALTERNATE, **options)
    swapped = pairwise_contrastive_loss(x2 + shift, x1 + shift, ALTERNATE, **options)
    torch.testing.assert_close(swapped, low)
    high = pairwise_contrastive_loss(x1, x2, ALTERNATE, margin=margin + more, reduction="none")
    assert torch.equal(high[ALTERNATE], low[ALTERNATE])
    inside = (x1 - x2).norm(dim=1)[~ALTERNATE] < margin + more
    assert torch.equal(high[~ALTERNATE] > low[~ALTERNATE], inside)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_at_distance_zero_the_gradient_is_exactly_zero(same, dtype):
    x = torch.tensor([[[1.0, 2], [0, 0], [0.5, 0]], [[1, 2], [0, 0], [0, 0]]], dtype=dtype)
    leaves = [each.clone().requires_grad_() for each in x]
    label, options = torch.tensor([same] * 3), {"margin": 2.0, "reduction": "none"}
    rows = pairwise_contrastive_loss(*leaves, label, **options)
    assert rows.tolist() == pytest.approx([0.0, 0.0, 0.25] if same else [4.0, 4.0, 2.25])
    by_definition = torch.func.grad(
        lambda *sides: pairwise_contrastive_loss(*sides, label, **options).sum(), (0, 1)
    )(*x)
    frozen = torch.inference_mode()(torch.clone)(x[1])
    pairwise_contrastive_loss(leaves[0], frozen, label).backward()
    for gradient in (*torch.autograd.grad(rows.sum(), leaves), *by_definition):
        assert not gradient[:2].any()
        assert gradient[2].isfinite().all()
        assert gradient[2].any()


@pytest.mark.parametrize("shift", [0.0, 1e-3])
def test_close_pairs_keep_their_digits_far_from_the_origin(shift):
    x1 = torch.full((1, 4), 1000.0)
    x2 = x1.clone()
    x2[0, 0] += 0.0625 + shift
    expected = (x2 - x1).double().square().sum().item()
    assert pairwise_contrastive_loss(x1, x2, SAME).item() == pytest.approx(expected, rel=1e-6)


def test_a_distance_that_overflows_is_an_infinite_value_and_no_nan():
    loss, gradient = value_and_gradients(
        lambda x: pairwise_contrastive_loss(x, torch.zeros(1, 2), SAME), torch.tensor([[3e38, 0.0]])
    )
    assert loss == torch.inf
    assert gradient.tolist() == [[torch.inf, 0.0]]


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("distance", [2e-22, 5.9e-39, 1e-42, 1e20, 1e37])
def test_distances_whose_squares_leave_fp32_have_the_gradient_of_fp64(width, distance):
    x = (distance * torch.nn.functional.normalize(draw(0, 1, width))).float()
    margin = 1.0 if distance < 1 else 4 * distance
    for same in (SAME, ~SAME):

        def call(x, same=same):
            return pairwise_contrastive_loss(x, torch.zeros_like(x), same, margin=margin)

        (loss, gradient), (exact, expected) = value_and_gradients(call, x), in_double(call, x)
        torch.testing.assert_close(loss, exact.float(), rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient, expected.float(), rtol=1e-6, atol=1e-44)
        assert gradient.any()
