"""Pooling for the CPU: it reads the attended logits once, copies none, and keeps active entries."""

from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.implementations import Arguments

SMALL = 1 << 16  # logits of a text below which the work per text outweighs the work per logit
LONG = 64  # positions


def nonzeros_pool(
    logits: Tensor, attended: Tensor, *, dtype: torch.dtype, return_logits: bool
) -> tuple[Tensor, Tensor]:
    """Return the largest logits, without ``return_logits`` -inf if inactive, and absent texts."""
    pooled: Tensor = _Pool.apply(logits, attended, dtype, return_logits)  # type: ignore[no-untyped-call]
    return pooled, attended.logical_not().all(1, keepdim=True)


def prefers_nonzeros(arguments: Arguments) -> bool:
    """Whether the definition is slower: texts are large, and long or with few active entries."""
    logits, attended = arguments["logits"], arguments["attended"]
    length, vocab_size = logits.shape[1:]
    if length * vocab_size < SMALL:
        return False
    if length >= LONG:  # reading the logits once outweighs the work per active entry
        return True
    if arguments["return_logits"]:  # which treats all entries as active
        return False
    texts, columns = max(len(logits) // 4, 1), vocab_size // 64
    sample = torch.where(attended[::texts, :, None], logits[::texts, :, ::columns], -torch.inf)
    return bool((sample.amax(1) > 0).float().mean() < 0.5)


class _Pool(torch.autograd.Function):
    """Pooling that finds the position of the maximum for active entries only."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, attended: Tensor, dtype: torch.dtype, keep_all: bool
    ) -> Tensor:
        batch, _, vocab_size = logits.shape
        nothing = torch.zeros(0, dtype=torch.int64, device=logits.device)
        found = [(nothing, nothing, nothing, logits.new_zeros(0))]
        for row in range(batch):
            position = attended[row].nonzero()[:, 0]
            if position.numel() == 0:
                continue
            first, last = int(position[0]), int(position[-1]) + 1
            block = logits[row, first:last]
            if last - first > position.numel():  # a mask with holes
                block = block.index_select(0, position - first)
            highest = block.amax(0)
            # NaN counts as active, so that it is visible.
            column = (~(highest <= 0) | keep_all).nonzero()[:, 0]
            # `max` returns the first of equal maxima, in half the time of `argmax`.
            place = block.index_select(1, column).max(0).indices
            found.append((torch.full_like(column, row), position[place], column, highest[column]))
        index, token, column, maximum = map(torch.cat, zip(*found, strict=True))
        ctx.save_for_backward(index.int(), token.int(), column.int())
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        pooled = logits.new_full((batch, vocab_size), -torch.inf, dtype=dtype)
        return pooled.index_put_((index, column), maximum.to(dtype))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        row, token, column = ctx.saved_tensors
        entries = upstream[row, column].to(ctx.dtype)
        grad_logits = entries.new_zeros(ctx.shape).index_put_((row, token, column), entries)
        return grad_logits, None, None, None
