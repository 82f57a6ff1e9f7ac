"""Self-reconstruction with its gradient, some rows at a time: the rest is never held whole."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_losses._core.softmax import softplus

__all__ = ["blockwise_self_reconstruction"]

HELD = 1 << 20  # numbers at once: fewer, and starting threads takes longer than their work


def blockwise_self_reconstruction(
    needs: Sequence[bool],
    x: Tensor,
    ids: Tensor,
    is_target: Tensor,
    ignored: Tensor | None,
    ratio: Tensor,
) -> tuple[Tensor, list[Tensor | None]]:
    """The sums of every row ``[B]``, and the gradient of ``x``."""
    # Ids sort first where they are targets: slots that are not say again what the first one says,
    # and in a row without targets what stands in column 0.
    ids = torch.where(is_target, ids, ids[:, :1])
    some = is_target[:, :1]
    target = x.gather(1, ids)
    of_target = torch.where(some, -ratio[:, None] * (-target).sigmoid(), target.sigmoid())
    other = torch.where(some, 0.0, softplus(target))
    target_sum = torch.where(is_target, softplus(-target), 0.0).sum(-1)
    sums = ratio * target_sum
    gradient = torch.empty_like(x) if needs[0] else None
    step = max(HELD // x.shape[1], 1)
    buffer = torch.empty_like(x[:step])
    for first in range(0, x.shape[0], step):
        rows = slice(first, first + step)
        others = softplus(x[rows], out=buffer[: x[rows].shape[0]]).scatter_(
            1, ids[rows], other[rows]
        )
        if gradient is not None:
            torch.sigmoid(x[rows], out=gradient[rows]).scatter_(1, ids[rows], of_target[rows])
        if ignored is not None:
            others.masked_fill_(ignored, 0.0)
            if gradient is not None:
                gradient[rows].masked_fill_(ignored, 0.0)
        sums[rows] += others.sum(-1)
    return sums, [gradient, None, None, None, None]
