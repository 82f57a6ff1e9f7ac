"""Pairwise contrastive loss with its gradients, which are multiples of the difference."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["direct_pairwise_contrastive"]


def direct_pairwise_contrastive(
    needs: Sequence[bool], x1: Tensor, x2: Tensor, same: Tensor, *, margin: float
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss of every pair ``[B]`` and the gradients of both sides."""
    difference = x1 - x2
    # If a distance overflows, the value is infinite but the direction stays finite.
    distance = torch.linalg.vector_norm(difference, dim=-1).clamp_(max=torch.finfo(x1.dtype).max)
    slope = torch.where(same, distance, (distance - margin).clamp_(max=0.0))  # half the derivative
    values = slope.square()
    if not any(needs):
        return values, [None, None, None]
    direction = slope.div_(distance + (distance == 0)).mul_(2)  # 0 at 0
    difference *= direction[:, None]
    opposite = -difference if needs[1] else None
    return values, [difference if needs[0] else None, opposite, None]
