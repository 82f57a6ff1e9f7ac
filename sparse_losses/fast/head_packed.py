"""The packed head, for the CPU: it drops padding and processes only active entries after the max.

The vocabulary is processed in tiles. A tile's scores ``[T, n]`` with the ``n`` attended tokens are
reduced to one maximum per text before the next tile. Only active entries then need the arg-max.
Their number depends on the data, which costs a sync on an accelerator.

Hidden states in bf16, as autocast makes them, are multiplied in bf16 if that is faster. A bound on
the rounding tells which entries may be active and where their maxima may be: those scores are
computed again in fp32.
"""

import functools
import itertools
import timeit
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_losses.fast.head_entries import Entries, Inputs, is_active

SCORES = 6 << 20  # maximal number of scores in a tile
MIN_POSITIONS, MIN_WIDTH = 64, 256  # of a text and a state, from which on products in bf16 pay
SCORES_OF_A_DOT = 100  # of a product in fp32 that take as long as one score computed by itself
# Error of a bf16 product over the product of the norms: 2 ** -8 for rounding a row of the weight,
# as much for rounding the result, and half as much for an fp32 sum of up to 32,768 products.
ROUNDING = 2.5 * 2**-8


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
    screens = (halves.dtype, dtype) == (torch.bfloat16, torch.float32) and halves.is_cpu
    screens = screens and not keep_all and len(halves) >= MIN_POSITIONS * len(packed.row) > 0
    pays = screens and bf16_pays(halves.shape[1])
    norm = _maxima(_norms(states)[None], packed)[1] if pays else None
    height = _tile_height(len(states), len(weight))
    buffer = states.new_empty(height, len(states))
    bounds = [*range(0, len(weight) if packed.groups else 0, height), len(weight)]
    if norm is not None:  # a small tile tells whether they pay
        bounds.insert(1, height // 8)
    for start, stop in itertools.pairwise(bounds):
        part = slice(start, stop)
        rows, biases = weight[part].to(dtype), None if bias is None else bias[part, None]
        gates = None if gate is None else gate[:, part].T[:, packed.row]
        scores = buffer[: len(rows)]
        if norm is None:
            torch.mm(rows, states.T, out=scores)
        else:  # copied, as maxima of bf16 are slow
            scores.copy_(torch.mm(rows.to(halves.dtype), halves.T))
        views, logit = _maxima(scores, packed)
        lowest, work = logit, 0.0
        if norm is not None:
            error = ROUNDING * _norms(rows)[:, None] * norm
            lowest, logit = logit - 2 * error, logit + error  # a maximum's score, and its bound
        logit = logit if biases is None else logit + biases
        is_kept = is_active(logit, gates) | keep_all
        for view, (first_text, stop, first, size) in zip(views, packed.groups, strict=True):
            column, text = is_kept[:, first_text:stop].nonzero(as_tuple=True)
            table, place, text = view[column, text], text * size, text + first_text
            value = logit[column, text]
            if norm is not None:
                near = ~(table < lowest[column, text, None])  # or NaN
                work += near.numel() / 4 + SCORES_OF_A_DOT * int(near.sum())
                table = _again(near, rows, column, states[first : first + view[0].numel()], place)
                value = table.amax(-1) if biases is None else table.amax(-1) + biases[column, 0]
                active = is_active(value, None if gates is None else gates[column, text])
                table, place, column, value = (x[active] for x in (table, place, column, value))
            # argmax returns the first of equal maxima.
            token = packed.token[table.argmax(-1) + (first + place)]
            found.append(Entries((column + start).int(), token.int(), value))
        norm = None if work > scores.numel() / 2 else norm  # other tiles have as many
    return Entries(*map(torch.cat, zip(*found, strict=True)))


@functools.cache
def bf16_pays(width: int) -> bool:
    """Whether bf16 is worth its screening on this CPU: many emulate it, and only a trial tells."""
    if width < MIN_WIDTH:
        return False
    x = torch.ones(256, 256, dtype=torch.float32, device="cpu")
    trials = [functools.partial(torch.mm, each, each) for each in (x.bfloat16(), x)]
    half, single = (min(timeit.repeat(trial, number=1, repeat=5)) for trial in trials)
    return half < single


def _maxima(scores: Tensor, packed: _Packed) -> tuple[list[Tensor], Tensor]:
    """Return scores ``[T, n]`` as ``[T, texts, tokens]`` by group, and their maxima ``[T, R]``."""
    views = [
        scores[:, first : first + (stop - start) * size].view(len(scores), stop - start, size)
        for start, stop, first, size in packed.groups
    ]
    return views, torch.cat([view.amax(-1) for view in views], dim=1)


def _again(near: Tensor, rows: Tensor, row: Tensor, states: Tensor, first: Tensor) -> Tensor:
    """Return ``[m, tokens]``: scores of rows with states from ``first`` on, -inf where not near."""
    entry, place = near.nonzero(as_tuple=True)
    if SCORES_OF_A_DOT * len(entry) > len(rows) * len(states):
        return (rows @ states.T).view(len(rows), -1, near.shape[1])[row, first // near.shape[1]]
    pairs = zip(*(torch.split(x, 4096) for x in (row[entry], first[entry] + place)), strict=True)
    dots = [(rows[i] * states[j]).sum(1) for i, j in pairs]  # in parts that stay in cache
    exact = states.new_full(near.shape, -torch.inf)
    exact[entry, place] = torch.cat([exact.new_empty(0), *dots])
    return exact


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=1)
    return norms + 1e-18  # more than squares that underflow add up to


def _tile_height(num_tokens: int, vocab_size: int) -> int:
    return min(max(SCORES // max(num_tokens, 1) // 16 * 16, 256), 8192, vocab_size)
