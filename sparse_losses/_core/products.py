"""Products of half-precision matrices, summed and returned in fp32.

The product of two half-precision numbers is exact in fp32, so this is as precise as casting the
matrices first, and tensor cores are many times as fast.
"""

import functools

import torch
from torch import Tensor

from sparse_losses._core.private_torch import is_batched

HALVES = (torch.float16, torch.bfloat16)


@functools.cache
def returns_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device can multiply matrices of this half dtype and return fp32."""
    if dtype not in HALVES:
        return False
    one = torch.ones(16, 16, device=device, dtype=dtype)
    try:  # PyTorch >= 2.8 can on CUDA; only a trial tells
        torch.mm(one, one, out_dtype=torch.float32)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def as_single(x: Tensor) -> Tensor:
    """Cast half precision to fp32; return other dtypes unchanged."""
    return x.float() if x.dtype in HALVES else x


def as_dense(x: Tensor) -> Tensor:
    """Return a CSR tensor as a dense one, half precision as fp32."""
    return as_single(x if x.layout == torch.strided else x.to_dense())


def scaled(x: Tensor, factor: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x * factor`` in a dtype, in one launch; no autograd."""
    if any(is_batched(t) for t in (x, factor) if isinstance(t, Tensor)):  # `out` is impossible
        return (x * factor).to(dtype)
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


def scaled_(x: Tensor, factor: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Do what ``scaled`` does, in place if ``x`` has that dtype."""
    in_place = x.dtype == dtype and not (isinstance(factor, Tensor) and is_batched(factor))
    return x.mul_(factor) if in_place else scaled(x, factor, dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of matrices or batches of matrices; fp32 for halves; no autograd."""
    if a.dtype not in HALVES:
        return a @ b
    if not returns_fp32(a.device, a.dtype):
        return as_single(a) @ as_single(b)
    multiply = torch.mm if a.ndim == 2 else torch.bmm
    return multiply(a, b, out_dtype=torch.float32)


def add_product_(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return ``total + a @ b``, in place; for halves the total is fp32."""
    if total is None:
        return product(a, b)
    if b.dtype == total.dtype:
        return total.addmm_(a, b)
    if returns_fp32(b.device, b.dtype) and _adds_fp32(b.device, b.dtype):
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.add_(product(a, b))


@functools.cache
def _adds_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of halves can be added to an fp32 matrix in place, and is."""
    one = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, one, one, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return device.type == "meta" or bool((total == 17).all())
