"""From one value a row to the value of the loss."""

from typing import Literal

import torch
from torch import Tensor

from sparse_losses._core.checks import check_choice

__all__ = ["Reduction", "check_reduction", "reduce"]

Reduction = Literal["none", "mean", "sum"]


def check_reduction(reduction: str) -> None:
    """Raises a ``ValueError`` for anything but none, mean and sum."""
    check_choice("reduction", reduction, ("none", "mean", "sum"))


def reduce(values: Tensor, reduction: str, valid: Tensor | None = None) -> Tensor:
    """Reduces row values ``[B]``; rows that are not ``valid`` are 0 and leave the mean.

    The mean of no valid row is 0, still part of the graph; a NaN in a valid row stays NaN.
    """
    if valid is not None:
        values = torch.where(valid, values, 0.0)
    if reduction == "none":
        return values
    if reduction == "sum":
        return values.sum()
    if valid is None:
        return values.sum() / max(values.shape[0], 1)
    return values.sum() / valid.sum().clamp(min=1)
