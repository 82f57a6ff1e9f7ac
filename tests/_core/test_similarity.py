"""Zero rows under cosine. Rows of any magnitude: tests/losses/test_numerics.py."""

import pytest
import torch

from sparse_losses._core.similarity import _normalize, normalize


@pytest.mark.parametrize("function", [normalize, _normalize], ids=["own", "plain"])
def test_a_zero_row_has_no_gradient_of_any_order(function):
    x = torch.zeros(2, 3, dtype=torch.float64)
    x[1, 1] = 2.0
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(function(x)[:, :2].sum(), x, create_graph=True)
    assert gradient.tolist() == [[0.0, 0.0, 0.0], [0.5, 0.0, 0.0]]
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert not second[0].any()
    assert second.isfinite().all()
