"""The packed head, for the CPU: it drops padding and processes only active entries after the max.

The vocabulary is processed in tiles. A tile's scores ``[T, n]`` with the ``n`` attended tokens are
reduced to one maximum per text before the next tile. Only active entries then need the arg-max.
Their number depends on the data, which costs a sync on an accelerator.

Hidden states in bf16, as autocast makes them, are multiplied in bf16. A bound on the rounding tells
which entries may be active and where their maxima may be: those scores are computed again in fp32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparse_losses.fast.head_entries import Entries, Inputs, is_active

SCORES = 6 << 20  # maximal number of scores in a tile
# Measured: products in bf16 pay from so many positions per text on, and so many scores per entry.
MIN_POSITIONS, MIN_SCORES = 64, 512
# Error of a bf16 product over the product of the norms: 2 ** -9 for rounding a row of the weight,
# as much for rounding the result, and half of that sum for adding up in fp32.
ROUNDING = 1.5 * 2**-8


class _Packed(NamedTuple):
    """The attended tokens, text after text; texts of equal length are adjacent."""

    token: Tensor  # [n] index into the B * S positions
    row: Tensor  # [R] the texts with an attended token, in packed order
    groups: list[tuple[int, int, int, int]]  # first and last text, first token, tokens per text

    def maxima(self, scores: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return scores ``[T, n]`` as ``[T, texts, tokens]`` by group, and maxima ``[T, R]``."""
        views = [
            scores[:, first : first + (stop - start) * size].view(len(scores), stop - start, size)
            for start, stop, first, size in self.groups
        ]
        return views, torch.cat([view.amax(-1) for view in views], dim=1)


class _Tile(NamedTuple):
    """Some columns of the vocabulary."""

    rows: Tensor  # [T, H] of the weight
    bias: Tensor | None  # [T, 1]
    gate: Tensor | None  # [T, R]
    buffer: Tensor  # for T * n scores

    def biased(self, logit: Tensor) -> Tensor:
        return logit if self.bias is None else logit + self.bias


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
    halves = hidden.flatten(0, 1).index_select(0, packed.token)
    states, nothing = halves.to(dtype), packed.token[:0].int()
    found = [Entries(nothing, nothing, states.new_empty(0))]
    height = _tile_height(len(states), len(weight))
    buffer = states.new_empty(height * len(states))
    is_bf16 = halves.dtype == torch.bfloat16 and dtype == torch.float32 and not keep_all
    screens = is_bf16 and len(halves) >= MIN_POSITIONS * len(packed.row) > 0
    norm = packed.maxima(_norms(states)[None])[1] if screens else None
    for start in range(0, len(weight) if packed.groups else 0, height):
        part = slice(start, start + height)
        biases = None if bias is None else bias[part, None]
        gates = None if gate is None else gate[:, part].T[:, packed.row]
        tile = _Tile(weight[part].to(dtype), biases, gates, buffer)
        entries = None if norm is None else _screened(tile, halves, states, packed, norm)
        if entries is None:  # too many, and so will be those of the next tile
            norm, entries = None, _multiplied(tile, states, packed, keep_all)
        for column, token, value in entries:
            found.append(Entries((column + start).int(), token.int(), value))
    return Entries(*map(torch.cat, zip(*found, strict=True)))


def _multiplied(tile: _Tile, states: Tensor, packed: _Packed, keep_all: bool) -> list[Entries]:
    """Return a tile's entries: all, or the active ones."""
    scores = tile.buffer[: len(tile.rows) * len(states)].view(len(tile.rows), -1)
    views, logit = packed.maxima(torch.mm(tile.rows, states.T, out=scores))
    logit = tile.biased(logit)
    is_kept = is_active(logit, tile.gate) | keep_all
    found = []
    for view, (first_text, stop, first, size) in zip(views, packed.groups, strict=True):
        column, text = is_kept[:, first_text:stop].nonzero(as_tuple=True)
        # argmax returns the first of equal maxima.
        token = packed.token[view[column, text].argmax(-1) + (first + text * size)]
        found.append(Entries(column, token, logit[column, text + first_text]))
    return found


def _screened(
    tile: _Tile, halves: Tensor, states: Tensor, packed: _Packed, norm: Tensor
) -> list[Entries] | None:
    """Return a tile's active entries by a product in bf16, or None where there are too many."""
    rows = tile.rows
    scores = tile.buffer.view(halves.dtype)[: len(rows) * len(states)].view(len(rows), -1)
    views, highest = packed.maxima(torch.mm(rows.to(halves.dtype), halves.T, out=scores))
    error = (ROUNDING * _norms(rows)[:, None] * norm).to(states.dtype)
    is_kept = is_active(tile.biased(highest + error), tile.gate)
    if int(is_kept.sum()) * MIN_SCORES > scores.numel():
        return None
    lowest, found = highest - 2 * error, []  # what a maximum's score is at least
    for view, (first_text, stop, first, size) in zip(views, packed.groups, strict=True):
        column, text = is_kept[:, first_text:stop].nonzero(as_tuple=True)
        first_tokens, text = first + text * size, text + first_text
        may_be_highest = ~(view[column, text - first_text] < lowest[column, text, None])  # or NaN
        entry, place = may_be_highest.nonzero(as_tuple=True)
        exact = rows.new_full(may_be_highest.shape, -torch.inf)
        exact[entry, place] = _dots(rows, column[entry], states, first_tokens[entry] + place)
        token = packed.token[exact.argmax(-1) + first_tokens]
        logit = exact.amax(-1)
        logit = logit if tile.bias is None else logit + tile.bias[column, 0]
        active = is_active(logit, None if tile.gate is None else tile.gate[column, text])
        found.append(Entries(column[active], token[active], logit[active]))
    return found


def _dots(a: Tensor, row: Tensor, b: Tensor, other: Tensor) -> Tensor:
    """Return ``(a[row] * b[other]).sum(1)``, some thousand rows at a time, which stay in cache."""
    pairs = zip(torch.split(row, 4096), torch.split(other, 4096), strict=True)
    return torch.cat([a.new_empty(0), *((a[i] * b[j]).sum(1) for i, j in pairs)])


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)  # squares stay in range
    return norms


def _tile_height(num_tokens: int, vocab_size: int) -> int:
    return min(max(SCORES // max(num_tokens, 1) // 16 * 16, 256), 8192, vocab_size)
