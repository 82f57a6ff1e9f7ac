"""Large buffers on huge pages.

To touch 100 MB of fresh memory for the first time costs a CPU 50 ms in page faults of 4 KiB, more
than most of the arithmetic here; Linux gives pages of 2 MiB to whoever asks, and then it is 10 ms.
"""

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["fresh_like"]

FEWEST_BYTES = 1 << 22


def fresh_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor of the shape of ``x``."""
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    size = out.numel() * out.element_size()
    if out.device.type == "cpu" and size >= FEWEST_BYTES:
        first = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (out.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
        _advise(first, last - first)
    return out


def _advise(address: int, size: int) -> None:
    madvise = _madvise()
    if madvise is not None:  # advice: refused, nothing is lost
        madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[..., int] | None:
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        madvise: Callable[..., int] = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    return madvise
