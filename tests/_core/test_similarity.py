"""Unit rows, their norms and gradients: zero, tiny and huge rows, and rows in parts."""

import pytest
import torch

from sparse_losses._core import similarity
from sparse_losses._core.similarity import normalize, unit_rows

DTYPES = [torch.float32, torch.float64]
LARGE = 1e38


def rows(dtype, *scales):
    x = torch.tensor([[3.0, -4.0, 0.0], [1.0, 2.0, 2.0], [0.0, 0.0, 7.0]], dtype=dtype)
    return torch.cat([x * scale for scale in scales])


UNIT = torch.tensor([[0.6, -0.8, 0.0], [1 / 3, 2 / 3, 2 / 3], [0.0, 0.0, 1.0]], dtype=torch.float64)
NORM = torch.tensor([[5.0], [3.0], [7.0]], dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beside", [0.0, 1 / LARGE, -LARGE / 10], ids=["zero", "tiny", "huge"])
def test_rows_become_units_whatever_rows_are_beside_them(dtype, beside):
    x = rows(torch.float64, 1.0, beside).to(dtype)
    unit, inverse = unit_rows(x)
    assert unit.dtype == dtype
    expected = torch.cat([UNIT, UNIT * x[3:].double().any().item() * (-1.0 if beside < 0 else 1.0)])
    torch.testing.assert_close(unit.double(), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(inverse[:3].double(), 1 / NORM, rtol=1e-6, atol=0.0)
    assert inverse.isfinite().all()
    assert inverse[3:].all() == (beside != 0)


@pytest.mark.parametrize("function", [normalize, similarity._normalize], ids=["own", "plain"])
def test_a_zero_row_has_no_gradient_of_any_order(function):
    x = torch.zeros(2, 3, dtype=torch.float64)
    x[1, 1] = 2.0
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(function(x)[:, :2].sum(), x, create_graph=True)
    assert gradient.tolist() == [[0.0, 0.0, 0.0], [0.5, 0.0, 0.0]]
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert not second[0].any()
    assert second.isfinite().all()
