"""What head and pooling share: activations from the maxima, and the way back to them."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

__all__ = ["activate", "gradient_of_pooled"]


def activate(
    pooled: Tensor, row: Tensor, column: Tensor, shape: tuple[int, int], return_logits: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Activations and, if asked for, pooled logits ``[B, V]`` from those of the entries ``[m]``.

    Also the slope of ``log(1 + relu)`` at each entry: 0 where it is not active, and a NaN kept.
    """
    active = nnf.relu(pooled)
    slope = torch.where(pooled <= 0, 0.0, 1 / (1 + active))
    activations = _place(active.log1p(), row, column, shape)
    return activations, _place(pooled, row, column, shape) if return_logits else None, slope


def _place(values: Tensor, row: Tensor, column: Tensor, shape: tuple[int, int]) -> Tensor:
    return values.new_zeros(shape).index_put_((row, column), values)


def gradient_of_pooled(
    upstream: tuple[Tensor | None, ...], row: Tensor, column: Tensor, slope: Tensor
) -> Tensor:
    """The gradient by the entries' pooled logits from those by activations and logits."""
    of_activations, of_logits = upstream
    total = torch.zeros_like(slope)
    if of_activations is not None:
        total = of_activations[row, column] * slope
    if of_logits is not None:
        total = total + of_logits[row, column]
    return total
