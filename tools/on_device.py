"""Code that was written for tensors on the CPU, run elsewhere: ``pytest --device cuda``."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

__all__ = ["on_device", "why_not_there"]

# What is said by a part of the package or of PyTorch that is not for this device.
NOT_THERE = re.compile(
    r"expected [\w ]+ on the CPU, got .*\bsim:0"  # a way that is the CPU's, asked for by its name
    r"|Sparse(Csr)?sim|has no layout Sparse"
    r"|NYI devices other than CPU"  # torch.library.opcheck
    r"|RuntimeError: expected `\w+` in \[0, V\)"  # an assertion on the device, not a ValueError
    r"|InductorError"  # writes no code for it; backend="aot_eager" runs there
)


def why_not_there(error: BaseException, device: str) -> str | None:
    """The reason to skip a test on the simulated device, if that is what the error says."""
    said = f"{type(error).__name__}: {error}"
    if device == "sim" and not isinstance(error, AssertionError) and NOT_THERE.search(said):
        return said.splitlines()[0][:150]
    return None


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Makes tensors there that nothing puts anywhere; what NumPy gives and takes is copied."""
    generator, from_numpy, numpy = torch.Generator, torch.from_numpy, torch.Tensor.numpy

    class Meta(type):
        def __instancecheck__(cls, x):
            return isinstance(x, generator)

    class Generator(metaclass=Meta):
        def __new__(cls, where=device):
            return generator(where)

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
