"""The packed head, for the CPU: it drops padding and processes only active entries after the max.

The vocabulary is processed in tiles. A tile's scores ``[T, n]`` with the ``n`` attended tokens are
reduced to one maximum per text before the next tile. Only active entries then need the arg-max.
Their number depends on the data, which costs a sync on an accelerator.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparse_losses.fast.head_entries import Entries, Inputs, is_active

SCORES = 6 << 20  # maximal number of scores in a tile


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


def packed_entries(inputs: Inputs, keep_all: bool = False) -> Entries:
    """Return the active entries of ``[B, V]``; with ``keep_all`` all entries of nonempty texts."""
    hidden, weight, bias, attended, gate, dtype = inputs
    packed = _pack(hidden.new_ones(hidden.shape[:2]).bool() if attended is None else attended)
    states = hidden.flatten(0, 1).index_select(0, packed.token).to(dtype)
    if not packed.groups:
        nothing = packed.token.int()
        return Entries(nothing, nothing, states.new_zeros(0))
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
    return Entries(torch.cat(columns), torch.cat(tokens), torch.cat(logits))


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
    is_kept = torch.ones_like(logit, dtype=torch.bool) if keep_all else is_active(logit, gate)
    columns, texts, tokens = [], [], []
    for view, (start, stop, first, size) in zip(views, packed.groups, strict=True):
        column, text = is_kept[:, start:stop].nonzero(as_tuple=True)
        # argmax returns the first of equal maxima.
        tokens.append(view[column, text].argmax(-1) + (first + text * size))
        columns.append(column)
        texts.append(text + start)
    column = torch.cat(columns)
    return column, torch.cat(tokens), logit[column, torch.cat(texts)]
