"""NWS: labels become one number a pair, then scores meet them in two passes over the references.

Tensor cores multiply fp16 here, yet nothing is computed in half precision: labels are 0 or 1, and
any other factor is two numbers of fp16, which hold 22 bits between them. Rows of features are
scaled by a power of two, so that bf16 and fp16 fit into one of them.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_losses.kernels._language import dot, log1p, next_power_of_2, on_device
from sparse_losses.kernels._operators import gradient_dtype, only, with_gradients

__all__ = ["nws"]

# Queries and references of a tile. The more queries, the fewer times all references are read; the
# numbers are the largest that compile for sm_90 without spilled registers.
TILE_QUERIES = 64  # rows are padded to as many, and references to TILE_WEIGHTS
TILE_REFERENCES = 64
TILE_WEIGHTS = 128  # references, where three products share the tile
MOST_LABELS = 256  # labels whose sums lie in registers
MOST_FEATURES = 256  # of rows that are held while all references go by
MOST_SLOPES = 128  # features whose sums over references lie in registers
INNER = 64  # labels or features that are multiplied over at once, where not all are held
WARPS = 8
STAGES = 2
PREPARED = 4096  # numbers that one program prepares
PROGRAMS = 132  # as many as the multiprocessors of an H200: with fewer, references are split

TOP = tl.constexpr(16384.0)  # what the largest weight of a row is scaled to
LOW = tl.constexpr(4096.0)  # factor of its lower half
ALIKE = tl.constexpr(4.0)  # factor of a similarity's lower half
SHARE = tl.constexpr(32768.0)  # factor of 1 / |y or y|
GAIN = tl.constexpr(2097152.0)  # what bounds a row's gradient becomes this
NONE = tl.constexpr(2147483647)  # no index


# What both halves of all products are made of


@triton.jit
def _features(
    x_pointer,
    mask_pointer,
    parts_pointer,
    inverse_pointer,
    length_pointer,
    filled_pointer,
    rows,
    limit,
    columns,
    x_row,
    x_column,
    mask_row,
    first,
    plane,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rows scaled by a power of two, in one or two parts; one over their length, so scaled."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    filled = row < rows
    if HAS_MASK:
        filled &= tl.load(mask_pointer + row * mask_row, mask=filled, other=0) != 0
    x = tl.load(
        x_pointer + row[:, None] * x_row + column.to(tl.int64)[None, :] * x_column,
        mask=filled[:, None] & (column < columns)[None, :],
        other=0.0,
    ).to(tl.float32)
    # The exponent's bits of the largest; rows near the smallest numbers go up in two steps.
    largest = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)
    up = tl.where(largest < 2.0**-60, 2.0**90, 1.0)
    exponent = ((largest * up).to(tl.int32, bitcast=True) >> 23) & 255
    power = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    power = tl.where((largest > 0.0) & (exponent < 255), power, 1.0)
    x = x * up[:, None] * power[:, None]
    norm = tl.sqrt_rn(tl.sum(x * x, axis=1))
    is_zero = norm == 0.0
    # The inverse alone shows a NaN or an infinity: it reaches every score of the row.
    inverse = tl.where(is_zero, 0.0, 1.0 / tl.where(is_zero, 1.0, norm))
    tl.store(inverse_pointer + first + row, inverse, mask=row < limit)
    length = tl.where(is_zero, float("inf"), norm / power / up)
    tl.store(length_pointer + first + row, length, mask=row < limit)
    tl.store(filled_pointer + first + row, filled.to(tl.int8), mask=row < limit)
    place = parts_pointer + (first + row)[:, None] * PADDED + column[None, :]
    inside = (row < limit)[:, None] & (column < PADDED)[None, :]
    high = x.to(tl.float16)
    tl.store(place, high, mask=inside)
    if PARTS == 2:
        tl.store(place + plane, (x - high.to(tl.float32)).to(tl.float16), mask=inside)


@triton.jit
def _labels(
    labels_pointer,
    mask_pointer,
    hot_pointer,
    count_pointer,
    rows,
    limit,
    columns,
    labels_row,
    labels_column,
    mask_row,
    first,
    PADDED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Labels as 0 and 1 of fp16, and how many a row has; none where it is masked."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    filled = row < rows
    if HAS_MASK:
        filled &= tl.load(mask_pointer + row * mask_row, mask=filled, other=0) != 0
    labels = tl.load(
        labels_pointer + row[:, None] * labels_row + column.to(tl.int64)[None, :] * labels_column,
        mask=filled[:, None] & (column < columns)[None, :],
        other=0,
    )
    hot = (labels.to(tl.float32) != 0.0).to(tl.float32)
    tl.store(count_pointer + first + row, tl.sum(hot, axis=1), mask=row < limit)
    tl.store(
        hot_pointer + (first + row)[:, None] * PADDED + column[None, :],
        hot.to(tl.float16),
        mask=(row < limit)[:, None] & (column < PADDED)[None, :],
    )


@triton.jit
def _halves(x):
    """``x`` as two numbers of fp16."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


# Of labels alone


@triton.jit
def _shares(
    own_pointer,
    own_count_pointer,
    hot_pointer,
    count_pointer,
    shares_pointer,
    references,
    step,
    queries,
    LABELS: tl.constexpr,
    QUERIES: tl.constexpr,
    REFERENCES: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """``sum_r y_rc / |y_i or y_r|`` over a part of the references, for a block of labels."""
    begin = tl.program_id(1).to(tl.int64) * step
    row, reference = tl.arange(0, QUERIES), tl.arange(0, REFERENCES)
    block = tl.arange(0, BLOCK)
    query = tl.program_id(0).to(tl.int64) * QUERIES
    own_pointer += query * LABELS
    shares_pointer += (tl.program_id(1).to(tl.int64) * queries + query) * LABELS
    shares_pointer += tl.program_id(2) * BLOCK
    hot_pointer += begin * LABELS
    count_pointer += begin
    own_count = tl.load(own_count_pointer + query + row)
    own = tl.load(own_pointer + row[:, None] * LABELS + block[None, :])
    shares = tl.zeros((QUERIES, BLOCK), tl.float32)
    for _ in range(0, tl.minimum(step, references - begin), REFERENCES):
        shared = tl.zeros((QUERIES, REFERENCES), tl.float32)
        hot_place = hot_pointer + reference[:, None] * LABELS
        if LABELS == BLOCK:
            hot = tl.load(hot_place + block[None, :])
            shared = dot(own, tl.trans(hot), shared)
        else:
            for k in range(0, LABELS, INNER):
                inner = k + tl.arange(0, INNER)
                mine = tl.load(own_pointer + row[:, None] * LABELS + inner[None, :])
                theirs = tl.load(hot_place + inner[None, :])
                shared = dot(mine, tl.trans(theirs), shared)
            hot = tl.load(hot_place + tl.program_id(2) * BLOCK + block[None, :])
        count = tl.load(count_pointer + reference)
        union = tl.maximum(own_count[:, None] + count[None, :] - shared, 1.0)
        high, low = _halves(1.0 / union * SHARE)
        shares = dot(high, hot, shares)
        shares = dot(low, hot, shares)
        hot_pointer += REFERENCES * LABELS
        count_pointer += REFERENCES
    tl.store(shares_pointer + row[:, None] * LABELS + block[None, :], shares / SHARE)


@triton.jit
def _tables(
    own_pointer,
    own_count_pointer,
    shares_pointer,
    alike_pointer,
    tables_pointer,
    unscale_pointer,
    pairs_pointer,
    queries,
    labels,
    instances,
    references,
    splits,
    alpha,
    eps,
    LABELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIG: tl.constexpr,
    HAS_INSTANCES: tl.constexpr,
):
    """A query's weight by label, what `_weights` multiplies labels with, and its prototypes."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < LABELS
    y = tl.load(own_pointer + row * LABELS + column, mask=inside, other=0.0).to(tl.float32)
    count = tl.load(own_count_pointer + row)
    one_or_more = tl.maximum(count, 1.0)
    share = y * (1.0 - alpha / one_or_more)
    if HAS_INSTANCES:
        sums = tl.zeros((WIDTH,), tl.float32)
        for split in range(splits):
            place = shares_pointer + (split * queries + row) * LABELS
            sums += tl.load(place + column, mask=inside, other=0.0)
        share += y * alpha * sums
    per_label = y / (tl.where(share <= 1e-6, 1.0, share) + eps) / (one_or_more + eps)

    # The columns of prototypes in the matrix of pairs, and what it is padded with.
    place = pairs_pointer + row * references + instances
    pairs = tl.where(y > 0.0, -1.0 * per_label, 1.0)
    pairs = tl.where(column < labels, pairs, 0.0)
    tl.store(place + column, pairs, mask=column < references - instances)
    for start in range(WIDTH, references - instances, WIDTH):
        other = start + column
        tl.store(place + other, tl.zeros((WIDTH,), tl.float32), mask=other < references - instances)

    if HAS_INSTANCES:
        top = tl.max(per_label, axis=0)
        tl.store(unscale_pointer + row, top / TOP)
        high, low = _halves(per_label * (1.0 / tl.where(top > 0.0, top, 1.0)) * TOP)
        alike = tl.load(
            alike_pointer + row * labels + column,
            mask=column < labels,
            other=0.0,
        )
        alike = alike / one_or_more
        alike = tl.where(alike < 0.0, 0.0, tl.where(alike > 1.0, 1.0, alike))  # a NaN stays
        alike_high, alike_low = _halves(alike)
        # A reference that shares a label is positive, and how alike it is does not matter; one
        # that shares none meets similarities alone. So one sum counts shared labels in units of
        # `BIG`, more than all similarities, and another holds both lower halves.
        low = low.to(tl.float32) * LOW
        alike_low = alike_low.to(tl.float32) * ALIKE
        table = tables_pointer + row * LABELS + column
        plane = queries.to(tl.int64) * LABELS
        tl.store(
            table, tl.where(y > 0.0, BIG, alike_high.to(tl.float32)).to(tl.float16), mask=inside
        )
        tl.store(table + plane, high, mask=inside)
        both = tl.where(y > 0.0, low, alike_low)
        tl.store(table + 2 * plane, both.to(tl.float16), mask=inside)


@triton.jit
def _weights(
    tables_pointer,
    own_count_pointer,
    unscale_pointer,
    hot_pointer,
    count_pointer,
    filled_pointer,
    pairs_pointer,
    queries,
    instances,
    references,
    alpha,
    beta,
    eps,
    LABELS: tl.constexpr,
    BIG: tl.constexpr,
    QUERIES: tl.constexpr,
    REFERENCES: tl.constexpr,
    INNER: tl.constexpr,
):
    """A number a pair: minus the weight of a positive, or the weight of a negative."""
    row, reference = tl.arange(0, QUERIES), tl.arange(0, REFERENCES)
    query = tl.program_id(0).to(tl.int64) * QUERIES
    begin = tl.program_id(1).to(tl.int64) * REFERENCES
    plane = queries.to(tl.int64) * LABELS
    tables_pointer += query * LABELS
    hot_pointer += begin * LABELS
    first = tl.zeros((QUERIES, REFERENCES), tl.float32)
    second = tl.zeros((QUERIES, REFERENCES), tl.float32)
    third = tl.zeros((QUERIES, REFERENCES), tl.float32)
    for k in range(0, LABELS, INNER):
        inner = k + tl.arange(0, INNER)
        hot = tl.trans(tl.load(hot_pointer + reference[:, None] * LABELS + inner[None, :]))
        table = tables_pointer + row[:, None] * LABELS + inner[None, :]
        first = dot(tl.load(table), hot, first)
        second = dot(tl.load(table + plane), hot, second)
        third = dot(tl.load(table + 2 * plane), hot, third)
    own_count_pointer += query
    unscale_pointer += query
    count_pointer += begin
    filled_pointer += begin
    own_count = tl.maximum(tl.load(own_count_pointer + row), 1.0)[:, None]
    unscale = tl.load(unscale_pointer + row)[:, None]
    count = tl.load(count_pointer + reference)[None, :]
    filled = tl.load(filled_pointer + reference)[None, :] != 0

    shared = tl.floor((first + BIG / 4) / BIG)
    overlap = alpha / tl.maximum(own_count + count - shared, 1.0)
    weight = overlap * (second + third / LOW) * unscale
    alike = (first + third / ALIKE) * own_count / (own_count * tl.maximum(count, 1.0) + eps)
    unlike = 1.0 - alike
    unlike = beta * tl.where(unlike < 0.0, 0.0, tl.where(unlike > 1.0, 1.0, unlike))  # a NaN stays
    # Times -1: of a weight of 0, too, the sign says that the reference is positive.
    pairs = tl.where(filled, tl.where(shared > 0.0, -1.0 * weight, unlike), 0.0)
    pairs_pointer += query * references + begin
    place = pairs_pointer + row[:, None] * references + reference[None, :]
    tl.store(place, pairs, mask=(reference < instances - begin)[None, :])


# Of features and the number a pair


@triton.jit
def _product(own, own_low, x, x_low, scores, PARTS: tl.constexpr):
    x = tl.trans(x)
    if PARTS == 2:
        scores = dot(own_low, x, scores)
        scores = dot(own, tl.trans(x_low), scores)
    return dot(own, x, scores)


@triton.jit
def _part(pointer, plane, PARTS: tl.constexpr):
    """A tile's lower half; where there is none, the tile, which is not looked at."""
    return tl.load(pointer + (PARTS - 1) * plane)


@triton.jit
def _wide_product(
    own_pointer,
    own_plane,
    x_pointer,
    x_plane,
    scores,
    FEATURES: tl.constexpr,
    PARTS: tl.constexpr,
    QUERIES: tl.constexpr,
    REFERENCES: tl.constexpr,
    INNER: tl.constexpr,
):
    """The product of rows that are too long to be held."""
    row, reference = tl.arange(0, QUERIES), tl.arange(0, REFERENCES)
    for k in range(0, FEATURES, INNER):
        inner = k + tl.arange(0, INNER)
        place = own_pointer + row[:, None] * FEATURES + inner[None, :]
        own, own_low = tl.load(place), _part(place, own_plane, PARTS)
        place = x_pointer + reference[:, None] * FEATURES + inner[None, :]
        x, x_low = tl.load(place), _part(place, x_plane, PARTS)
        scores = _product(own, own_low, x, x_low, scores, PARTS)
    return scores


@triton.jit
def _read(pairs, DECOUPLED: tl.constexpr):
    """The weight as a positive, that as a negative, and the logarithm of the latter."""
    is_positive = pairs.to(tl.int32, bitcast=True) < 0
    weight = tl.where(is_positive, -1.0 * pairs, 0.0)
    negative = tl.where(is_positive, 0.0 if DECOUPLED else 1.0, pairs)
    # A NaN stays one; a positive's term of the denominator is its score to the last bit.
    logarithm = tl.log(tl.where(negative == 0.0, 1.0, negative))
    return weight, negative, tl.where(negative == 0.0, float("-inf"), logarithm)


@triton.jit
def _join(
    top,
    at_top,
    rest,
    others,
    own,
    high,
    at_high,
    near,
    top2,
    at_top2,
    rest2,
    others2,
    own2,
    high2,
    at_high2,
    near2,
):
    """What two parts of the references say of their rows, as one.

    Of the denominator: its largest term's logarithm, where it is, and the rest relative to it. Of
    the positives: their weight without that term's, and that. The highest score, where it is, and
    the positives' weighted distance from it. Earlier references come first, so they win ties.
    """
    total, total2 = others + own, others2 + own2
    wins = top2 > top
    larger, smaller = tl.where(wins, top2, top), tl.where(wins, top, top2)
    ratio = tl.exp(smaller - tl.where(larger == float("-inf"), 0.0, larger))
    rest = tl.where(wins, rest2 + (1.0 + rest) * ratio, rest + (1.0 + rest2) * ratio)
    others = tl.where(wins, others2 + total, others + total2)
    own = tl.where(wins, own2, own)
    at_top = tl.where(wins, at_top2, at_top)
    wins = high2 > high
    highest = tl.where(wins, high2, high)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    lift = total * (level - tl.where(high == float("-inf"), level, high))
    lift2 = total2 * (level - tl.where(high2 == float("-inf"), level, high2))
    at_high = tl.where(wins, at_high2, at_high)
    return larger, at_top, rest, others, own, highest, at_high, (near + lift) + (near2 + lift2)


@triton.jit
def _statistics(
    own_pointer,
    own_inverse_pointer,
    x_pointer,
    inverse_pointer,
    filled_pointer,
    pairs_pointer,
    temperature_pointer,
    numbers_pointer,
    places_pointer,
    queries,
    references,
    step,
    FEATURES: tl.constexpr,
    PARTS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    QUERIES: tl.constexpr,
    REFERENCES: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """What `_join` joins, of a block of queries and a part of the references."""
    row, reference = tl.arange(0, QUERIES), tl.arange(0, REFERENCES)
    block = tl.arange(0, BLOCK)
    query = tl.program_id(0).to(tl.int64) * QUERIES
    begin = tl.program_id(1) * step
    own_plane = queries.to(tl.int64) * FEATURES
    x_plane = references.to(tl.int64) * FEATURES
    own_pointer += query * FEATURES
    x_pointer += begin.to(tl.int64) * FEATURES
    pairs_pointer += query * references + begin
    inverse_pointer += begin
    filled_pointer += begin
    scale = tl.load(own_inverse_pointer + query + row) / tl.load(temperature_pointer)
    own_place = own_pointer + row[:, None] * FEATURES + block[None, :]
    mine, mine_low = tl.load(own_place), _part(own_place, own_plane, PARTS)

    nothing = tl.full((QUERIES,), float("-inf"), tl.float32)
    zero = tl.zeros((QUERIES,), tl.float32)
    nowhere = tl.full((QUERIES,), NONE, tl.int32)
    top, at_top, rest, others, own = nothing, nowhere, zero, zero, zero
    high, at_high, near, most = nothing, nowhere, zero, zero
    for start in range(begin, tl.minimum(begin + step, references), REFERENCES):
        column = start + reference
        scores = tl.zeros((QUERIES, REFERENCES), tl.float32)
        x_place = x_pointer + reference[:, None] * FEATURES + block[None, :]
        if FEATURES == BLOCK:
            x, x_low = tl.load(x_place), _part(x_place, x_plane, PARTS)
            scores = _product(mine, mine_low, x, x_low, scores, PARTS)
        else:
            scores = _wide_product(
                own_pointer,
                own_plane,
                x_pointer,
                x_plane,
                scores,
                FEATURES,
                PARTS,
                QUERIES,
                REFERENCES,
                INNER,
            )
        scores *= scale[:, None] * tl.load(inverse_pointer + reference)[None, :]
        pairs = tl.load(pairs_pointer + row[:, None] * references + reference[None, :])
        weight, negative, logarithm = _read(pairs, DECOUPLED)
        most = tl.maximum(most, tl.max(negative, axis=1))

        terms = scores + logarithm
        # A NaN wins nothing here; the sums show it.
        tile_top = tl.max(tl.where(terms == terms, terms, float("-inf")), axis=1)
        at = tl.min(tl.where(terms == tile_top[:, None], column[None, :], NONE), axis=1)
        is_top = column[None, :] == at[:, None]
        shift = tl.where(tile_top == float("-inf"), 0.0, tile_top)
        tile_rest = tl.sum(tl.where(is_top, 0.0, tl.exp(terms - shift[:, None])), axis=1)
        tile_others = tl.sum(tl.where(is_top, 0.0, weight), axis=1)
        tile_own = tl.sum(tl.where(is_top, weight, 0.0), axis=1)

        filled = tl.load(filled_pointer + reference) != 0
        present = tl.where(filled[None, :] & (scores == scores), scores, float("-inf"))
        tile_high = tl.max(present, axis=1)
        at2 = tl.min(tl.where(present == tile_high[:, None], column[None, :], NONE), axis=1)
        shift = tl.where(tile_high == float("-inf"), 0.0, tile_high)
        tile_near = tl.sum(weight * (shift[:, None] - scores), axis=1)  # 0 * NaN shows a NaN
        top, at_top, rest, others, own, high, at_high, near = _join(
            top,
            at_top,
            rest,
            others,
            own,
            high,
            at_high,
            near,
            tile_top,
            at,
            tile_rest,
            tile_others,
            tile_own,
            tile_high,
            at2,
            tile_near,
        )
        x_pointer += REFERENCES * FEATURES
        pairs_pointer += REFERENCES
        inverse_pointer += REFERENCES
        filled_pointer += REFERENCES
    place = places_pointer + tl.program_id(1).to(tl.int64) * 2 * queries + query + row
    tl.store(place, at_top)
    tl.store(place + queries, at_high)
    place = numbers_pointer + tl.program_id(1).to(tl.int64) * 7 * queries + query + row
    tl.store(place, top)
    tl.store(place + queries, rest)
    tl.store(place + 2 * queries, others)
    tl.store(place + 3 * queries, own)
    tl.store(place + 4 * queries, high)
    tl.store(place + 5 * queries, near)
    tl.store(place + 6 * queries, most)


@triton.jit
def _rows(
    numbers_pointer,
    places_pointer,
    own_count_pointer,
    pairs_pointer,
    values_pointer,
    valid_pointer,
    slopes_pointer,
    specials_pointer,
    queries,
    rows,
    references,
    splits,
    log_eps,
    HAS_FLOOR: tl.constexpr,
    NEEDS_NEGATIVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's value, and what its gradient by the scores is made of."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
    zero = tl.zeros((BLOCK,), tl.float32)
    nowhere = tl.full((BLOCK,), NONE, tl.int32)
    top, at_top, rest, others, own = nothing, nowhere, zero, zero, zero
    high, at_high, near, most = nothing, nowhere, zero, zero
    for split in range(splits):
        place = places_pointer + split * 2 * queries + row
        at_top2, at_high2 = tl.load(place), tl.load(place + queries)
        place = numbers_pointer + split * 7 * queries + row
        most = tl.maximum(most, tl.load(place + 6 * queries))
        top, at_top, rest, others, own, high, at_high, near = _join(
            top,
            at_top,
            rest,
            others,
            own,
            high,
            at_high,
            near,
            tl.load(place),
            at_top2,
            tl.load(place + queries),
            tl.load(place + 2 * queries),
            tl.load(place + 3 * queries),
            tl.load(place + 4 * queries),
            at_high2,
            tl.load(place + 5 * queries),
        )
    valid = (row < rows) & (tl.load(own_count_pointer + row) > 0.0)
    if NEEDS_NEGATIVES:
        valid &= most > 0.0

    # The denominator's largest term is taken out with its weight as a positive; it may be the
    # floor, which is of the highest score.
    floor = nothing
    if HAS_FLOOR:
        floor = high + log_eps
    is_top = top >= floor
    peak, smaller = tl.where(is_top, top, floor), tl.where(is_top, floor, top)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # of a row that is not valid
    ratio = tl.exp(smaller - peak)
    lower = rest
    rest = tl.where(is_top, rest + ratio, (1.0 + rest) * ratio)
    total = others + own
    value = near + total * (peak - high) + total * log1p(rest)
    tl.store(values_pointer + row, tl.where(valid, value, 0.0))
    tl.store(valid_pointer + row, valid.to(tl.int8))

    last = references - 1
    pair = tl.load(pairs_pointer + row * references + tl.minimum(at_high, last))
    own_high = tl.where(pair.to(tl.int32, bitcast=True) < 0, -1.0 * pair, 0.0)
    special_weight = tl.where(is_top, own, own_high)
    others = tl.where(is_top, others, total - own_high)
    special = (others - special_weight * rest) / (1.0 + rest)
    probability = total / (1.0 + rest)
    extra = tl.where(is_top, probability * ratio, 0.0)
    # Where the largest term is of the highest score, the floor adds what it takes: an easy row's
    # gradient is what is left, which a difference of the two does not know.
    is_both = is_top & (at_top == at_high)
    left = (others * (1.0 + ratio) - special_weight * lower) / (1.0 + rest)
    special, extra = tl.where(is_both, left, special), tl.where(is_both, 0.0, extra)
    # No other entry of the row is larger than this: two parts of fp16 hold them.
    largest = probability * tl.minimum(tl.where(is_top, lower, rest), 1.0)
    bound = largest + others + tl.abs(special) + extra
    bound = tl.where(bound < 1e-30, 1e-30, bound)  # a NaN stays
    shown = tl.where(value != value, value, 0.0)  # a NaN reaches all gradients
    place = slopes_pointer + row
    tl.store(place, peak)
    tl.store(place + queries, probability + shown)
    tl.store(place + 2 * queries, special)
    tl.store(place + 3 * queries, extra)
    tl.store(place + 4 * queries, high)
    tl.store(place + 5 * queries, bound)
    tl.store(specials_pointer + row, tl.where(is_top, at_top, at_high))
    tl.store(specials_pointer + queries + row, at_high)
    tl.store(specials_pointer + 2 * queries + row, is_top.to(tl.int32))


@triton.jit
def _slopes(
    own_pointer,
    own_inverse_pointer,
    x_pointer,
    inverse_pointer,
    pairs_pointer,
    temperature_pointer,
    slopes_pointer,
    specials_pointer,
    valid_pointer,
    by_query_pointer,
    by_prototype_pointer,
    by_temperature_pointer,
    queries,
    instances,
    labels,
    references,
    step,
    FEATURES: tl.constexpr,
    PARTS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    BY_QUERY: tl.constexpr,
    QUERIES: tl.constexpr,
    REFERENCES: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """The gradient by the scores, times the references, for a part of them and of the features.

    By prototypes' scores it is kept: a product with the queries is all that they need.
    """
    row, reference = tl.arange(0, QUERIES), tl.arange(0, REFERENCES)
    block = tl.arange(0, BLOCK)
    query = tl.program_id(0).to(tl.int64) * QUERIES
    begin = tl.program_id(1) * step
    own_plane = queries.to(tl.int64) * FEATURES
    x_plane = references.to(tl.int64) * FEATURES
    own_pointer += query * FEATURES
    x_pointer += begin.to(tl.int64) * FEATURES
    pairs_pointer += query * references + begin
    inverse_pointer += begin
    scale = tl.load(own_inverse_pointer + query + row) / tl.load(temperature_pointer)
    own_place = own_pointer + row[:, None] * FEATURES + block[None, :]
    mine, mine_low = tl.load(own_place), _part(own_place, own_plane, PARTS)
    peak = tl.load(slopes_pointer + query + row)[:, None]
    probability = tl.load(slopes_pointer + query + queries + row)[:, None]
    special = tl.load(slopes_pointer + query + 2 * queries + row)[:, None]
    extra = tl.load(slopes_pointer + query + 3 * queries + row)[:, None]
    high = tl.load(slopes_pointer + query + 4 * queries + row)[:, None]
    gain = 1.0 / tl.load(slopes_pointer + query + 5 * queries + row)[:, None] * GAIN
    at_special = tl.load(specials_pointer + query + row)[:, None]
    at_high = tl.load(specials_pointer + query + queries + row)[:, None]
    is_top = tl.load(specials_pointer + query + 2 * queries + row)[:, None] != 0
    valid = tl.load(valid_pointer + query + row) != 0

    by_query = tl.zeros((QUERIES, BLOCK), tl.float32)
    by_temperature = tl.zeros((QUERIES,), tl.float32)
    for start in range(begin, tl.minimum(begin + step, references), REFERENCES):
        column = start + reference
        scores = tl.zeros((QUERIES, REFERENCES), tl.float32)
        x_place = x_pointer + reference[:, None] * FEATURES + block[None, :]
        if FEATURES == BLOCK:
            x, x_low = tl.load(x_place), _part(x_place, x_plane, PARTS)
            scores = _product(mine, mine_low, x, x_low, scores, PARTS)
        else:
            scores = _wide_product(
                own_pointer,
                own_plane,
                x_pointer,
                x_plane,
                scores,
                FEATURES,
                PARTS,
                QUERIES,
                REFERENCES,
                INNER,
            )
        inverse = tl.load(inverse_pointer + reference)[None, :]
        scores *= scale[:, None] * inverse
        pairs = tl.load(pairs_pointer + row[:, None] * references + reference[None, :])
        weight, _, logarithm = _read(pairs, DECOUPLED)
        share = probability * tl.exp(scores + logarithm - peak)
        is_special = column[None, :] == at_special
        at_peak = tl.where(is_top, 0.0, share) + special
        slope = tl.where(is_special, at_peak, share - weight)
        slope += tl.where(column[None, :] == at_high, extra, 0.0)
        slope = tl.where(valid[:, None], slope, 0.0)
        by_temperature += tl.sum(slope * (scores - high), axis=1)
        if BY_QUERY:
            large, small = _halves(slope * gain * inverse)
            if FEATURES > BLOCK:
                x_place += tl.program_id(2) * BLOCK
                x, x_low = tl.load(x_place), _part(x_place, x_plane, PARTS)
            by_query = dot(large, x, by_query)
            by_query = dot(small, x, by_query)
            if PARTS == 2:
                by_query = dot(large, x_low, by_query)
        if tl.program_id(2) == 0 and start + REFERENCES > instances:
            kept_pointer = by_prototype_pointer + query * labels - instances + start
            inside = (column >= instances) & (column < instances + labels)
            kept_place = kept_pointer + row[:, None] * labels + reference[None, :]
            tl.store(kept_place, slope, mask=inside[None, :])
        x_pointer += REFERENCES * FEATURES
        pairs_pointer += REFERENCES
        inverse_pointer += REFERENCES
    if BY_QUERY:
        by_query_pointer += tl.program_id(1).to(tl.int64) * own_plane
        by_query_pointer += query * FEATURES + tl.program_id(2) * BLOCK
        tl.store(by_query_pointer + row[:, None] * FEATURES + block[None, :], by_query)
    if tl.program_id(2) == 0:
        by_temperature_pointer += tl.program_id(1).to(tl.int64) * queries + query
        # The score of a NaN, times 0, is one.
        tl.store(by_temperature_pointer + row, tl.where(valid, by_temperature, 0.0))


@triton.jit
def _through_rows(
    gradient_pointer,
    bound_pointer,
    parts_pointer,
    inverse_pointer,
    length_pointer,
    valid_pointer,
    divisor_pointer,
    temperature_pointer,
    out_pointer,
    rows,
    columns,
    splits,
    padded,
    plane,
    valid_row,
    FEATURES: tl.constexpr,
    PARTS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """From the gradient by unit rows, in parts to be summed, to that by the rows as they came."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    here = row < rows
    inside = here[:, None] & (column < FEATURES)[None, :]
    gradient = tl.zeros((ROWS, WIDTH), tl.float32)
    for split in range(splits):
        place = gradient_pointer + (split * padded + row)[:, None] * FEATURES + column[None, :]
        gradient += tl.load(place, mask=inside, other=0.0)
    if IS_SCALED:
        gradient *= tl.load(bound_pointer + row, mask=here, other=0.0)[:, None] / GAIN
    gradient /= tl.load(temperature_pointer) * tl.load(divisor_pointer)
    place = parts_pointer + row[:, None] * FEATURES + column[None, :]
    unit = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if PARTS == 2:
        unit += tl.load(place + plane, mask=inside, other=0.0).to(tl.float32)
    unit *= tl.load(inverse_pointer + row, mask=here, other=0.0)[:, None]
    along = tl.sum(unit * gradient, axis=1)
    length = tl.load(length_pointer + row, mask=here, other=1.0)
    out = (gradient - unit * along[:, None]) / length[:, None]
    valid = tl.load(valid_pointer + row * valid_row, mask=here, other=0) != 0
    tl.store(
        out_pointer + row[:, None] * columns + column[None, :],
        tl.where(valid[:, None], out, 0.0),
        mask=here[:, None] & (column < columns)[None, :],
    )


def _padded(size: int, most: int, least: int = INNER) -> tuple[int, int]:
    """A size of whole blocks, and the block: a power of two up to ``most``."""
    block = min(max(next_power_of_2(size), least), most)
    return triton.cdiv(size, block) * block, block


def _rows_at_once(width: int) -> int:
    return max(PREPARED // width, 1)


def _splits(blocks: int, size: int, tile: int) -> tuple[int, int]:
    """In how many parts references are worked on, and how many there are in one."""
    tiles = triton.cdiv(size, tile)
    step = triton.cdiv(tiles, min(max(PROGRAMS // blocks, 1), tiles))
    return triton.cdiv(tiles, step), step * tile


class _Rows:
    """Rows of features, one over the other, as the kernels take them."""

    def __init__(self, like: Tensor, rows: int, tile: int, parts: int) -> None:
        self.padded = triton.cdiv(rows, tile) * tile
        self.features, self.block = _padded(like.shape[1], MOST_FEATURES)
        self.parts = like.new_empty(parts, self.padded, self.features, dtype=torch.float16)
        self.inverse = like.new_empty(self.padded, dtype=torch.float32)
        self.length = like.new_empty(self.padded, dtype=torch.float32)
        self.filled = like.new_empty(self.padded, dtype=torch.int8)
        self.width = next_power_of_2(self.features)

    def put(self, first: int, x: Tensor, mask: Tensor | None, end: int) -> None:
        at_once = _rows_at_once(self.width)
        _features[(triton.cdiv(end - first, at_once),)](
            x,
            x if mask is None else mask,
            self.parts,
            self.inverse,
            self.length,
            self.filled,
            len(x),
            end - first,
            x.shape[1],
            x.stride(0),
            x.stride(1),
            0 if mask is None else mask.stride(0),
            first,
            self.padded * self.features,
            PADDED=self.features,
            PARTS=len(self.parts),
            HAS_MASK=mask is not None,
            ROWS=at_once,
            WIDTH=self.width,
            num_warps=4,
        )

    def through(
        self,
        gradient: Tensor,
        bound: Tensor | None,
        first: int,
        valid: Tensor,
        divisor: Tensor,
        temperature: Tensor,
        out: Tensor,
    ) -> None:
        at_once = _rows_at_once(self.width)
        _through_rows[(triton.cdiv(len(out), at_once),)](
            gradient,
            gradient if bound is None else bound,
            self.parts[:, first:],
            self.inverse[first:],
            self.length[first:],
            valid,
            divisor,
            temperature,
            out,
            len(out),
            out.shape[1],
            gradient.shape[0],
            gradient.shape[1],
            self.padded * self.features,
            valid.stride(0) if valid.ndim else 0,
            FEATURES=self.features,
            PARTS=len(self.parts),
            IS_SCALED=bound is not None,
            ROWS=at_once,
            WIDTH=self.width,
            num_warps=4,
        )


class _Labels:
    """Rows of labels, one over the other, as the kernels take them."""

    def __init__(self, like: Tensor, rows: int, tile: int) -> None:
        self.padded = triton.cdiv(rows, tile) * tile
        self.size, self.block = _padded(like.shape[1], MOST_LABELS)
        self.hot = like.new_empty(self.padded, self.size, dtype=torch.float16)
        self.count = like.new_empty(self.padded, dtype=torch.float32)
        self.width = next_power_of_2(self.size)

    def put(self, first: int, labels: Tensor, mask: Tensor | None, end: int) -> None:
        at_once = _rows_at_once(self.width)
        _labels[(triton.cdiv(end - first, at_once),)](
            _bytes(labels),
            labels if mask is None else mask,
            self.hot,
            self.count,
            len(labels),
            end - first,
            labels.shape[1],
            labels.stride(0),
            labels.stride(1),
            0 if mask is None else mask.stride(0),
            first,
            PADDED=self.size,
            HAS_MASK=mask is not None,
            ROWS=at_once,
            WIDTH=self.width,
            num_warps=4,
        )


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x


@torch.library.custom_op("sparse_losses::nws_value_and_gradients", mutates_args=())
def _nws(
    query: Tensor,
    prototype: Tensor,
    temperature: Tensor,
    query_labels: Tensor,
    label_similarity: Tensor | None,
    key: Tensor | None,
    key_labels: Tensor | None,
    queue: Tensor | None,
    queue_labels: Tensor | None,
    queue_mask: Tensor | None,
    needs: list[bool],
    alpha: float,
    beta: float,
    decoupled: bool,
    eps: float,
    reduction: str,
) -> list[Tensor]:
    batch, labels = len(query), len(prototype)
    given = [
        (x, y, None if mask is None else _bytes(mask))
        for x, y, mask in ((key, key_labels, None), (queue, queue_labels, queue_mask))
        if x is not None and y is not None and len(x)
    ]
    instances = sum(len(x) for x, _, _ in given)
    exact = {x.dtype for x in (query, prototype, *(x for x, _, _ in given))}
    parts = 2 if torch.float32 in exact else 1

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return query.new_empty(shape, dtype=dtype)

    with on_device(query):
        own_labels = _Labels(query_labels, batch, TILE_QUERIES)
        own_labels.put(0, query_labels, None, own_labels.padded)
        queries = own_labels.padded
        own = _Rows(query, batch, TILE_QUERIES, parts)
        own.put(0, query, own_labels.count, queries)
        x = _Rows(query, instances + labels, TILE_WEIGHTS, parts)
        references = x.padded
        first = 0
        for some, _, mask in given:
            x.put(first, some, mask, first + len(some))
            first += len(some)
        x.put(first, prototype, None, references)

        # Of labels: a number a pair.
        pairs = numbers(queries, references)
        pairs[batch:] = 0.0
        size = own_labels.size
        big = 2.0 * max(next_power_of_2(size), 64)
        shares = alike = tables = unscale = own_labels.count
        splits = 0
        if given:
            assert label_similarity is not None  # checked by the caller
            theirs = _Labels(query_labels, instances, TILE_WEIGHTS)
            first = 0
            for index, (_, some, mask) in enumerate(given):
                end = theirs.padded if index + 1 == len(given) else first + len(some)
                theirs.put(first, some, mask, end)
                first += len(some)
            blocks = queries // TILE_QUERIES * (size // own_labels.block)
            splits, step = _splits(blocks, theirs.padded, TILE_REFERENCES)
            shares = numbers(splits, queries, size)
            _shares[(queries // TILE_QUERIES, splits, size // own_labels.block)](
                own_labels.hot,
                own_labels.count,
                theirs.hot,
                theirs.count,
                shares,
                theirs.padded,
                step,
                queries,
                LABELS=size,
                QUERIES=TILE_QUERIES,
                REFERENCES=TILE_REFERENCES,
                BLOCK=own_labels.block,
                INNER=INNER,
                num_warps=WARPS,
                num_stages=STAGES,
            )
            alike = own_labels.hot[:batch, :labels].float() @ label_similarity.float()
            tables = numbers(3, queries, size, dtype=torch.float16)
            unscale = numbers(queries)
            tables[:, batch:], unscale[batch:] = 0.0, 0.0
        _tables[(batch,)](  # what lies in rows that are padded is not looked at
            own_labels.hot,
            own_labels.count,
            shares,
            alike,
            tables,
            unscale,
            pairs,
            queries,
            labels,
            instances,
            references,
            splits,
            alpha,
            eps,
            LABELS=size,
            WIDTH=own_labels.width,
            BIG=big,
            HAS_INSTANCES=bool(given),
            num_warps=4,
        )
        if given:
            _weights[(queries // TILE_QUERIES, theirs.padded // TILE_WEIGHTS)](
                tables,
                own_labels.count,
                unscale,
                theirs.hot,
                theirs.count,
                x.filled,
                pairs,
                queries,
                instances,
                references,
                alpha,
                beta,
                eps,
                LABELS=size,
                BIG=big,
                QUERIES=TILE_QUERIES,
                REFERENCES=TILE_WEIGHTS,
                INNER=INNER,
                num_warps=WARPS,
                num_stages=STAGES + 1,
            )

        # Of scores: the value, then the gradient.
        is_held = parts == 1 and x.features <= MOST_FEATURES
        splits, step = _splits(queries // TILE_QUERIES, references, TILE_REFERENCES)
        statistics = numbers(splits, 7, queries)
        places = numbers(splits, 2, queries, dtype=torch.int32)
        shape = {
            "FEATURES": x.features,
            "PARTS": parts,
            "DECOUPLED": decoupled,
            "QUERIES": TILE_QUERIES,
            "REFERENCES": TILE_REFERENCES,
            "INNER": INNER,
            "num_warps": WARPS,
            "num_stages": STAGES,
        }
        _statistics[(queries // TILE_QUERIES, splits)](
            own.parts,
            own.inverse,
            x.parts,
            x.inverse,
            x.filled,
            pairs,
            temperature,
            statistics,
            places,
            queries,
            references,
            step,
            BLOCK=x.features if is_held else INNER,
            **shape,
        )
        values, valid = numbers(queries), numbers(queries, dtype=torch.int8)
        slopes, specials = numbers(6, queries), numbers(3, queries, dtype=torch.int32)
        _rows[(queries // TILE_QUERIES,)](
            statistics,
            places,
            own_labels.count,
            pairs,
            values,
            valid,
            slopes,
            specials,
            queries,
            batch,
            references,
            splits,
            math.log(eps) if eps > 0 else 0.0,
            HAS_FLOOR=eps > 0,
            NEEDS_NEGATIVES=decoupled and eps == 0,
            BLOCK=TILE_QUERIES,
            num_warps=2,
        )
        value, divisor = values.sum(), torch.ones_like(values[0])
        if reduction == "mean":
            divisor = valid.sum().clamp(min=1).float()
            value = value / divisor
        found = [query.new_empty(0), prototype.new_empty(0), temperature.new_empty(0)]
        if not any(needs[:3]):
            return [value, *found]

        block = min(x.block, MOST_SLOPES)
        by_query = numbers(*((splits, queries, own.features) if needs[0] else (0,)))
        by_prototype, by_temperature = numbers(queries, labels), numbers(splits, queries)
        _slopes[(queries // TILE_QUERIES, splits, x.features // block if needs[0] else 1)](
            own.parts,
            own.inverse,
            x.parts,
            x.inverse,
            pairs,
            temperature,
            slopes,
            specials,
            valid,
            by_query,
            by_prototype,
            by_temperature,
            queries,
            instances,
            labels,
            references,
            step,
            BY_QUERY=needs[0],
            BLOCK=block,
            **shape,
        )
        if needs[0]:
            found[0] = query.new_empty(query.shape, dtype=gradient_dtype(query))
            own.through(by_query, slopes[5], 0, valid, divisor, temperature, found[0])
        if needs[1]:
            found[1] = prototype.new_empty(prototype.shape, dtype=gradient_dtype(prototype))
            unit = own.parts[0].float() if parts == 1 else own.parts[0].float() + own.parts[1]
            unit = torch.where(valid[:, None] != 0, unit * own.inverse[:, None], 0.0)
            product = (by_prototype.T @ unit)[None]
            x.through(product, None, instances, valid.amax(), divisor, temperature, found[1])
        if needs[2]:
            found[2] = by_temperature.sum().neg() / (temperature * divisor)
    return [value, *found]


@_nws.register_fake
def _(query, prototype, temperature, *others):
    needs = others[7]
    found = [
        x.new_empty(x.shape, dtype=gradient_dtype(x)) if need else x.new_empty(0)
        for x, need in zip((query, prototype, temperature), needs, strict=False)
    ]
    return [query.new_empty((), dtype=torch.float32), *found]


with_gradients(_nws, 3)


def nws(
    alpha: float,
    beta: float,
    number: float,
    aggregation: str,
    decoupled: bool,
    eps: float,
    reduction: str,
    gather: bool,
    needs: Sequence[bool],
    query: Tensor,
    prototype: Tensor,
    temperature: Tensor | None,
    *constants: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Value and gradients of the loss, reduced: the options, then tensors, as its PyTorch path."""
    assert aggregation == "mean"
    assert not gather
    wanted = [bool(need) for need in needs[:3]]
    if temperature is None:
        temperature = number * query.new_ones((), dtype=torch.float32)
    value, *gradients = _nws(
        query,
        prototype,
        temperature,
        *constants,
        wanted,
        float(alpha),
        float(beta),
        decoupled,
        float(eps),
        reduction,
    )
    return value, only(wanted, gradients) + [None] * len(constants)
