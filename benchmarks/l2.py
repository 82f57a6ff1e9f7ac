"""A kernel that reads a small buffer again and again: how much the L2 cache delivers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["read_repeatedly"]

BLOCK = 4096  # numbers a step: 16 KiB, 16 loads of 16 bytes by each of 256 threads


@triton.jit
def _read(x_pointer, sum_pointer, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(blocks):
        # Programs begin apart; .cg passes the L1 cache by.
        block = (program * 61 + step) % blocks
        total += tl.load(x_pointer + block * BLOCK + index, cache_modifier=".cg")
    tl.store(sum_pointer + program, tl.sum(total))


def read_repeatedly(buffer: Tensor, programs: int) -> Tensor:
    """The sum of an fp32 buffer, ``[programs]``: every program reads all of it."""
    if buffer.numel() % BLOCK:
        raise ValueError(f"expected a multiple of {BLOCK} numbers, got {buffer.numel()}")
    sums = torch.empty(programs, device=buffer.device)
    _read[(programs,)](buffer, sums, buffer.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)
    return sums
