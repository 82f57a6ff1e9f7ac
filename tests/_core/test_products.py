"""Products of halves: in fp32, by the device where it can and by a cast where it cannot."""

from types import SimpleNamespace

import pytest
import torch

from sparse_losses._core.products import HALVES, returns_fp32

CPU = torch.device("cpu")


@pytest.fixture
def device(monkeypatch):
    """A device that can or cannot multiply halves into fp32, and the products it was asked for."""
    returns_fp32.cache_clear()
    device = SimpleNamespace(error=None, products_made=[])

    def multiply(a, b, *, out_dtype=None):
        device.products_made.append((tuple(a.shape), a.dtype, out_dtype))
        if device.error:
            raise device.error
        return a.to(out_dtype) @ b.to(out_dtype)

    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, multiply)
    yield device
    returns_fp32.cache_clear()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("error", [None, RuntimeError(), TypeError(), NotImplementedError()])
def test_a_device_is_asked_once_a_dtype_what_it_can(device, dtype, error):
    device.error = error
    assert [returns_fp32(CPU, dtype) for _ in range(2)] == [error is None] * 2
    (other,) = {*HALVES} - {dtype}
    returns_fp32(CPU, other)
    assert device.products_made == [((16, 16), each, torch.float32) for each in (dtype, other)]
