"""Products of halves: in fp32, by the device where it can and by a cast where it cannot."""

import pytest
import torch

from sparse_losses._core import products
from sparse_losses._core.products import HALVES, product, returns_fp32

CPU = torch.device("cpu")


@pytest.fixture
def device(monkeypatch):
    """A device that can or cannot multiply halves into fp32, and the products it was asked for."""
    monkeypatch.setattr(products, "_returns_fp32", {})
    products_made = []

    class Device:
        error = None

    def multiply(name):
        def function(a, b, *, out_dtype=None):
            products_made.append((name, tuple(a.shape), a.dtype, out_dtype))
            if Device.error:
                raise Device.error
            return a.to(out_dtype) @ b.to(out_dtype)

        return function

    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, multiply(name))
    Device.products_made = products_made
    return Device


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("error", [None, RuntimeError(), TypeError(), NotImplementedError()])
def test_a_device_is_asked_once_a_dtype_what_it_can(device, dtype, error):
    device.error = error
    assert [returns_fp32(CPU, dtype) for _ in range(2)] == [error is None] * 2
    assert device.products_made == [("mm", (16, 16), dtype, torch.float32)]
    other = next(half for half in HALVES if half != dtype)
    returns_fp32(CPU, other)
    assert device.products_made[1:] == [("mm", (16, 16), other, torch.float32)]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 2, 3, 4)])
@pytest.mark.parametrize("error", [None, RuntimeError()])
def test_a_product_has_all_digits_of_the_halves(device, dtype, shape, error):
    device.error = error
    *batch, n, k, m = shape
    a, b = torch.randn(*batch, n, k).to(dtype), torch.randn(*batch, k, m).to(dtype)
    wide = dtype if dtype not in HALVES else torch.float32
    torch.testing.assert_close(product(a, b), a.to(wide) @ b.to(wide))
