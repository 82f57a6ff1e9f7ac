"""Pooling for the CPU: it reads the attended logits once and returns to active entries only.

The definition copies the logits to mask them, and stores a position for every entry.
"""

from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.private_torch import is_batched

__all__ = ["activate", "gradient_of_pooled", "nonzeros_pool", "prefers_nonzeros"]

SMALL = 1 << 16  # logits of a text below which the work per text outweighs the work per logit
LONG = 64  # positions


def nonzeros_pool(
    logits: Tensor, attended: Tensor, *, dtype: torch.dtype, return_logits: bool
) -> tuple[Tensor, Tensor | None]:
    """Return activations and, if requested, the signed maxima."""
    outputs: tuple[Tensor, Tensor | None] = _Pool.apply(  # type: ignore[no-untyped-call]
        logits, attended, dtype, return_logits
    )
    return outputs


def prefers_nonzeros(logits: Tensor, attended: Tensor, return_logits: bool) -> bool:
    """Whether the definition is slower: texts are large, and long or with few active entries."""
    length, vocab_size = logits.shape[1:]
    if length * vocab_size < SMALL:
        return False
    if length >= LONG:  # reading the logits once outweighs the work per active entry
        return True
    if return_logits:  # which treats all entries as active
        return False
    texts, columns = max(len(logits) // 4, 1), vocab_size // 64
    sample = torch.where(attended[::texts, :, None], logits[::texts, :, ::columns], -torch.inf)
    return bool((sample.amax(1) > 0).float().mean() < 0.5)


class _Pool(torch.autograd.Function):
    """Pooling that finds the position of the maximum for active entries only."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, attended: Tensor, dtype: torch.dtype, return_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch, _, vocab_size = logits.shape
        rows, tokens, columns, maxima = [], [], [], []
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
            column = (~(highest <= 0) | return_logits).nonzero()[:, 0]
            # `max` returns the first of equal maxima, in half the time of `argmax`.
            if column.numel() * 2 > vocab_size:
                place = block.max(0).indices[column]
            else:
                place = block.index_select(1, column).max(0).indices
            tokens.append(position[place])
            rows.append(torch.full_like(column, row))
            columns.append(column)
            maxima.append(highest[column])
        nothing = torch.zeros(0, dtype=torch.int64, device=logits.device)
        row_index = torch.cat([nothing, *rows])
        column_index = torch.cat([nothing, *columns])
        token_index = torch.cat([nothing, *tokens])
        pooled = torch.cat([logits.new_zeros(0), *maxima]).to(dtype)
        activations, signed, slope = activate(
            pooled, row_index, column_index, (batch, vocab_size), return_logits
        )
        index = row_index.int(), token_index.int(), column_index.int()
        ctx.save_for_backward(logits, slope, *index)
        ctx.dtype = dtype
        ctx.set_materialize_grads(False)
        return activations, signed

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        logits, slope, row, token, column = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True needs plain operations
            pooled = logits[row, token, column].to(ctx.dtype)
            slope = torch.where(pooled <= 0, 0.0, 1 / (1 + nnf.relu(pooled)))
        grad_pooled = gradient_of_pooled(upstream, row, column, slope)
        where, grad_pooled = (row, token, column), grad_pooled.to(logits.dtype)
        if is_batched(grad_pooled):
            return torch.zeros_like(logits).index_put(where, grad_pooled), None, None, None
        return torch.zeros_like(logits).index_put_(where, grad_pooled), None, None, None


def activate(
    pooled: Tensor, row: Tensor, column: Tensor, shape: tuple[int, int], return_logits: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return activations and, if requested, pooled logits ``[B, V]`` from entries ``[m]``.

    The third result is the slope of ``log(1 + relu)`` per entry: 0 if inactive; a NaN is kept.
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
    """Return the gradient of the entries' logits from those of activations and pooled logits."""
    grad_activations, grad_logits = upstream
    total = torch.zeros_like(slope)
    if grad_activations is not None:
        total = grad_activations[row, column] * slope
    if grad_logits is not None:
        total = total + grad_logits[row, column]
    return total
