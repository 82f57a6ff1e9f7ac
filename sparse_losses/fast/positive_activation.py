"""Positive activation with its gradient, computed at the token ids of the positive only."""

from collections.abc import Set

import torch
from torch import Tensor

from sparse_losses._core.softmax import softplus

__all__ = ["direct_positive_activation"]


def direct_positive_activation(
    needs: Set[str],
    *,
    x: Tensor,
    ids: Tensor,
    attended: Tensor,
    weight: Tensor,
    divisor: Tensor | int | None,
    saturating: bool,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the row losses ``[B]``, or their sum over ``divisor``, and the gradient of ``x``."""
    tiny = torch.finfo(x.dtype).tiny
    # The occurrences of an id are counted in the buffer of the gradient, and only in columns that
    # are read. Counts start just above 0, so that unattended positions are 0 / count = 0.
    buffer = torch.empty_like(x)
    ones = attended.to(x.dtype)
    count = buffer.scatter_(1, ids, tiny).scatter_add_(1, ids, ones).gather(1, ids)
    share = weight / count
    # The factor -1 is the sign of the loss.
    total = share.sum(-1, keepdim=True).clamp_(min=tiny).mul_(-1 if divisor is None else -divisor)
    share /= total
    # The share is 0 where nothing is attended, and replaces the activation there.
    target = torch.where(attended, x.gather(1, ids), share)
    if saturating:
        cost, share = -share * softplus(-target), share * (-target).sigmoid()
    else:
        cost = share * target
    value = cost.sum(-1) if divisor is None else cost.sum()
    gradient = buffer.zero_().scatter_add_(1, ids, share) if "x" in needs else None
    return value, {"x": gradient}
