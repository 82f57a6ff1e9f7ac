"""Positive activation with its gradient, by what stands at the positions of the positive."""

from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.softmax import softplus

__all__ = ["direct_positive_activation"]


def direct_positive_activation(
    needs: Sequence[bool],
    x: Tensor,
    ids: Tensor,
    attended: Tensor,
    weight: Tensor,
    *,
    saturating: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss of every row ``[B]``, and the gradient of ``x``."""
    tiny = torch.finfo(x.dtype).tiny
    # How often an id stands in its row is counted in what becomes the gradient, and only in the
    # columns that are read. Counts are negative, and so are weights: the loss has a minus. They
    # start next to 0, so that what is not attended is 0 / count = 0.
    buffer = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    ones = (-1.0 * attended).to(x.dtype)
    count = buffer.scatter_(1, ids, -tiny).scatter_add_(1, ids, ones).gather(1, ids)
    share = nnf.normalize(weight / count, p=1.0, dim=-1, eps=tiny)
    # Where nothing is attended the share is 0, which hides the activation there.
    target = torch.where(attended, x.gather(1, ids), share)
    if saturating:
        value, share = -(share * softplus(-target)).sum(-1), share * (-target).sigmoid()
    else:
        value = (share * target).sum(-1)
    gradient = buffer.zero_().scatter_add_(1, ids, share) if needs[0] else None
    return value, [gradient, None, None, None]
