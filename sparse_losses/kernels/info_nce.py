"""InfoNCE in three matrix products, the first of which ends in the exponentials.

A tile of scores is made, and before it leaves the registers it becomes exponentials of a row's
distance to a reference, with their sums: the score matrix itself is never written. The reference
is the row's largest score among the first columns, so that almost all tiles share it; where one
tile lies far above, each has its own and the row is brought to one afterwards. All are powers of
two, which round nothing. What a row's loss then makes of its exponentials is a factor a row, and
that goes to the rows of the other two products.

A symmetric loss needs the columns' sums as well before any gradient: four products.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_losses._core.softmax import softplus
from sparse_losses.kernels._language import INTERPRETED, dot, on_device
from sparse_losses.kernels._operators import only, scale_, with_gradients

__all__ = ["info_nce"]

# A tile of scores: 64 sums a thread, which leaves room for what becomes of them.
BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
TILE_WARPS, TILE_STAGES = 8, 4
READ_M, READ_N, READ_WARPS = 64, 128, 8  # of scores that are read
# fp32 products of Triton run on the ordinary cores, far slower than cuBLAS: there the tiles are
# read. Half precision is multiplied by the kernel itself.
MULTIPLIES = (torch.bfloat16, torch.float16)
# Bytes of the chunk of exponentials. Every chunk adds to the keys' gradient in fp32, reading and
# writing all of it: small chunks would save less than that costs.
CHUNK_BYTES = 1 << 27
# The gradient of the rows sums over very many columns: so many parts of that as fill the GPU.
TILES_AT_ONCE, FEWEST_COLUMNS = 132, 2048
ROW_BLOCK, ROW_WARPS = 1024, 4
COLUMN_BLOCK, COLUMN_WARPS = 128, 4
DIM_BLOCK, DIM_WARPS = 1024, 4
FINISH_WARPS = 8
# How far, in powers of two, a tile may lie above the reference; fp16 ends at 2^15.
ABOVE, ABOVE_FP16 = 30.0, 4.0
LEVEL_FP16 = 1024.0  # fp16 begins at 2^-24: exponentials are lifted away from that

# What becomes of a tile of scores.
SAMPLE = tl.constexpr(0)  # the row's largest, as a reference
ROWS = tl.constexpr(1)  # exponentials and their sums by row
BOTH = tl.constexpr(2)  # sums by row and by column
SLOPES = tl.constexpr(3)  # the gradient, both directions

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _offset(highest):
    """What exponents are taken from: a whole number; 0 where the largest is no number."""
    up = tl.ceil(highest)
    return tl.where(tl.abs(up) < float("inf"), up, 0.0)


@triton.jit
def _sums(shifted, axis: tl.constexpr):
    """Of powers of two: themselves, their sum, and the sum of them times their exponents."""
    power = tl.exp2(shifted)
    moments = power * tl.where(power == 0.0, 0.0, shifted)
    return power, tl.sum(power, axis), tl.sum(moments, axis)


@triton.jit
def _as(x, dtype: tl.constexpr):
    """Rounded to a dtype, in the interpreter too, which would cut bits off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def _number(x):
    """Zero for NaN: what is NaN and seen is so already, what is hidden must stay zero."""
    return tl.where(x == x, x, 0.0)


@triton.jit
def _store(x, matrix, row_tile, row, column, rows, columns, width, BLOCK_M: tl.constexpr):
    # One wide number for all: offsets within a tile are short, and registers few.
    place = (row - row_tile * BLOCK_M)[:, None] * width + column[None, :]
    start = matrix + row_tile.to(tl.int64) * BLOCK_M * width
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(start + place, _as(x, matrix.dtype.element_ty), mask=mask)


@triton.jit
def _tiles(
    query,  # [rows, dim]
    key,  # [columns, dim]
    matrix,  # [rows, width]: scores where they are read; exponentials or slopes
    query_inverse,
    key_inverse,
    temperature,
    ids,
    reference,
    own,
    row_sums,  # [3, rows, tiles]
    column_sums,  # [3, row tiles, columns]
    row_highest,
    row_factor,
    column_highest,
    column_factor,
    level,
    rows,
    columns,
    dim,
    width,
    first,
    tile_first,
    tiles,
    row_plane,  # between the sums' three planes
    column_plane,
    above,
    MODE: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HIDES: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Neighbours share their keys; the queries of a chunk stay in the cache anyway.
    row_tiles = tl.cdiv(rows, BLOCK_M)
    row_tile = tl.program_id(0) % row_tiles
    tile = tl.program_id(0) // row_tiles
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < rows
    in_columns = column < columns
    row_at = tl.minimum(row, rows - 1)
    column_at = tl.minimum(column, columns - 1)
    if MULTIPLIES:
        inner = tl.arange(0, BLOCK_K)
        a_at = query + row_at.to(tl.int64)[:, None] * dim + inner[None, :]
        b_at = key + column_at.to(tl.int64)[None, :] * dim + inner[:, None]
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, dim, BLOCK_K):
            if EVEN:
                a = tl.load(a_at)
                b = tl.load(b_at)
            else:
                a = tl.load(a_at, mask=(inner < dim - start)[None, :], other=0.0)
                b = tl.load(b_at, mask=(inner < dim - start)[:, None], other=0.0)
            scores = dot(a, b, scores)
            a_at += BLOCK_K
            b_at += BLOCK_K
    else:
        place = (row_at - row_tile * BLOCK_M)[:, None] * width + column_at[None, :]
        scores = tl.load(matrix + row_tile.to(tl.int64) * BLOCK_M * width + place)

    # From here on scores are over the temperature, to the base of two.
    by_row = tl.load(query_inverse + row_at)
    by_column = tl.load(key_inverse + column_at)
    scores *= (by_row * (LOG2_E / tl.load(temperature)))[:, None]
    scores *= by_column[None, :]
    hidden = ~(in_rows[:, None] & in_columns[None, :])
    if HAS_OWN:
        own_column = first + row
        is_own = own_column[:, None] == column[None, :]
        if MODE == ROWS or MODE == BOTH:  # noqa: SIM109 - Triton knows no `in`
            here = in_rows & (own_column // BLOCK_N == tile)
            tl.store(own + row, tl.sum(tl.where(is_own, scores, 0.0), 1), mask=here)
        hidden = hidden | is_own
    if HIDES:
        row_id = tl.load(ids + first + row_at)
        hidden = hidden | (row_id[:, None] == tl.load(ids + column_at)[None, :])
    scores = tl.where(hidden, -float("inf"), scores)

    if MODE == SAMPLE:
        tl.store(reference + row, tl.ceil(tl.max(scores, 1)), mask=in_rows)
    if MODE == ROWS:
        highest = tl.max(scores, 1)
        base = tl.load(reference + row_at)
        base = _offset(tl.where(highest <= base + above, base, highest))
        power, total, moment = _sums(scores - base[:, None], 1)
        at = row_sums + row.to(tl.int64) * tiles + tile_first + tile
        tl.store(at, base, mask=in_rows)
        tl.store(at + row_plane, total, mask=in_rows)
        tl.store(at + row_plane + row_plane, moment, mask=in_rows)
        if WRITES:
            power *= (_number(by_column) * tl.load(level))[None, :]
            _store(power, matrix, row_tile, row, column, rows, columns, width, BLOCK_M)
    if MODE == BOTH:
        base = _offset(tl.max(scores, 1))
        _, total, moment = _sums(scores - base[:, None], 1)
        at = row_sums + row.to(tl.int64) * tiles + tile_first + tile
        tl.store(at, base, mask=in_rows)
        tl.store(at + row_plane, total, mask=in_rows)
        tl.store(at + row_plane + row_plane, moment, mask=in_rows)
        base = _offset(tl.max(scores, 0))
        _, total, moment = _sums(scores - base[None, :], 0)
        at = column_sums + row_tile.to(tl.int64) * columns + column
        tl.store(at, base, mask=in_columns)
        tl.store(at + column_plane, total, mask=in_columns)
        tl.store(at + column_plane + column_plane, moment, mask=in_columns)
    if MODE == SLOPES:
        slope = tl.exp2(scores - tl.load(row_highest + row_at)[:, None])
        slope *= tl.load(row_factor + row_at)[:, None]
        other = tl.exp2(scores - tl.load(column_highest + column_at)[None, :])
        slope += other * tl.load(column_factor + column_at)[None, :]
        slope *= _number(by_row)[:, None]
        slope *= (_number(by_column) * tl.load(level))[None, :]
        _store(slope, matrix, row_tile, row, column, rows, columns, width, BLOCK_M)


@triton.jit
def _outcome(highest, total, moment, own, DECOUPLED: tl.constexpr):
    """The gap, minus the slope by the positive's score, what makes powers slopes, and theirs.

    The last is the sum of slope times score, which cancels where rivals score as the positive.
    """
    gap = (highest + tl.log2(total) - own) * LN_2
    slope = tl.where(total == 0.0, 1.0, 1.0) if DECOUPLED else 1.0 / (1.0 + tl.exp(-gap))
    nothing = total == 0.0
    factor = tl.where(nothing, 0.0, slope / total)
    along = tl.where(nothing, 0.0, moment * factor * LN_2)
    return gap, slope, factor, along


@triton.jit
def _rows(
    row_sums,  # [3, rows, tiles]
    own,
    highest_of,
    gap_of,
    slope_of,
    factor_of,
    along_of,
    matrix,
    others,
    tiles,
    row_plane,
    columns,
    width,
    other_columns,
    other_width,
    DECOUPLED: tl.constexpr,
    WRITES: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its tiles' sums as one, and its powers brought to one offset where they are not."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    base_at = row_sums + row * tiles
    highest = -float("inf")
    for start in range(0, tiles, BLOCK):
        mask = index < tiles - start
        base = tl.load(base_at + start + index, mask=mask, other=0.0)
        total = tl.load(base_at + row_plane + start + index, mask=mask, other=0.0)
        highest = tl.maximum(highest, tl.max(tl.where(total == 0.0, -float("inf"), base), 0))
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    own_score = tl.load(own + row)
    all_total = 0.0
    all_moment = 0.0
    differ = 0
    for start in range(0, tiles, BLOCK):
        mask = index < tiles - start
        base = tl.load(base_at + start + index, mask=mask, other=0.0)
        total = tl.load(base_at + row_plane + start + index, mask=mask, other=0.0)
        moment = tl.load(base_at + row_plane + row_plane + start + index, mask=mask, other=0.0)
        nothing = total == 0.0
        weight = tl.where(nothing, 0.0, tl.exp2(base - highest))
        moment = tl.where(nothing, 0.0, moment + (base - own_score) * total)
        all_total += tl.sum(total * weight, 0)
        all_moment += tl.sum(moment * weight, 0)
        differ += tl.sum(tl.where(nothing | (base == highest), 0, 1), 0)
    gap, slope, factor, along = _outcome(highest, all_total, all_moment, own_score, DECOUPLED)
    tl.store(highest_of + row, highest)
    tl.store(gap_of + row, gap)
    tl.store(slope_of + row, slope)
    tl.store(factor_of + row, factor)
    tl.store(along_of + row, along)
    if WRITES:  # noqa: SIM102 - known while compiling, unlike the other
        if differ > 0:
            for start in range(0, columns, BLOCK):
                column = start + index
                mask = column < columns
                base = tl.load(base_at + column // BLOCK_N, mask=mask, other=0.0)
                at = matrix + row * width + column
                power = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                power *= tl.exp2(tl.minimum(base - highest, 0.0))
                tl.store(at, power.to(matrix.dtype.element_ty), mask=mask)
            if OTHERS:
                tile_first = tl.cdiv(columns, BLOCK_N)
                for start in range(0, other_columns, BLOCK):
                    column = start + index
                    mask = column < other_columns
                    base = tl.load(base_at + tile_first + column // BLOCK_N, mask=mask, other=0.0)
                    at = others + row * other_width + column
                    power = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                    power *= tl.exp2(tl.minimum(base - highest, 0.0))
                    tl.store(at, power.to(others.dtype.element_ty), mask=mask)


@triton.jit
def _columns(
    column_sums,  # [3, row tiles, columns]
    running,  # [3, columns]
    own,
    gap_of,
    slope_of,
    factor_of,
    along_of,
    row_tiles,
    column_plane,
    columns,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds a chunk's sums by column to those of the chunks before it, in their order."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    at = column_sums + column
    highest = tl.load(running + column, mask=mask, other=0.0)
    total = tl.load(running + columns + column, mask=mask, other=0.0)
    moment = tl.load(running + 2 * columns + column, mask=mask, other=0.0)
    for _ in range(0, row_tiles):
        base = tl.load(at, mask=mask, other=0.0)
        more = tl.load(at + column_plane, mask=mask, other=0.0)
        more_moment = tl.load(at + column_plane + column_plane, mask=mask, other=0.0)
        at += columns
        # A sum of nothing has no say in the largest.
        both = tl.where(more == 0.0, highest, tl.maximum(highest, base))
        both = tl.where(total == 0.0, base, both)
        here = tl.where(total == 0.0, 0.0, tl.exp2(highest - both))
        there = tl.where(more == 0.0, 0.0, tl.exp2(base - both))
        # Exponents count from the offset, so a new one moves the moments along.
        moment = tl.where(here == 0.0, 0.0, (moment + (highest - both) * total) * here)
        moment += tl.where(there == 0.0, 0.0, (more_moment + (base - both) * more) * there)
        total = total * here + more * there
        highest = both
    tl.store(running + column, highest, mask=mask)
    tl.store(running + columns + column, total, mask=mask)
    tl.store(running + 2 * columns + column, moment, mask=mask)
    own_score = tl.load(own + column, mask=mask, other=0.0)
    moment = tl.where(total == 0.0, 0.0, moment + (highest - own_score) * total)
    gap, slope, factor, along = _outcome(highest, total, moment, own_score, DECOUPLED)
    tl.store(gap_of + column, gap, mask=mask)
    tl.store(slope_of + column, slope, mask=mask)
    tl.store(factor_of + column, factor, mask=mask)
    tl.store(along_of + column, along, mask=mask)


@triton.jit
def _prepare(
    x, scaled, shift_of, inverse_of, dim, COSINE: tl.constexpr, HIDES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row times the power of two that brings its largest number to one, and one over its length.

    Without cosine the power is one. Where ids hide rows, those with a NaN become zeros: 0 * NaN is
    NaN. Their length tells.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    highest = tl.full([], 0.0, tl.float32)
    is_nan = 0
    for start in range(0, dim, BLOCK):
        value = tl.load(x + row * dim + start + index, mask=index < dim - start, other=0.0)
        value = value.to(tl.float32)
        highest = tl.maximum(highest, tl.max(tl.abs(value), 0))
        is_nan += tl.sum(tl.where(value != value, 1, 0), 0)
    shift = 1.0
    if COSINE:
        exponent = (highest.to(tl.int32, bitcast=True) >> 23) - 127
        exponent = tl.minimum(tl.maximum(exponent, -126), 126)
        shift = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        is_nan += tl.where(highest < float("inf"), 0, 1)
    squares = 0.0
    for start in range(0, dim, BLOCK):
        mask = index < dim - start
        value = tl.load(x + row * dim + start + index, mask=mask, other=0.0).to(tl.float32)
        value *= shift
        squares += tl.sum(value * value, 0)
        if HIDES:
            value = tl.where(is_nan > 0, 0.0, value)
        tl.store(scaled + row * dim + start + index, value.to(scaled.dtype.element_ty), mask=mask)
    inverse = 1.0
    if COSINE:
        inverse = tl.where(squares > 0.0, 1.0 / tl.sqrt_rn(squares), 0.0)
    tl.store(shift_of + row, shift)
    tl.store(inverse_of + row, tl.where(is_nan > 0, float("nan"), inverse))


@triton.jit
def _weigh(x, out, inverse_of, factor_of, lift, dim, BLOCK: tl.constexpr):
    """Rows times what makes their powers slopes."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    factor = tl.load(factor_of + row) * tl.load(lift) * tl.load(inverse_of + row)
    for start in range(0, dim, BLOCK):
        mask = index < dim - start
        value = tl.load(x + row * dim + start + index, mask=mask).to(tl.float32) * factor
        tl.store(out + row * dim + start + index, _as(value, out.dtype.element_ty), mask=mask)


@triton.jit
def _by_unit_row(
    parts, count, part_size, at, mask, scale, partner, has_own, partner_scale, pull,
    x, shift, inverse, HAS_OWN: tl.constexpr,
):  # fmt: skip
    """Some numbers of the gradient by a unit row, and of that row."""
    at_part = parts + at
    gradient = tl.load(at_part, mask=mask, other=0.0)
    for _ in range(1, count):
        at_part += part_size
        gradient += tl.load(at_part, mask=mask, other=0.0)
    gradient *= scale
    if HAS_OWN:
        own = tl.load(partner, mask=mask, other=0.0).to(tl.float32) * partner_scale * pull
        gradient -= tl.where(has_own, own, 0.0)
    unit = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * shift * inverse
    return gradient, unit


@triton.jit
def _finish(
    parts,  # [count, rows, dim], fp32
    x,
    shift_of,
    inverse_of,
    partner,
    partner_shift,
    partner_inverse,
    slope,
    factor,
    undo,
    temperature,
    out,  # may be `parts`
    share,
    count,
    part_size,
    dim,
    partner_first,
    partners,
    slope_first,
    COSINE: tl.constexpr,
    BY_LENGTH: tl.constexpr,
    BY_FACTOR: tl.constexpr,
    HAS_OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's gradient: the parts of its sum, its own positive, and the way through its length.

    The positive's share stays out of the products, in full precision: it is the largest.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    by_score = share / tl.load(temperature)
    shift = tl.load(shift_of + row)
    inverse = tl.load(inverse_of + row)
    scale = by_score * tl.load(undo)
    if BY_FACTOR:
        scale *= tl.load(factor + row)
    if BY_LENGTH:
        scale *= tl.where(inverse == 0.0, 0.0, 1.0 / inverse)
    own = row + partner_first
    has_own = (own >= 0) & (own < partners)
    own = tl.where(has_own, own, 0)
    pull = 0.0
    partner_scale = 0.0
    if HAS_OWN:
        pull = tl.load(slope + row + slope_first, mask=has_own, other=0.0) * by_score
        partner_scale = tl.load(partner_shift + own, mask=has_own, other=0.0)
        partner_scale *= tl.load(partner_inverse + own, mask=has_own, other=0.0)
    along = 0.0
    if COSINE:
        for start in range(0, dim, BLOCK):
            mask = index < dim - start
            gradient, unit = _by_unit_row(
                parts, count, part_size, row * dim + start + index, mask, scale,
                partner + own * dim + start + index, has_own, partner_scale, pull,
                x, shift, inverse, HAS_OWN,
            )  # fmt: skip
            along += tl.sum(gradient * unit, 0)
    for start in range(0, dim, BLOCK):
        mask = index < dim - start
        gradient, unit = _by_unit_row(
            parts, count, part_size, row * dim + start + index, mask, scale,
            partner + own * dim + start + index, has_own, partner_scale, pull,
            x, shift, inverse, HAS_OWN,
        )  # fmt: skip
        if COSINE:
            gradient = (gradient - unit * along) * inverse * shift
        tl.store(out + row * dim + start + index, _as(gradient, out.dtype.element_ty), mask=mask)


@dataclass
class _Side:
    """Rows as they came, as they are multiplied, and what lies between the two."""

    raw: Tensor
    scaled: Tensor
    shift: Tensor
    inverse: Tensor

    def __getitem__(self, rows: slice) -> "_Side":
        return _Side(self.raw[rows], self.scaled[rows], self.shift[rows], self.inverse[rows])


def _side(x: Tensor, home: Tensor | None, cosine: bool, hides: bool) -> _Side:
    """The rows of one input; scaled, they live where their gradient will, if that has room."""
    rows, dim = x.shape
    shift = torch.ones(rows, dtype=torch.float32, device=x.device)
    if not cosine and not hides:
        return _Side(x, x, shift, shift)
    inverse = torch.empty_like(shift)
    scaled = torch.empty_like(x) if home is None or home.dtype != x.dtype else home
    _prepare[(rows,)](
        x, scaled, shift, inverse, dim, cosine, hides, BLOCK=DIM_BLOCK, num_warps=DIM_WARPS
    )
    return _Side(x, scaled, shift, inverse)


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """A product, or one for each of many, summed in fp32 whatever the operands' precision."""
    product, added = (torch.mm, torch.addmm) if a.ndim == 2 else (torch.bmm, torch.baddbmm)
    if a.dtype != torch.float32 and a.is_cuda:
        if add:
            added(out, a, b, out_dtype=torch.float32, out=out)
        else:
            product(a, b, out_dtype=torch.float32, out=out)
        return
    a, b = a.float(), b.float()  # on a CPU, for the tests
    if add:
        added(out, a, b, out=out)
    else:
        product(a, b, out=out)


def _parts(rows: int, dim: int, columns: int) -> tuple[int, int]:
    """Into how many parts a sum over columns is split, and how many columns are in each."""
    tiles = triton.cdiv(rows, 128) * triton.cdiv(dim, 256)
    parts = max(min(TILES_AT_ONCE // tiles, columns // FEWEST_COLUMNS), 1)
    if parts == 1:
        return 1, columns
    length = max(columns // parts // 8, 1) * 8  # what cuBLAS wants to start at
    return columns // length + (columns % length > 0), length


class _Work:
    """All that one call holds: two sides and the negatives, a chunk, and what is found."""

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor, Tensor | None],
        temperature: Tensor,
        ids: Tensor | None,
        needs: list[bool],
        cosine: bool,
        decoupled: bool,
        first: int,
        share: float,
    ) -> None:
        anchor, positive, negative = tensors
        self.temperature, self.ids, self.needs = temperature, ids, needs
        self.cosine, self.decoupled, self.first, self.share = cosine, decoupled, first, share
        self.batch, self.dim = anchor.shape
        self.is_fp16 = anchor.dtype == torch.float16
        # A gradient in fp16 would vanish before it is scaled up: it leaves in fp32.
        dtype = torch.float32 if self.is_fp16 else anchor.dtype
        self.found = [
            torch.empty(x.shape, dtype=dtype, device=x.device) if x is not None and need else None
            for x, need in zip(tensors, needs, strict=False)
        ]
        self.sums: list[Tensor | None] = [
            x if x is None or dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
            for x in self.found[1:]
        ]
        homes = [x if dtype != torch.float32 else None for x in self.found[1:]]
        self.query = _side(anchor, self.found[0], cosine, False)
        self.keys = [_side(positive, homes[0], cosine, ids is not None)]
        if negative is not None and len(negative):
            self.keys.append(_side(negative, homes[1], cosine, False))
        self.multiplies = anchor.dtype in MULTIPLIES
        self.block_m, self.block_n = (BLOCK_M, BLOCK_N) if self.multiplies else (READ_M, READ_N)
        self.tiles = [triton.cdiv(len(key.raw), self.block_n) for key in self.keys]
        self.writes = any(needs[:3])
        self.level = self.number(LEVEL_FP16 if self.is_fp16 else 1.0)
        self.one = self.number(1.0)

    def number(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=self.query.raw.device)

    def vector(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.query.raw.device)

    def chunks(self, chunk_size: int) -> list[slice]:
        """Rows at a time, and the buffers for them."""
        widths = [triton.cdiv(len(key.raw), 64) * 64 for key in self.keys]
        dtype = self.query.raw.dtype
        if not chunk_size:
            chunk_size = CHUNK_BYTES // (sum(widths) * dtype.itemsize) // 128 * 128
            chunk_size = max(chunk_size, 128)
        size = min(chunk_size, self.batch)
        self.matrices: list[Tensor] = []
        for key, width in zip(self.keys, widths, strict=True):
            if self.writes or not self.multiplies:
                matrix = torch.empty((size, width), dtype=dtype, device=key.raw.device)
                self.matrices.append(matrix[:, : len(key.raw)])
            else:
                self.matrices.append(self.temperature)  # never touched
        self.row_sums = self.vector(3 * size * sum(self.tiles))
        return [slice(i, min(i + size, self.batch)) for i in range(0, self.batch, size)]

    def launch(self, mode: tl.constexpr, rows: slice, number: int = 0, **given: Tensor) -> None:
        """The tiles of some rows against the positives or, as number 1, the negatives."""
        query, key = self.query[rows], self.keys[number]
        count, columns = rows.stop - rows.start, len(key.raw)
        matrix = self.matrices[number]
        if mode.value == SAMPLE.value:
            columns = min(columns, self.block_n)
            if not self.multiplies:
                matrix = self.vector(count, columns)
        elif matrix.ndim:
            matrix = matrix[:count]
        if not self.multiplies:
            _multiply(query.scaled, key.scaled[:columns].T, matrix)
        row_tiles, tiles = triton.cdiv(count, self.block_m), triton.cdiv(columns, self.block_n)
        is_batch = number == 0
        names = (
            "reference own row_sums column_sums row_highest row_factor column_highest column_factor"
        )
        _tiles[(row_tiles * tiles,)](
            query.scaled,
            key.scaled,
            matrix,
            query.inverse,
            key.inverse,
            self.temperature,
            self.ids if self.ids is not None else self.temperature,
            *(given.get(name, self.temperature) for name in names.split()),
            self.level,
            count,
            columns,
            self.dim,
            matrix.stride(0) if matrix.ndim else 0,
            self.first + rows.start,
            0 if is_batch else self.tiles[0],
            sum(self.tiles),
            count * sum(self.tiles),
            row_tiles * columns,
            ABOVE_FP16 if self.is_fp16 else ABOVE,
            MODE=mode,
            MULTIPLIES=self.multiplies,
            EVEN=self.dim % BLOCK_K == 0,
            HAS_OWN=is_batch,
            HIDES=is_batch and self.ids is not None,
            WRITES=self.writes,
            BLOCK_M=self.block_m,
            BLOCK_N=self.block_n,
            BLOCK_K=BLOCK_K,
            num_warps=TILE_WARPS if self.multiplies else READ_WARPS,
            num_stages=TILE_STAGES,
        )

    def sum_rows(self, rows: slice, own: Tensor, out: Tensor, writes: bool) -> None:
        """What the tiles' sums say of each row: ``out`` is [highest, gap, slope, factor, along]."""
        count = rows.stop - rows.start
        last = self.matrices[-1]
        _rows[(count,)](
            self.row_sums,
            own[rows],
            *(x[rows] for x in out),
            self.matrices[0],
            last,
            sum(self.tiles),
            count * sum(self.tiles),
            len(self.keys[0].raw),
            self.matrices[0].stride(0) if writes else 0,
            len(self.keys[-1].raw),
            last.stride(0) if writes else 0,
            DECOUPLED=self.decoupled,
            WRITES=writes,
            OTHERS=len(self.keys) > 1,
            BLOCK_N=self.block_n,
            BLOCK=ROW_BLOCK,
            num_warps=ROW_WARPS,
        )

    def back(
        self, rows: slice, slope: Tensor, factor: Tensor | None, weighed: Tensor, undo: Tensor
    ) -> None:
        """Takes in the gradient by a chunk's scores: powers, whose ``factor`` is in ``weighed``."""
        matrices = [matrix[: rows.stop - rows.start] for matrix in self.matrices]
        for matrix, of_keys in zip(matrices, self.sums, strict=False):
            if of_keys is not None:
                _multiply(matrix.T, weighed, of_keys, add=rows.start > 0)
        of_query = self.found[0]
        if of_query is None:
            return
        count = rows.stop - rows.start
        plans = [_parts(count, self.dim, len(key.raw)) for key in self.keys]
        parts = self.vector(sum(number for number, _ in plans), count, self.dim)
        place = 0
        for matrix, key, (number, length) in zip(matrices, self.keys, plans, strict=True):
            whole = len(key.raw) // length
            _multiply(
                matrix[:, : whole * length].unflatten(1, (whole, length)).transpose(0, 1),
                key.scaled[: whole * length].view(whole, length, self.dim),
                parts[place : place + whole],
            )
            if whole < number:
                rest = slice(whole * length, None)
                _multiply(matrix[:, rest], key.scaled[rest], parts[place + whole])
            place += number
        self.finish(
            parts,
            self.query[rows],
            self.keys[0],
            slope,
            factor,
            undo,
            of_query[rows],
            self.first + rows.start,
            rows.start,
        )

    def finish(
        self,
        parts: Tensor,
        side: _Side,
        partner: _Side | None,
        slope: Tensor,
        factor: Tensor | None,
        undo: Tensor,
        out: Tensor,
        partner_first: int,
        slope_first: int,
    ) -> None:
        """From sums over scores to gradients of rows."""
        other = side if partner is None else partner
        rows = len(side.raw)
        _finish[(rows,)](
            parts,
            side.raw,
            side.shift,
            side.inverse,
            other.raw,
            other.shift,
            other.inverse,
            slope,
            slope if factor is None else factor,
            undo,
            self.temperature,
            out,
            self.share,
            parts.numel() // (rows * self.dim),
            rows * self.dim,
            self.dim,
            partner_first,
            len(other.raw),
            slope_first,
            COSINE=self.cosine,
            BY_LENGTH=self.cosine and factor is None,
            BY_FACTOR=factor is not None,
            HAS_OWN=partner is not None,
            BLOCK=DIM_BLOCK,
            num_warps=FINISH_WARPS,
        )

    def finish_keys(self, slope: Tensor, undo: Tensor) -> None:
        for number, (sums, out) in enumerate(zip(self.sums, self.found[1:], strict=True)):
            if sums is None or out is None or number == len(self.keys):
                continue  # negatives may be none
            partner = None if number else self.query
            self.finish(
                sums, self.keys[number], partner, slope, None, undo, out, -self.first, -self.first
            )

    def exponent(self, factor: Tensor) -> Tensor:
        """The power of two that holds the largest factor; its inverse, lifted, is in fp32 too."""
        largest = factor.amax().nan_to_num(1.0, posinf=1.0).clamp(min=2.0**-100)
        return torch.frexp(largest).exponent.float()


def _one_way(work: _Work, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Anchors ask: three products. Returns the rows' gaps and their scores' slopes."""
    batch, device = work.batch, work.temperature.device
    chunks = work.chunks(chunk_size)
    own = work.vector(batch)
    reference = torch.full((batch,), -torch.inf, dtype=torch.float32, device=device)
    if work.writes and work.multiplies:
        work.launch(SAMPLE, slice(0, batch), reference=reference)
    found = work.vector(5, batch)
    _, gap, slope, factor, along = found
    weighed = torch.empty_like(work.query.raw[chunks[0]])
    # fp16: rows are weighed up to a power of two, which follows the largest factor so far.
    highest = work.number(-1000.0) if work.is_fp16 else work.number(0.0)
    room = 0.0 if not work.is_fp16 else 13.0 if work.cosine else -1.0
    for rows in chunks:
        count = rows.stop - rows.start
        if work.writes and not work.multiplies:  # whose scores are held
            work.launch(SAMPLE, rows, reference=reference[rows])
        for number in range(len(work.keys)):
            work.launch(
                ROWS, rows, number, reference=reference[rows], own=own[rows], row_sums=work.row_sums
            )
        work.sum_rows(rows, own, found, work.writes)
        if not work.writes:
            continue
        if work.is_fp16:
            before = highest
            highest = torch.maximum(before, work.exponent(factor[rows]))
            if rows.start:
                for sums in work.sums:
                    scale_(sums, torch.exp2(before - highest))
        query = work.query[rows]
        _weigh[(count,)](
            query.scaled,
            weighed,
            query.inverse,
            factor[rows],
            torch.exp2(room - highest),
            work.dim,
            BLOCK=DIM_BLOCK,
            num_warps=DIM_WARPS,
        )
        work.back(rows, slope, factor[rows], weighed[:count], 1.0 / work.level)
    if work.writes:
        work.finish_keys(slope, torch.exp2(highest - room) / work.level)
    return gap, along


def _both_ways(work: _Work, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Positives ask too: four products, as no gradient is known before all columns' sums are."""
    batch = work.batch
    chunks = work.chunks(chunk_size)
    own = work.vector(batch)
    rows_found, columns_found = work.vector(5, batch), work.vector(4, batch)
    running = torch.zeros((3, batch), dtype=torch.float32, device=own.device)
    column_sums = work.vector(3 * triton.cdiv(chunks[0].stop, work.block_m) * batch)
    for rows in chunks:
        work.launch(BOTH, rows, own=own[rows], row_sums=work.row_sums, column_sums=column_sums)
        work.sum_rows(rows, own, rows_found, False)
        row_tiles = triton.cdiv(rows.stop - rows.start, work.block_m)
        _columns[(triton.cdiv(batch, COLUMN_BLOCK),)](
            column_sums,
            running,
            own,
            *columns_found,
            row_tiles,
            row_tiles * batch,
            batch,
            DECOUPLED=work.decoupled,
            BLOCK=COLUMN_BLOCK,
            num_warps=COLUMN_WARPS,
        )
    gap = torch.stack([rows_found[1], columns_found[0]])
    along = rows_found[4] + columns_found[3]
    if work.writes:
        if work.is_fp16:
            both = torch.stack([rows_found[3], columns_found[2]])
            work.level = work.level * torch.exp2(-work.exponent(both))
        slope = rows_found[2] + columns_found[1]
        for rows in chunks:
            work.launch(
                SLOPES,
                rows,
                row_highest=rows_found[0, rows],
                row_factor=rows_found[3, rows],
                column_highest=running[0],
                column_factor=columns_found[2],
            )
            work.back(rows, slope, None, work.query.scaled[rows], 1.0 / work.level)
        work.finish_keys(slope, 1.0 / work.level)
    return gap, along


@torch.library.custom_op("sparse_losses::info_nce", mutates_args=())
def _info_nce(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: Tensor,
    positive_ids: Tensor | None,
    needs: list[bool],
    cosine: bool,
    symmetric: bool,
    decoupled: bool,
    chunk_size: int,
    mean: bool,
    first: int,
) -> list[Tensor]:
    share = 1.0 / (anchor.shape[0] if mean else 1) / (2 if symmetric else 1)
    temperature = temperature.float()
    ids = None if positive_ids is None else positive_ids.contiguous()
    tensors = (
        anchor.contiguous(),
        positive.contiguous(),
        None if negative is None else negative.contiguous(),
    )
    with on_device(anchor):
        work = _Work(tensors, temperature, ids, needs, cosine, decoupled, first, share)
        gap, along = (_both_ways if symmetric else _one_way)(work, chunk_size)
    value = (gap if decoupled else softplus(gap)).sum() * share
    nothing = value.new_empty(0)
    of_temperature = -along.sum() * share / temperature if needs[3] else nothing
    return [value, *(nothing.clone() if x is None else x for x in work.found), of_temperature]


@_info_nce.register_fake
def _(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: Tensor,
    positive_ids: Tensor | None,
    needs: list[bool],
    *_: Any,
) -> list[Tensor]:
    dtype = torch.float32 if anchor.dtype == torch.float16 else anchor.dtype
    tensors = anchor, positive, negative
    value = anchor.new_empty((), dtype=torch.float32)
    return [
        value,
        *(
            x.new_empty(x.shape, dtype=dtype) if x is not None and need else value.new_empty(0)
            for x, need in zip(tensors, needs, strict=False)
        ),
        value.new_empty(() if needs[3] else 0),
    ]


with_gradients(_info_nce, 4)


def info_nce(
    needs: Sequence[bool],
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: Tensor,
    *,
    cosine: bool,
    symmetric: bool = False,
    decoupled: bool,
    positive_ids: Tensor | None,
    chunk_size: int | None,
    mean: bool,
    first: int = 0,
) -> tuple[Tensor, list[Tensor | None]]:
    """InfoNCE over the batch, reduced, and its gradient by the four tensors that need one.

    ``symmetric`` goes without negatives, which are shared. There may be more positives (and ids)
    than anchors: that of the first anchor is number ``first``.
    """
    value, *gradients = _info_nce(
        anchor,
        positive,
        negative,
        temperature,
        positive_ids,
        list(needs),
        cosine,
        symmetric,
        decoupled,
        chunk_size or 0,
        mean,
        first,
    )
    return value, only(needs, gradients)
