"""Products of half-precision matrices, summed and returned in fp32.

A product of two numbers of half precision is exact in fp32, so nothing is lost against casting the
matrices first; tensor cores take them many times as fast.
"""

import torch
from torch import Tensor

__all__ = ["HALVES", "as_single", "product", "returns_fp32"]

HALVES = (torch.float16, torch.bfloat16)

_returns_fp32: dict[tuple[torch.device, torch.dtype], bool] = {}


def returns_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies matrices of this half dtype and returns fp32.

    PyTorch 2.8 and later do on CUDA. Tried once per device: no name of a device says so.
    """
    if dtype not in HALVES:
        return False
    known = (device, dtype)
    if known not in _returns_fp32:
        one = torch.ones(16, 16, device=device, dtype=dtype)
        try:
            torch.mm(one, one, out_dtype=torch.float32)
        except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
            _returns_fp32[known] = False
        else:
            _returns_fp32[known] = True
    return _returns_fp32[known]


def as_single(x: Tensor) -> Tensor:
    """Halves in fp32, other dtypes as they are."""
    return x.float() if x.dtype in HALVES else x


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices, or of two stacks of them; halves in fp32; without a graph."""
    if a.dtype not in HALVES:
        return a @ b
    if not returns_fp32(a.device, a.dtype):
        return as_single(a) @ as_single(b)
    multiply = torch.mm if a.ndim == 2 else torch.bmm
    return multiply(a, b, out_dtype=torch.float32)
