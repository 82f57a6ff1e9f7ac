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
    attended: Tensor,
    ignored: Tensor | None,
    ratio: float | Tensor,
) -> tuple[Tensor, list[Tensor | None]]:
    """The sums of every row ``[B]``, and the gradient of ``x``.

    Blocks are for the caches of a CPU; an accelerator takes all rows at once.
    """
    # What stands at an id is written over. Slots without a target write what an attended one
    # writes, and in a row without targets what stands in column 0 already: no id is looked for
    # twice, none is sorted.
    some, slot = attended.view(torch.uint8).max(-1, keepdim=True)
    ids = torch.where(attended, ids, ids.gather(1, slot))
    sign = (1 - 2.0 * some).to(x.dtype)
    signed = sign * x.gather(1, ids)
    cost, slope = softplus(signed), sign * signed.sigmoid()
    if isinstance(ratio, Tensor):
        weight = torch.where(some == 1, ratio[:, None], 1.0)
        cost, slope = weight * cost, weight * slope
    sums = x.new_empty(x.shape[0])
    gradient = torch.empty_like(x) if needs[0] else None
    step = max(HELD // x.shape[1] if x.device.type == "cpu" else x.shape[0], 1)
    buffer = torch.empty_like(x[:step])
    for first in range(0, x.shape[0], step):
        rows = slice(first, first + step)
        costs = softplus(x[rows], out=buffer[: x[rows].shape[0]]).scatter_(1, ids[rows], cost[rows])
        if gradient is not None:
            torch.sigmoid(x[rows], out=gradient[rows]).scatter_(1, ids[rows], slope[rows])
        if ignored is not None:
            costs.masked_fill_(ignored, 0.0)
            if gradient is not None:
                gradient[rows].masked_fill_(ignored, 0.0)
        torch.sum(costs, -1, out=sums[rows])
    return sums, [gradient, None, None, None, None]
