r"""The packed head, for the CPU: it drops padding and processes only active entries after the max.

The vocabulary is processed in tiles. A tile's scores ``[T, n]`` with the ``n`` attended tokens are
reduced to one maximum per text before the next tile. Only active entries then need the arg-max.
Their number depends on the data, which would cost a sync on an accelerator. The backward pass
visits only entries whose incoming gradient is not 0.
"""

import itertools
from typing import Any, NamedTuple, Sequence  # noqa: UP035  # PyTorch 2.6 accepts no other

import torch
from torch import Tensor

from sparse_losses._core.own_gradient import can_bring_its_gradient
from sparse_losses._core.precision import autocast_off
from sparse_losses.fast.head_tiles import smallest_integer, sources, spread
from sparse_losses.fast.sparse import bounds_of, sum_bags

SCORES = 6 << 20  # maximal number of scores in a tile
# Number of rows of a half-precision matrix that are cast at once in the backward pass.
BLOCK = 4096


def packed_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attended: Tensor | None,
    gate: Tensor | None,
    *,
    dtype: torch.dtype,
    return_logits: bool = False,
    sparse_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the largest logits ``[B, V]``, and where there are none ``[B, 1]``.

    Without ``return_logits`` the logits that the gate does not leave active are -inf.
    """
    if attended is None:
        attended = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    logits, _ = packed_logits(
        hidden, weight, bias, gate, attended, dtype, return_logits, sparse_grad
    )
    return logits, attended.logical_not().all(1, keepdim=True)


# ------------------------------------------------------------------------------------------------
# Custom operators: compilers cannot trace them, as the number of active entries is unknown


def _packed_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    attended: Tensor,
    dtype: torch.dtype,
    keep_all: bool,
    sparse_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return the logits before the gate ``[B, V]``, -inf if inactive, and their positions."""
    logits, place = _empty_logits(hidden, weight, dtype)
    with autocast_off(hidden.device):
        entries = _largest_entries(hidden, weight, bias, attended, gate, dtype, keep_all)
    length = max(hidden.shape[1], 1)
    index = entries.token // length, entries.column
    logits.fill_(-torch.inf)[index] = entries.logit
    place.zero_()[index] = (entries.token % length).to(place.dtype)
    return logits, place


def _empty_logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape, integer = (hidden.shape[0], weight.shape[0]), smallest_integer(hidden.shape[1])
    return hidden.new_empty(shape, dtype=dtype), hidden.new_empty(shape, dtype=integer)


packed_logits = torch.library.custom_op(
    "sparse_losses::head_packed", _packed_logits, mutates_args=()
)


@packed_logits.register_fake
def _(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, dtype, _, _ = others
    return _empty_logits(hidden, weight, dtype)


def _packed_gradients(
    upstream: Tensor,
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden states, weight and bias; empty where not needed."""
    gradients = _gradients(upstream, place, hidden, weight, bias, needs, sparse_grad=False)
    a, b, c = (upstream.new_empty(0) if each is None else each for each in gradients)
    return a, b, c


packed_gradients = torch.library.custom_op(
    "sparse_losses::head_packed_backward", _packed_gradients, mutates_args=()
)


@packed_gradients.register_fake
def _(
    upstream: Tensor,
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = zip((hidden, weight, bias), needs, strict=True)
    a, b, c = (
        upstream.new_empty(0) if x is None or not n else x.new_empty(x.shape) for x, n in tensors
    )
    return a, b, c


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, _, attended, dtype, _, sparse_grad = inputs
    ctx.save_for_backward(output[1], hidden, weight, bias, attended)
    ctx.dtype, ctx.sparse_grad = dtype, sparse_grad
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if upstream is None:
        return (None,) * 8
    place, hidden, weight, bias, _ = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    gradients: Sequence[Tensor | None]
    if torch.is_grad_enabled():  # create_graph=True
        both = _differentiable_gradients(ctx, upstream)
        gradients = *both, None if bias is None else upstream.sum(0)
    elif ctx.sparse_grad and can_bring_its_gradient(upstream):
        gradients = _gradients(upstream, place, hidden, weight, bias, needs, sparse_grad=True)
    else:
        gradients = packed_gradients(upstream, place, hidden, weight, bias, needs)
    needed = [each if need else None for each, need in zip(gradients, needs, strict=True)]
    return *needed, *[None] * 5


def _differentiable_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden states and weight, for second derivatives."""
    place, hidden, weight, _, attended = ctx.saved_tensors
    if attended.numel() == 0:  # no maximum, hence no gradient
        return torch.zeros_like(hidden), torch.zeros_like(weight)
    needs = list(ctx.needs_input_grad[:2])
    gradients: tuple[Tensor, Tensor] = spread(
        upstream, place, hidden, weight, *sources(attended), ctx.dtype, needs
    )
    return gradients


packed_logits.register_autograd(_backward, setup_context=_keep)


# ------------------------------------------------------------------------------------------------
# Forward pass: the maxima


class _Entries(NamedTuple):
    """Entries of ``[B, V]`` with the position and value of their maximum."""

    column: Tensor  # [m] int32
    token: Tensor  # [m] int32, index into the B * S positions
    logit: Tensor  # [m], before the gate


class _Packed(NamedTuple):
    """The attended tokens, text after text; texts of equal length are adjacent."""

    token: Tensor  # [n] index into the B * S positions
    row: Tensor  # [R] the texts with an attended token, in packed order
    groups: list[tuple[int, int, int, int]]  # first and last text, first token, tokens per text


def _pack(attended: Tensor) -> _Packed:
    """Pack the attended tokens so that one reduction covers all texts of one length.

    A text's last token is repeated up to a multiple of four or more. This gives fewer lengths and
    changes neither a maximum nor its position, as the copies come last.
    """
    batch, length = attended.shape
    lengths = attended.sum(1)
    quantum = 4 if batch <= 16 else max(4, length // 64 * 4)
    rounded = (lengths + quantum - 1) // quantum * quantum
    # Attended positions come first, in order.
    order = attended.logical_not().to(torch.uint8).argsort(stable=True)
    by_length = rounded.argsort(stable=True)
    tokens, rows, groups = [], [], []
    first_row = first_token = 0
    sizes, counts = rounded[by_length].unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    position = 0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        row = by_length[position : position + count]
        position += count
        if size == 0:
            continue
        step = torch.arange(size, device=attended.device)
        index = order[row].gather(1, torch.minimum(step, lengths[row, None] - 1))
        tokens.append((row[:, None] * length + index).reshape(-1))
        rows.append(row)
        groups.append((first_row, first_row + count, first_token, size))
        first_row, first_token = first_row + count, first_token + count * size
    if not groups:
        nothing = by_length[:0]
        return _Packed(nothing, nothing, [])
    # Matrix products are faster for widths that are multiples of 16.
    tokens.append(tokens[0][:1].expand(-first_token % 16))
    return _Packed(torch.cat(tokens), torch.cat(rows), groups)


def _largest_entries(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attended: Tensor,
    gate: Tensor | None,
    dtype: torch.dtype,
    keep_all: bool,
) -> _Entries:
    """Return the active entries of ``[B, V]``; with ``keep_all`` all entries of nonempty texts."""
    packed = _pack(attended)
    states = hidden.flatten(0, 1).index_select(0, packed.token).to(dtype)
    if not packed.groups:
        nothing = packed.token.int()
        return _Entries(nothing, nothing, states.new_zeros(0))
    height = _tile_height(len(states), len(weight))
    buffer = states.new_empty(height, len(states))
    columns, tokens, logits = [], [], []
    for start in range(0, len(weight), height):
        part = slice(start, start + height)
        rows = weight[part].to(dtype)
        scores = torch.mm(rows, states.T, out=buffer[: len(rows)])
        tile_bias = None if bias is None else bias[part, None]
        tile_gate = None if gate is None else gate[:, part].T[:, packed.row]
        column, token, logit = _entries_of_tile(scores, packed, tile_bias, tile_gate, keep_all)
        columns.append((column + start).int())
        tokens.append(packed.token[token].int())
        logits.append(logit)
    return _Entries(torch.cat(columns), torch.cat(tokens), torch.cat(logits))


def _tile_height(num_tokens: int, vocab_size: int) -> int:
    return min(max(SCORES // num_tokens // 16 * 16, 256), 8192, vocab_size)


def _entries_of_tile(
    scores: Tensor, packed: _Packed, bias: Tensor | None, gate: Tensor | None, keep_all: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return columns, packed tokens and logits of a tile's entries ``[T, n]``."""
    height = scores.shape[0]
    views = [
        scores[:, first : first + (stop - start) * size].view(height, stop - start, size)
        for start, stop, first, size in packed.groups
    ]
    logit = torch.cat([view.amax(-1) for view in views], dim=1)
    if bias is not None:
        logit = logit + bias
    if keep_all:
        is_kept = torch.ones_like(logit, dtype=torch.bool)
    else:  # NaN counts as active, so that it is visible
        is_kept = ~((logit if gate is None else logit * gate) <= 0)
    columns, texts, tokens = [], [], []
    for view, (start, stop, first, size) in zip(views, packed.groups, strict=True):
        column, text = is_kept[:, start:stop].nonzero(as_tuple=True)
        # argmax returns the first of equal maxima.
        tokens.append(view[column, text].argmax(-1) + (first + text * size))
        columns.append(column)
        texts.append(text + start)
    column = torch.cat(columns)
    return column, torch.cat(tokens), logit[column, torch.cat(texts)]


# ------------------------------------------------------------------------------------------------
# Backward pass: sums over the entries


def _gradients(
    upstream: Tensor,
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
    sparse_grad: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return gradients of hidden states, weight and bias from that of the logits ``[B, V]``."""
    wide_column, row = (upstream.T != 0).nonzero(as_tuple=True)  # by column; a NaN is not 0
    column, token = wide_column.int(), (row * hidden.shape[1] + place[row, wide_column]).int()
    coefficient = upstream[row, wide_column]
    batch, length, width = hidden.shape
    vocab_size, dtype = weight.shape[0], coefficient.dtype
    grad_hidden = grad_weight = grad_bias = None
    bounds = bounds_of(column, vocab_size)
    states = hidden.reshape(batch * length, width).to(dtype)
    # Blocks of the vocabulary, so that a half-precision matrix is never cast as a whole.
    step = vocab_size if weight.dtype == dtype else BLOCK
    firsts = range(0, vocab_size, step)
    ends = [*bounds[list(firsts)].tolist(), column.shape[0]]
    blocks = [(f, slice(*pair)) for f, pair in zip(firsts, itertools.pairwise(ends), strict=True)]
    if needs[0]:
        grad_states = torch.zeros_like(states)
        for f, part in blocks:
            order = token[part].argsort(stable=True)
            index, factor = column[part][order] - f, coefficient[part][order]
            rows = weight[f : f + step].to(dtype)
            grad_states += sum_bags(index, rows, bounds_of(token[part], batch * length), factor)
        grad_hidden = grad_states.view(batch, length, width).to(hidden.dtype)
    if needs[1] and sparse_grad:
        present = (bounds[1:] > bounds[:-1]).nonzero()[:, 0]
        starts = torch.cat([bounds[:-1][present], bounds[-1:]])
        values = sum_bags(token, states, starts, coefficient).to(weight.dtype)
        grad_weight = torch.sparse_coo_tensor(
            present[None], values, weight.shape, is_coalesced=True, check_invariants=False
        )
    elif needs[1] and weight.dtype == dtype:
        grad_weight = sum_bags(token, states, bounds, coefficient)
    elif needs[1]:
        grad_weight = torch.empty_like(weight)
        for f, part in blocks:
            bags = bounds[f : f + step + 1] - bounds[f]
            grad_weight[f : f + step] = sum_bags(token[part], states, bags, coefficient[part])
    if needs[2] and bias is not None:
        grad_bias = sum_bags(
            torch.zeros_like(token), coefficient.new_ones(1, 1), bounds, coefficient
        )[:, 0]
    return grad_hidden, grad_weight, grad_bias
