"""What the tests of several files look at losses with: graphs compiled, tensors allocated."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def counting(backend: str = "eager") -> tuple:
    """Return a list of graphs, and the backend that fills it."""
    graphs, compiler = [], lookup_backend(backend)

    def count(graph, example):
        graphs.append(graph)
        return compiler(graph, example)

    return graphs, count


class Recorder(TorchDispatchMode):
    """Remembers the largest tensor's size, and operations whose ``large`` result is all 0 and 1."""

    def __init__(self, large: float = float("inf")) -> None:
        super().__init__()
        self.largest, self.large, self.targets = 0, large, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "empty" in str(func) and out.is_floating_point():
            out.fill_(torch.nan)  # what was there before may look like anything
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(tensor, torch.Tensor):
                continue
            self.largest = max(self.largest, tensor.numel())
            if tensor.numel() >= self.large and ((tensor == 0) | (tensor == 1)).all():
                self.targets.add(str(func))
        return out


def weigh(out: torch.Tensor) -> torch.Tensor:
    """Weigh all entries differently, so that a permuted or misplaced gradient shows."""
    return (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()


def gradients(value: torch.Tensor, leaves: dict, **options) -> dict:
    found = torch.autograd.grad(value, list(leaves.values()), **options)
    return dict(zip(leaves, found, strict=True))


def value_and_gradients(function, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return a function's value and its gradients by all of its arguments."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def in_double(function, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same of the same numbers in float64."""
    return value_and_gradients(function, *(x.double() for x in tensors))


def assert_keeps_digits(
    function, *tensors, of_value, of_gradients, exact=None, absolute=0.0
) -> torch.Tensor:
    """Compare value and, by norms, gradients with those in float64 of ``exact``; return its value.

    By ``exact``, another way to compute the function, where that loses digits in float64, too.
    """
    value, *gradients = value_and_gradients(function, *tensors)
    expected, *truths = in_double(exact or function, *tensors)
    assert expected.isfinite()
    assert value.item() == pytest.approx(expected.item(), rel=of_value, abs=absolute)
    for gradient, truth in zip(gradients, truths, strict=True):
        error = (gradient.double() - truth).norm()
        assert error <= of_gradients * truth.norm() + absolute
        assert absolute or truth.any()
    return expected
