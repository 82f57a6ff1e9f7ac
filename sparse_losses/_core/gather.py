"""A few numbers of every row, and a gradient that is zero but for them."""

from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.fused import can_fuse
from sparse_losses._core.pages import fresh_like

__all__ = ["gather"]


def gather(x: Tensor, index: Tensor) -> Tensor:
    """``x.gather(1, index)``, whose gradient is mostly the cost of its zeros."""
    if can_fuse(x):
        values: Tensor = _Gather.apply(x, index)  # type: ignore[no-untyped-call]
        return values
    return x.gather(1, index)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(x, index)
        return x.gather(1, index)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        x, index = ctx.saved_tensors
        return fresh_like(x).zero_().scatter_add_(1, index, upstream), None
