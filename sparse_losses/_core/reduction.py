"""From one value a row to the value of the loss."""

from typing import Literal

import torch
from torch import Tensor

from sparse_losses.distributed import num_ranks, sum_over_ranks

__all__ = ["Reduction", "reduce", "row_divisor"]

Reduction = Literal["none", "mean", "sum"]


def row_divisor(
    values: Tensor, reduction: str, valid: Tensor | None = None, gather: bool = False
) -> Tensor | int | None:
    """What the sum of the rows of ``values`` is divided by; ``None`` where ``reduce`` is needed.

    A way with a gradient of its own divides the gradient of a row by it where that is small; that
    of row values is scaled in a pass over the whole of it.
    """
    if reduction == "none" or (gather and num_ranks() > 1):
        return None
    if reduction == "sum":
        return 1
    if valid is None:
        return max(values.shape[0], 1)
    return valid.sum().clamp(min=1)


def reduce(
    values: Tensor,
    reduction: str,
    valid: Tensor | None = None,
    gather: bool = False,
    *,
    zeroed: bool = False,
) -> Tensor:
    """Reduces row values ``[B]``; rows that are not ``valid`` are 0 and leave the mean.

    The mean of no valid row is 0, still part of the graph; a NaN in a valid row stays NaN. With
    ``gather`` sum and mean are over the rows of all ranks. ``zeroed`` is a promise that rows that
    are not valid are 0 already, in value and gradient.
    """
    if valid is not None and not zeroed:
        values = torch.where(valid, values, 0.0)
    if reduction == "none":
        return values
    if reduction == "sum":
        return sum_over_ranks(values.sum()) if gather else values.sum()
    if gather and num_ranks() > 1:
        count = values.new_ones(values.shape) if valid is None else valid.to(values.dtype)
        sums = sum_over_ranks(torch.stack([values.sum(), count.sum()]))
        return sums[0] / sums[1].clamp(min=1)
    if valid is None:
        return values.mean() if values.shape[0] > 0 else values.sum()  # a mean of nothing is 0
    return values.sum() / valid.sum().clamp(min=1)
