"""Self-reconstruction with its gradient, some rows at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.softmax import softplus

__all__ = ["blockwise_self_reconstruction"]

HELD = 1 << 20  # numbers per block; with fewer, threads take longer to start than to run


def blockwise_self_reconstruction(
    needs: Sequence[bool],
    x: Tensor,
    ids: Tensor,
    attended: Tensor,
    ignored: Tensor | None,
    ratio: float | Tensor,
    *,
    by_rows: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the sums per row ``[B]``, or of all rows, and the gradient of ``x``.

    Blocks fit the caches of a CPU; an accelerator processes all rows at once.
    """
    # Costs of targets overwrite those of non-targets. Unattended positions repeat the write of an
    # attended one; in a row without targets they rewrite column 0 with its own cost. So duplicate
    # ids need neither a search nor a sort.
    some, slot = attended.view(torch.uint8).max(-1, keepdim=True)
    ids = torch.where(attended, ids, ids.gather(1, slot))
    sign = torch.rsub(some, 1.0, alpha=2).to(x.dtype)
    signed = sign * x.gather(1, ids)
    cost, slope = softplus(signed), sign * signed.sigmoid()
    if isinstance(ratio, Tensor):
        weight = torch.where(some == 1, ratio[:, None], 1.0)
        cost, slope = weight * cost, weight * slope
    gradient = torch.empty_like(x) if needs[0] else None
    batch = x.shape[0]
    step = max(HELD // x.shape[1] if x.is_cpu else batch, 1)
    everything = x, ids, cost, slope, gradient
    buffer = torch.empty_like(x[:step])
    sums = []
    for first in range(0, max(batch, 1), step):
        block: Sequence[Any] = everything
        if step < batch:
            rows = slice(first, first + step)
            block = [None if part is None else part[rows] for part in everything]
        some_x, places, some_cost, some_slope, some_gradient = block
        values = buffer[: some_x.shape[0]]
        softplus(some_x, out=values).scatter_(1, places, some_cost)
        if some_gradient is not None:
            torch.sigmoid(some_x, out=some_gradient).scatter_(1, places, some_slope)
        if ignored is not None:
            values.masked_fill_(ignored, 0.0)
            if some_gradient is not None:
                some_gradient.masked_fill_(ignored, 0.0)
        sums.append(values.sum(-1) if by_rows else values.sum())
    value = sums[0]
    if len(sums) > 1:
        value = torch.cat(sums) if by_rows else torch.stack(sums).sum()
    return value, [gradient, None, None, None, None]
