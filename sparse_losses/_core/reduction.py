"""Reduction of row values to the value of the loss."""

from typing import Literal

import torch
from torch import Tensor

from sparse_losses.distributed import num_ranks, sum_over_ranks

Reduction = Literal["none", "mean", "sum"]


def reduce(
    values: Tensor,
    reduction: str,
    valid: Tensor | None = None,
    gather: bool = False,
    *,
    zeroed: bool = False,
) -> Tensor:
    """Reduce row values ``[B]``; invalid rows become 0 and do not count in the mean.

    The mean of no valid row is 0 and part of the graph; a NaN in a valid row stays NaN. ``zeroed``
    promises that invalid rows are already 0, in value and gradient.
    """
    if valid is not None and not zeroed:
        values = torch.where(valid, values, 0.0)
    if reduction == "none":
        return values
    if reduction == "sum":
        return sum_over_ranks(values.sum()) if gather else values.sum()
    if gather and num_ranks() > 1:
        count = values.new_ones(values.shape) if valid is None else valid
        sums = sum_over_ranks(torch.stack([values.sum(), count.sum()]))
        return sums[0] / sums[1].clamp(min=1)
    if valid is None:
        return values.mean() if values.shape[0] > 0 else values.sum()  # the empty mean is 0
    return values.sum() / valid.sum().clamp(min=1)


def reduce_means(total: Tensor, count: Tensor, reduction: str, gather: bool = False) -> Tensor:
    """Reduce row means ``total / count [B]``; where both are 0 a row is not valid."""
    if reduction == "mean" and not gather:  # one launch in the backward pass
        return total.dot((count * number_of_nonzeros(count)).clamp(min=1).reciprocal())
    return reduce(total / count.clamp(min=1), reduction, count > 0, gather, zeroed=True)


def number_of_nonzeros(count: Tensor) -> Tensor:
    """Return how many floating numbers are not 0, in one launch and their dtype."""
    number: Tensor = torch.linalg.vector_norm(count, 0)
    return number
