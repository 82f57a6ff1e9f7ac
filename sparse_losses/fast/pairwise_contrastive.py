"""Pairwise contrastive loss with its gradients, multiples of the one difference."""

from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor

__all__ = ["direct_pairwise_contrastive"]


def direct_pairwise_contrastive(
    needs: Sequence[bool], x1: Tensor, x2: Tensor, same: Tensor, *, margin: float
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss of every pair ``[B]``, and the gradients of both sides."""
    difference = x1 - x2
    distance = torch.linalg.vector_norm(difference, dim=-1)
    hinge = nnf.relu(margin - distance)
    values = torch.where(same, distance.square(), hinge.square())
    if not any(needs):
        return values, [None, None, None]
    slope = torch.where(distance == 0, 0.0, -hinge / distance)
    difference *= torch.where(same, 2.0, 2.0 * slope)[:, None]
    opposite = -difference if needs[1] else None
    return values, [difference if needs[0] else None, opposite, None]
