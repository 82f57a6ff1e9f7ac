"""The head at its active entries: their gradients, and their CSR matrix.

An entry is a text and a column of the vocabulary. Its logit is the dot product of one hidden state,
at the position of the maximum, and one row of the weight. So the gradients are sums over entries:
of rows of the weight for each token of the batch, and of hidden states for each row of the weight.
They cost what the entries cost, and positions without an entry, padding too, are not multiplied.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_losses._core.activation import splade_activation
from sparse_losses.fast.sparse import csr, sum_bags

BLOCK = 4096  # rows of the weight whose gradients stay in a CPU's cache, and that are cast at once


class Inputs(NamedTuple):
    """What the head takes; ``dtype`` is that of its logits."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    attended: Tensor | None
    gate: Tensor | None
    dtype: torch.dtype


class Entries(NamedTuple):
    """Entries of ``[B, V]`` and the positions of their maxima."""

    column: Tensor  # [m]
    token: Tensor  # [m] index into the B * S positions
    value: Tensor  # [m] the logit with its bias, or the gradient of the logit


def operand_type(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the product's operands: ``dtype`` on the CPU, else that of the inputs."""
    if hidden.device.type == "cpu" or dtype == torch.float64:
        return dtype
    return torch.promote_types(hidden.dtype, weight.dtype)


def is_active(logit: Tensor, gate: Tensor | None) -> Tensor:
    """Return which logits are active after the gate; a NaN is, so that it is visible."""
    return ~((logit if gate is None else logit * gate) <= 0)


def places_of(mask: Tensor, size: int) -> Tensor:
    """Return where the flat mask is true: ``size`` indices, ``len(mask)`` fills up, or -1: all."""
    if size < 0:
        return mask.nonzero()[:, 0]
    numbers = torch.arange(1, size + 1, dtype=torch.int32, device=mask.device)
    return torch.searchsorted(mask.cumsum(0, dtype=torch.int32), numbers)


def entries_of(upstream: Tensor, place: Tensor, length: int, size: int) -> Entries:
    """Return the entries whose gradient is not 0, by column; -1 stands for any number.

    Entries that fill up to ``size`` have column ``V`` and token ``B * length``.
    """
    batch, vocab_size = upstream.shape
    flat = places_of((upstream.T != 0).flatten(), size)
    column, row = flat // batch, flat % batch
    inside = column.clamp(max=vocab_size - 1)
    token = torch.where(column < vocab_size, row * length + place[row, inside], batch * length)
    return Entries(column.int(), token.int(), upstream[row, inside])


def gradients_at(
    entries: Entries,
    hidden: Tensor,
    weight: Tensor,
    needs: Sequence[bool],
    sparse_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden states and weight, or empty ones, of entries by column."""
    column, token, factor = entries
    (batch, length, _), vocab_size, dtype = hidden.shape, len(weight), factor.dtype
    tokens, total = batch * length, None
    states, state = hidden.flatten(0, 1).to(dtype), token.clamp(max=tokens - 1)
    in_blocks = hidden.is_cpu and weight.dtype != dtype and not sparse_grad
    grad_weight = weight.new_empty(weight.shape if needs[1] and in_blocks else 0)
    if needs[1] and sparse_grad:
        present, row = column.unique_consecutive(return_inverse=True)  # type: ignore[no-untyped-call]
        values = _sums(row, state, states, factor, len(present)).to(weight.dtype)
        grad_weight = torch.sparse_coo_tensor(
            present[None], values, weight.shape, is_coalesced=True, check_invariants=False
        )
    elif needs[1] and not in_blocks:
        grad_weight = _sums(column, state, states, factor, vocab_size).to(weight.dtype)
    step, ends = vocab_size, [0, len(column)]
    if hidden.is_cpu:
        step = BLOCK
        firsts = torch.arange(0, vocab_size + step, step, dtype=column.dtype)
        ends = torch.searchsorted(column, firsts).tolist()
    for number, (start, stop) in enumerate(itertools.pairwise(ends)):
        block, part = slice(number * step, (number + 1) * step), slice(start, stop)
        rows, row = weight[block], column[part] - block.start
        if needs[1] and in_blocks:
            grad_weight[block] = _sums(row, state[part], states, factor[part], len(rows))
        if needs[0]:
            order = token[part].argsort(stable=True)
            index, bag = row.clamp(max=len(rows) - 1)[order], token[part][order]
            sums = _sums(bag, index, rows.to(dtype), factor[part][order], tokens)
            total = sums if total is None else total.add_(sums)
    grad_hidden = hidden.new_empty(0) if total is None else total.view(hidden.shape)
    return grad_hidden.to(hidden.dtype), grad_weight


def _sums(bag: Tensor, index: Tensor, table: Tensor, factor: Tensor, bags: int) -> Tensor:
    """Return ``[bags, H]``, the sums of ``factor * table[index]`` over the entries of a bag."""
    values = torch.arange(bags + 2, dtype=bag.dtype, device=bag.device)
    bounds = torch.searchsorted(bag, values).to(bag.dtype)  # of the sorted bags, without a wait
    return sum_bags(index, table, bounds, factor)[:-1]  # but of those that fill up


def csr_head(
    find: Callable[[Inputs], Entries],
    inputs: Inputs,
    sparse_grad: bool,
    *,
    threshold: float | Tensor | None,
    **options: Any,
) -> Tensor:
    """Return the activations ``[B, V]`` as a CSR tensor, from the entries that ``find`` returns."""
    hidden, weight, bias, _, gate, _ = inputs
    vocab_size, length = len(weight), max(hidden.shape[1], 1)

    def activations(column: Tensor, row: Tensor, logit: Tensor) -> Any:
        gates = None if gate is None else gate[row, column]
        level = threshold[column] if isinstance(threshold, Tensor) else threshold
        return splade_activation(
            logit, None, gates, threshold=level, return_logits=False, **options
        )

    def active() -> list[Tensor]:
        column, token, logit = find(inputs)
        column, row = column.long(), token.long() // length
        key = row * vocab_size + column
        if threshold is not None:
            is_kept = activations(column, row, logit) != 0
            key, token, logit = key[is_kept], token[is_kept], logit[is_kept]
        key, order = key.sort()
        return [key % vocab_size, key // vocab_size, token[order], logit[order]]

    column, row, logit = _AtEntries.apply(hidden, weight, bias, active, sparse_grad)  # type: ignore[no-untyped-call]
    values, shape = activations(column, row, logit), (len(hidden), vocab_size)
    return _AsCsr.apply(values, row, column, shape)  # type: ignore[no-any-return, no-untyped-call]


class _AtEntries(torch.autograd.Function):
    """The logits at the entries that ``find`` returns, with their columns and rows."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *tensors, find, ctx.sparse_grad = inputs
        column, row, token, logit = find()
        ctx.save_for_backward(*tensors, column, token)
        ctx.mark_non_differentiable(column, row)
        return column, row, logit

    @staticmethod
    def backward(ctx: Any, _: Any, __: Any, upstream: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "expected create_graph=False with layout=torch.sparse_csr; second derivatives need "
                "layout=torch.strided"
            )
        hidden, weight, bias, column, token = ctx.saved_tensors
        needs, grad_bias = ctx.needs_input_grad[:3], None
        if needs[2]:
            sums = upstream.new_zeros(len(weight)).index_add_(0, column, upstream)
            grad_bias = sums.to(bias.dtype)
        order = column.argsort(stable=True)
        factor = upstream.to(operand_type(hidden, weight, upstream.dtype))
        entries = Entries(column[order].int(), token[order].int(), factor[order])
        both = gradients_at(entries, hidden, weight, needs, ctx.sparse_grad)
        needed = [each if need else None for each, need in zip(both, needs, strict=False)]
        return *needed, grad_bias, None, None


class _AsCsr(torch.autograd.Function):
    """A CSR matrix of entries in its order; its gradient has the same entries."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, row: Tensor, column: Tensor, shape: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(row, column)
        return csr(row, column, values, shape)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        is_dense = upstream.layout == torch.strided
        values = upstream[ctx.saved_tensors] if is_dense else upstream.values()
        return values, None, None, None
