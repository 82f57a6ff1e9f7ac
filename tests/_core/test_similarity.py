"""Unit rows, their norms and gradients: zero, tiny and huge rows, and rows in parts."""

import pytest
import torch

from sparse_losses._core import similarity
from sparse_losses._core.similarity import half_rows, normalize, through_unit_rows_, unit_rows

DTYPES = [torch.float32, torch.float64]
LARGE = {torch.float32: 1e38, torch.float64: 1e300}


def rows(dtype, *scales):
    x = torch.tensor([[3.0, -4.0, 0.0], [1.0, 2.0, 2.0], [0.0, 0.0, 7.0]], dtype=dtype)
    return torch.cat([x * scale for scale in scales])


UNIT = torch.tensor([[0.6, -0.8, 0.0], [1 / 3, 2 / 3, 2 / 3], [0.0, 0.0, 1.0]], dtype=torch.float64)
NORM = torch.tensor([[5.0], [3.0], [7.0]], dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("others", [(), ("tiny",), ("huge",), ("zero",), ("tiny", "huge", "zero")])
def test_rows_become_units_whatever_rows_are_beside_them(dtype, others):
    size = {"tiny": 1 / LARGE[dtype], "huge": -LARGE[dtype] / 10, "zero": 0.0}
    scales = [1.0, *(size[other] for other in others)]
    unit, inverse = unit_rows(rows(dtype, *scales))
    assert (unit.shape, inverse.shape) == ((3 * len(scales), 3), (3 * len(scales), 1))
    assert unit.dtype == dtype
    for n, scale in enumerate(scales):
        part = slice(3 * n, 3 * n + 3)
        expected = UNIT * ((scale > 0) - (scale < 0))
        torch.testing.assert_close(unit[part].double(), expected, rtol=1e-6, atol=1e-7)
        if scale == 0 or 1e-30 < scale < 1e30:
            norms = (1 / (NORM * scale)) if scale else torch.zeros_like(NORM)
            torch.testing.assert_close(inverse[part].double(), norms, rtol=1e-6, atol=0.0)
        assert inverse[part].isfinite().all()
        assert inverse[part].all() == (scale != 0)


def test_a_row_whose_norm_has_no_finite_inverse_gets_the_largest_number():
    _, inverse = unit_rows(torch.tensor([[1e-310, 0.0], [1.0, 0.0]], dtype=torch.float64))
    assert inverse.tolist() == [[torch.finfo(torch.float64).max], [1.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_stays_in_its_row(dtype):
    x = rows(dtype, 1.0, 0.0)
    x[1, 0] = torch.nan
    unit, _ = unit_rows(x)
    assert unit.isnan().any(-1).tolist() == [False, True, False, False, False, False]
    assert unit[1].isnan().all()


def test_empty_rows_are_copied():
    for shape in ((0, 3), (2, 0)):
        x = torch.ones(shape)
        unit, inverse = unit_rows(x)
        assert unit is not x
        assert (unit.shape, inverse.shape, inverse.any()) == (shape, (shape[0], 1), False)
        assert normalize(x).shape == shape
        assert similarity._normalize(x) is x or shape[1]


@pytest.mark.parametrize("function", [normalize, similarity._normalize], ids=["own", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, -1e-30, 1e30, -1e30])
def test_the_gradient_of_a_unit_row_is_across_it(function, dtype, scale):
    x = rows(dtype, scale).requires_grad_()
    upstream = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0], [2.0, 2.0, 2.0]], dtype=dtype)
    unit = function(x)
    sign = 1 if scale > 0 else -1
    torch.testing.assert_close(unit.double(), sign * UNIT, rtol=1e-6, atol=1e-7)
    (gradient,) = torch.autograd.grad(unit, x, upstream, retain_graph=True)
    wide = sign * upstream.double()
    expected = (wide - UNIT * (UNIT * wide).sum(-1, keepdim=True)) / NORM
    scale = abs(scale)
    torch.testing.assert_close(sign * gradient.double() * scale, expected, rtol=1e-5, atol=1e-6)
    again = torch.autograd.grad(unit, x, upstream, create_graph=True)[0]
    torch.testing.assert_close(sign * again.double() * scale, expected, rtol=1e-5, atol=1e-6)
    several = torch.autograd.grad(
        unit, x, torch.stack([upstream, 2 * upstream]), is_grads_batched=True
    )[0]
    torch.testing.assert_close(
        sign * several[1].double() * scale, 2 * expected, rtol=1e-5, atol=1e-6
    )


def test_a_hook_is_called_once_a_way_back():
    x = torch.tensor([[3.0, 4.0]], requires_grad=True)
    (expected,) = torch.autograd.grad(normalize(x)[0, 0], x)
    x.register_hook(lambda gradient: 10 * gradient)
    (gradient,) = torch.autograd.grad(normalize(x)[0, 0], x, create_graph=True)
    torch.testing.assert_close(gradient, 10 * expected)


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


def test_matrices_bring_their_gradient_in_eager_mode_and_one_vector_is_a_row():
    x = torch.tensor([[3.0, 4.0]], requires_grad=True)
    torch.testing.assert_close(normalize(x[0]), torch.tensor([0.6, 0.8]))
    assert "_Normalize" in type(normalize(x).grad_fn).__name__
    assert "_Normalize" in type(normalize(x[None]).grad_fn).__name__
    assert "_Normalize" not in type(normalize(x[0]).grad_fn).__name__
    (expected,) = torch.autograd.grad(normalize(x)[0, 0], x)
    found = torch.func.grad(lambda x: normalize(x)[0, 0])(x.detach())
    torch.testing.assert_close(found, expected)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the processor cannot")
@pytest.mark.parametrize("size", [2e-38, 1.6e38, 3e38])
def test_no_reciprocal_is_so_small_that_a_device_makes_it_0(size):
    torch.set_flush_denormal(True)
    try:
        unit = similarity._normalize(torch.tensor([[0.0, size], [size, 0.0]]))
    finally:
        torch.set_flush_denormal(False)
    torch.testing.assert_close(unit, torch.eye(2).flip(0))


@pytest.mark.parametrize(("count", "width"), [(1, 3), (5, 3), (7, 100_000), (2, 300_000), (0, 4)])
def test_gradients_of_rows_are_converted_in_parts_of_any_size(count, width):
    x = torch.linspace(-1, 2, count * width).view(count, width)
    gradient = torch.linspace(3, 1, count * width).view(count, width)
    unit, inverse = unit_rows(x)
    expected = (gradient - unit * (unit * gradient).sum(-1, keepdim=True)) * inverse
    found = through_unit_rows_(gradient, unit, inverse)
    assert found is gradient
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_scaled_by_a_power_of_two_to_a_norm_below_1(dtype):
    x = torch.tensor([[3.0, -4.0], [0.0, 0.0], [2.0**-20, 0.0], [240.0, 100.0]]).to(dtype)
    y = torch.tensor([[[0.75, 0.5]], [[8.0, 0.0]]]).to(dtype)
    first, second = half_rows(x, y)
    assert torch.equal(half_rows(x)[0].values, first.values)
    for rows, found in ((x, first), (y, second)):
        assert found.values.dtype == dtype
        assert found.norm.dtype == torch.float32
        assert found.scale.dtype == torch.float64
        assert found.norm.shape == found.scale.shape == (*rows.shape[:-1], 1)
        assert torch.equal(found.values.double(), rows.double() * found.scale)
        exponents = found.scale[rows.any(-1)].log2()
        assert torch.equal(exponents, exponents.round())
        norms = torch.linalg.vector_norm(found.values.double(), dim=-1, keepdim=True)
        is_row = rows.any(-1)
        torch.testing.assert_close(found.norm[is_row].double(), norms[is_row])
        assert ((found.norm >= 0.5) & (found.norm < 1)).all()
    assert not first.values[1].any()
    assert first.scale[1] < 1e-290, "the gradient of a zero row is divided by a very large number"
