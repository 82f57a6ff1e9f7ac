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
    is_bf16 = halves.dtype == torch.bfloat16 and dtype == torch.float32 and not keep_all
    screens = is_bf16 and len(halves) >= MIN_POSITIONS * len(packed.row) > 0
    norm = _maxima(_norms(states)[None], packed)[1] if screens else None
    start, height = len(weight) if not packed.groups else 0, _tile_height(len(states), len(weight))
    buffer = states.new_empty(height, len(states))
    while start < len(weight):
        part = slice(start, start + height)
        rows, biases = weight[part].to(dtype), None if bias is None else bias[part, None]
        gates = None if gate is None else gate[:, part].T[:, packed.row]
        scores = buffer[: len(rows)]
        if norm is None:
            torch.mm(rows, states.T, out=scores)
        else:  # copied, as maxima of bf16 are slow
            scores.copy_(torch.mm(rows.to(halves.dtype), halves.T))
        views, logit = _maxima(scores, packed)
        lowest = logit
        if norm is not None:
            error = ROUNDING * _norms(rows)[:, None] * norm
            lowest, logit = logit - 2 * error, logit + error  # a maximum's score, and its bound
        logit = logit if biases is None else logit + biases
        is_kept = is_active(logit, gates) | keep_all
        if norm is not None and int(is_kept.sum()) * MIN_SCORES > scores.numel():
            norm = None  # for this tile and all others, which have as many
            continue
        for view, (first_text, stop, first, size) in zip(views, packed.groups, strict=True):
            column, text = is_kept[:, first_text:stop].nonzero(as_tuple=True)
            table, token, text = view[column, text], first + text * size, text + first_text
            value = logit[column, text]
            if norm is not None:
                table = _again(table, lowest[column, text, None], rows, column, states, token)
                value = table.amax(-1) if biases is None else table.amax(-1) + biases[column, 0]
                active = is_active(value, None if gates is None else gates[column, text])
                table, token, column, value = (x[active] for x in (table, token, column, value))
            # argmax returns the first of equal maxima.
            token = packed.token[table.argmax(-1) + token]
            found.append(Entries((column + start).int(), token.int(), value))
        start += height
    return Entries(*map(torch.cat, zip(*found, strict=True)))


def _maxima(scores: Tensor, packed: _Packed) -> tuple[list[Tensor], Tensor]:
    """Return scores ``[T, n]`` as ``[T, texts, tokens]`` by group, and their maxima ``[T, R]``."""
    views = [
        scores[:, first : first + (stop - start) * size].view(len(scores), stop - start, size)
        for start, stop, first, size in packed.groups
    ]
    return views, torch.cat([view.amax(-1) for view in views], dim=1)


def _again(
    scores: Tensor, lowest: Tensor, rows: Tensor, row: Tensor, states: Tensor, token: Tensor
) -> Tensor:
    """Return scores ``[m, tokens]`` of rows with states from ``token`` on, -inf where too low."""
    entry, place = (~(scores < lowest)).nonzero(as_tuple=True)  # with those that are NaN
    pairs = zip(*(torch.split(x, 4096) for x in (row[entry], token[entry] + place)), strict=True)
    dots = [(rows[i] * states[j]).sum(1) for i, j in pairs]  # in parts that stay in cache
    exact = states.new_full(scores.shape, -torch.inf)
    exact[entry, place] = torch.cat([exact.new_empty(0), *dots])
    return exact


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=1)
    return norms + 1e-18  # more than squares that underflow add up to


def _tile_height(num_tokens: int, vocab_size: int) -> int:
    return min(max(SCORES // max(num_tokens, 1) // 16 * 16, 256), 8192, vocab_size)
