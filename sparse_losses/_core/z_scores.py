"""Z-scores of candidates: a model's scores without their mean and spread."""

import torch
from torch import Tensor

from sparse_losses.distributed import maximum_over_ranks, sum_over_ranks


def fill(x: Tensor, mask: Tensor | None, value: float) -> Tensor:
    """Return ``x`` with ``value`` where a mask is set, if there is one."""
    return x if mask is None else x.masked_fill(mask, value)


def z_scores(
    scores: Tensor, absent: Tensor | None, count: Tensor, dims: tuple[int, ...], across_ranks: bool
) -> Tensor:
    """Return z-scores of the candidates, ``count`` > 1 along ``dims``; else, or if all equal, 0."""
    # z does not depend on shift and scale, so the gradient treats them as constants. A lowest score
    # of 0 makes equal scores exactly 0; a range of 1 keeps their squares from under- and overflow.
    lowest = fill(scores.detach(), absent, torch.inf).amin(dims, keepdim=True)
    lowest = -maximum_over_ranks(-lowest) if across_ranks else lowest
    x = torch.add(lowest * -0.5, scores, alpha=0.5)  # the range of halves does not overflow
    x = fill(x, absent, 0.0)
    largest = x.detach().amax(dims, keepdim=True)
    largest = maximum_over_ranks(largest) if across_ranks else largest
    x = x / largest.clamp(min=1e-30)

    sums = x.sum(dims, keepdim=True)
    centred = x - (sum_over_ranks(sums) if across_ranks else sums) / count
    centred = fill(centred, absent, 0.0)
    norm = torch.linalg.vector_norm(centred, dim=dims, keepdim=True)
    if across_ranks:  # a range of 1 makes the sum at least 1/2; without it there is no gradient
        norm = sum_over_ranks(norm.square()).clamp(min=0.25).sqrt()
    # Equal scores are divided by infinity, so that they have no gradient either.
    root = (count - 1).sqrt()
    return centred / (torch.addcdiv(norm, root, largest, value=0.5e-8) / root)
