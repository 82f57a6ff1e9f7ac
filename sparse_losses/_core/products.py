"""Matrix products of half precision that come back in fp32, where the device has them."""

import torch
from torch import Tensor

__all__ = ["product", "returns_fp32"]

_FOUND: dict[tuple[torch.device, torch.dtype], bool] = {}


def returns_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``device`` multiplies ``dtype`` as it is and returns fp32.

    The device is asked once, by a small product: its name or version would not tell.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return dtype == torch.float32
    found = _FOUND.get((device, dtype))
    if found is None:
        if torch.compiler.is_compiling():
            return False
        ones = torch.ones(16, 16, device=device, dtype=dtype)
        try:
            torch.mm(ones, ones, out_dtype=torch.float32)
        except (TypeError, NotImplementedError, RuntimeError):  # TypeError: before PyTorch 2.8
            found = False
        else:
            found = True
        _FOUND[device, dtype] = found
    return found


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices; halves are summed in fp32 and returned so."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return a @ b
    if returns_fp32(a.device, a.dtype):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
