"""Run tests that create tensors on the CPU on another device: ``pytest --device cuda``."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Create tensors on the device by default, and copy NumPy arrays to it and from it."""
    generator, from_numpy, numpy = torch.Generator, torch.from_numpy, torch.Tensor.numpy

    class Meta(type):
        def __instancecheck__(cls, x):
            return isinstance(x, generator)

    class Generator(metaclass=Meta):
        def __new__(cls, where=None):
            is_pytorch = sys._getframe(1).f_globals["__name__"].startswith("torch.")
            return generator(where or ("cpu" if is_pytorch else device))  # `gradcheck` has its own

    def to_numpy(x, *, force=False):
        return numpy(x.cpu(), force=force)

    def as_array(x, dtype=None, copy=None):
        return numpy(x.cpu()).astype(dtype, copy=bool(copy)) if dtype else numpy(x.cpu())

    with (
        mock.patch.object(torch, "Generator", Generator),
        mock.patch.object(torch, "from_numpy", lambda array: from_numpy(array).to(device)),
        mock.patch.object(torch.Tensor, "numpy", to_numpy),
        mock.patch.object(torch.Tensor, "__array__", as_array),
        torch.device(device),
    ):
        yield
