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
    """Pack the attended tokens so that one reduction covers all texts of one length."""
    # A text's last token is repeated up to a multiple of four or more, which gives fewer lengths.
    batch, length = attended.shape
    lengths = attended.sum(1)
    quantum = 4 if batch <= 16 else max(4, length // 64 * 4)
    rounded = (lengths + quantum - 1) // quantum * quantum
    # Attended positions come first, in order.
    order = attended.logical_not().to(torch.uint8).argsort(stable=True)
    by_length = rounded.argsort(stable=True)[int((rounded == 0).sum()) :]
    sizes, counts = rounded[by_length].unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    tokens, groups = [by_length[:0]], []
    first_row = first_token = 0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        row = by_length[first_row : first_row + count]
        step = torch.arange(size, device=attended.device)
        index = order[row].gather(1, torch.minimum(step, lengths[row, None] - 1))
        tokens.append((row[:, None] * length + index).reshape(-1))
        groups.append((first_row, first_row + count, first_token, size))
        first_row, first_token = first_row + count, first_token + count * size
    # Matrix products are faster for widths that are multiples of 16.
    tokens.append(tokens[-1][-1:].expand(-first_token % 16))
    return _Packed(torch.cat(tokens), by_length, groups)


def packed_entries(inputs: Inputs, keep_all: bool = False) -> Entries:
    """Return the active entries of ``[B, V]``; with ``keep_all`` all entries of nonempty texts."""
    hidden, weight, bias, attended, gate, dtype = inputs
    packed = _pack(hidden.new_ones(hidden.shape[:2]).bool() if attended is None else attended)
    states = hidden.flatten(0, 1).index_select(0, packed.token).to(dtype)
    nothing = packed.token[:0].int()
    found = [Entries(nothing, nothing, states.new_empty(0))]
    height = _tile_height(len(states), len(weight))
    buffer = states.new_empty(height, len(states))
    for start in range(0, len(weight) if packed.groups else 0, height):
        part = slice(start, start + height)
        rows = weight[part].to(dtype)
        scores = torch.mm(rows, states.T, out=buffer[: len(rows)])
        views = [
            scores[:, first : first + (stop - start) * size].view(len(rows), stop - start, size)
            for start, stop, first, size in packed.groups
        ]
        logit = torch.cat([view.amax(-1) for view in views], dim=1)
        if bias is not None:
            logit = logit + bias[part, None]
        gates = None if gate is None else gate[:, part].T[:, packed.row]
        is_kept = torch.ones_like(logit, dtype=torch.bool) if keep_all else is_active(logit, gates)
        for view, (first_text, stop, first, size) in zip(views, packed.groups, strict=True):
            column, text = is_kept[:, first_text:stop].nonzero(as_tuple=True)
            # argmax returns the first of equal maxima.
            token = packed.token[view[column, text].argmax(-1) + (first + text * size)]
            value = logit[column, text + first_text]
            found.append(Entries((column + start).int(), token.int(), value))
    return Entries(*map(torch.cat, zip(*found, strict=True)))


def _tile_height(num_tokens: int, vocab_size: int) -> int:
    return min(max(SCORES // max(num_tokens, 1) // 16 * 16, 256), 8192, vocab_size)
