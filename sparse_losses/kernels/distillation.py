"""Distillation: a row is read once, and its gradient written, while it lies in registers.

Z-scores of the whole matrix need its moments first: a pass of its own, whose partial results are
put together in a fixed order. How many candidates there are is only known afterwards: gradients
are written for a matrix without gaps, and once more where there were some.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_losses.kernels._language import next_power_of_2, on_device
from sparse_losses.kernels._operators import gradient_dtype, only, with_gradients

__all__ = ["fused", "value_and_gradients"]

MOST_COLUMNS = 4096  # of a row in registers; wider ones are read in pieces, from the cache again
PIECE, PIECE_WARPS = 2048, 16  # of a wider one
TILE = 2048  # elements of a tile of several short rows
PER_WARP = 512  # elements: 16 a thread, in four arrays that live at once
REGISTERS = 128  # a thread: two programs of the widest tile run beside each other
PROGRAMS = 1024  # that look whether the gradient is to be written again
JOINED = 1024  # partial results that are put together at once

# Where the results of all tiles lie in `matrix`.
COUNT, ROWS_KEPT, IS_FULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
STUDENT, TEACHER, ALONG = tl.constexpr(3), tl.constexpr(6), tl.constexpr(9)  # pivot, mean, 1 / std
SLOTS = 10


@triton.jit
def _load(student, teacher, mask, row, column, num_rows, num_columns):
    """A piece of the scores, 0 where there is no candidate, and where there is one."""
    inside = (row < num_rows) & (column < num_columns)
    at = row * num_columns + column
    s = tl.load(student + at, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(teacher + at, mask=inside, other=0.0).to(tl.float32)
    candidate = inside & (t != float("-inf"))
    if mask is not None:
        candidate &= tl.load(mask + at, mask=inside, other=0) != 0
    return tl.where(candidate, s, 0.0), tl.where(candidate, t, 0.0), candidate


@triton.jit
def _below(scores, pivot, candidate):
    """Scores from their pivot, which keeps the digits of scores far from 0."""
    return tl.where(candidate, scores - pivot, 0.0)


@triton.jit
def _sum(x, AXIS: tl.constexpr):
    return tl.sum(x, axis=AXIS, keep_dims=True)


@triton.jit
def _largest(
    student,
    teacher,
    mask,
    row,
    num_rows,
    num_columns,
    AXIS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """How many candidates, and the largest scores: of each row, or of the tile."""
    NUMBER: tl.constexpr = row.shape[0] if AXIS == 1 else 1
    lowest = float("-inf")
    count = tl.zeros([NUMBER, 1], tl.float32)
    high_s = tl.full([NUMBER, 1], lowest, tl.float32)
    high_t = tl.full([NUMBER, 1], lowest, tl.float32)
    # A whole row is loaded once: the loops fall away, and equal loads are one.
    for start in range(0, COLUMNS if IS_WHOLE else num_columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        s, t, candidate = _load(student, teacher, mask, row, column, num_rows, num_columns)
        count += _sum(candidate.to(tl.float32), AXIS)
        above_s = tl.max(tl.where(candidate, s, lowest), axis=AXIS, keep_dims=True)
        above_t = tl.max(tl.where(candidate, t, lowest), axis=AXIS, keep_dims=True)
        high_s, high_t = tl.maximum(high_s, above_s), tl.maximum(high_t, above_t)
    has_any = count > 0
    return count, tl.where(has_any, high_s, 0.0), tl.where(has_any, high_t, 0.0)


@triton.jit
def _scale(mean):
    """What deviations are divided by, so that their squares neither overflow nor underflow.

    The mean's distance from the largest score: the range is at most as many times that as there
    are scores.
    """
    return tl.maximum(tl.abs(mean), 1e-30)


@triton.jit
def _moments(
    student,
    teacher,
    mask,
    row,
    num_rows,
    num_columns,
    count,
    high_s,
    high_t,
    AXIS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Means from the largest score, sums of squares and of products around them, scaled."""
    mean_s, mean_t = tl.zeros_like(count), tl.zeros_like(count)
    for start in range(0, COLUMNS if IS_WHOLE else num_columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        s, t, candidate = _load(student, teacher, mask, row, column, num_rows, num_columns)
        mean_s += _sum(_below(s, high_s, candidate), AXIS)
        mean_t += _sum(_below(t, high_t, candidate), AXIS)
    mean_s, mean_t = mean_s / tl.maximum(count, 1.0), mean_t / tl.maximum(count, 1.0)
    by_s, by_t = 1.0 / _scale(mean_s), 1.0 / _scale(mean_t)
    squares_s, squares_t = tl.zeros_like(count), tl.zeros_like(count)
    products = tl.zeros_like(count)
    for start in range(0, COLUMNS if IS_WHOLE else num_columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        s, t, candidate = _load(student, teacher, mask, row, column, num_rows, num_columns)
        s = tl.where(candidate, (_below(s, high_s, candidate) - mean_s) * by_s, 0.0)
        t = tl.where(candidate, (_below(t, high_t, candidate) - mean_t) * by_t, 0.0)
        squares_s += _sum(s * s, AXIS)
        squares_t += _sum(t * t, AXIS)
        products += _sum(s * t, AXIS)
    return mean_s, mean_t, squares_s, squares_t, products


@triton.jit
def _to_z(count, mean_s, mean_t, squares_s, squares_t, products, FEWEST: tl.constexpr):
    """What deviations are multiplied by, and what of z(s) is taken out of the gradient.

    Scores that are all equal, whose mean is their largest, and too few of them have ``z = 0``.
    """
    degrees = tl.maximum(count - 1, 1.0)
    root_s, root_t = tl.sqrt(squares_s / degrees), tl.sqrt(squares_t / degrees)
    scale_s, scale_t = _scale(mean_s), _scale(mean_t)
    to_s = tl.where((mean_s == 0) | (count < FEWEST), 0.0, 1.0 / (scale_s * root_s + 1e-8))
    to_t = tl.where((mean_t == 0) | (count < FEWEST), 0.0, 1.0 / (scale_t * root_t + 1e-8))
    is_none = root_s == 0
    shared = products / tl.where(is_none, 1.0, degrees * root_s) * scale_t
    along = to_s * scale_s * root_s - tl.where(is_none, 0.0, to_t * shared)
    return to_s, to_t, along


@triton.jit
def _statistics(
    student,
    teacher,
    mask,
    partial,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_MOMENTS: tl.constexpr,
):
    """Counts, and moments if asked for, of a tile: a column of ``partial`` ``[9, tiles]``."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    to = partial + tile + tl.zeros([1, 1], tl.int32)
    of_rows, _, _ = _largest(
        student, teacher, mask, row, num_rows, num_columns, 1, COLUMNS, IS_WHOLE
    )
    count, high_s, high_t = _largest(
        student, teacher, mask, row, num_rows, num_columns, None, COLUMNS, IS_WHOLE
    )
    if HAS_MOMENTS:
        mean_s, mean_t, squares_s, squares_t, products = _moments(
            student,
            teacher,
            mask,
            row,
            num_rows,
            num_columns,
            count,
            high_s,
            high_t,
            None,
            COLUMNS,
            IS_WHOLE,
        )
        tl.store(to + 2 * tiles, high_s)
        tl.store(to + 3 * tiles, mean_s)
        tl.store(to + 4 * tiles, squares_s)
        tl.store(to + 5 * tiles, high_t)
        tl.store(to + 6 * tiles, mean_t)
        tl.store(to + 7 * tiles, squares_t)
        tl.store(to + 8 * tiles, products)
    tl.store(to, count)
    tl.store(to + tiles, _sum((of_rows > 0).to(tl.float32), None))


@triton.jit
def _join(partial, matrix, tiles, full, HAS_MOMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Counts and moments of the matrix from those of its tiles."""
    counts, rows = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    high_s = tl.full([BLOCK], float("-inf"), tl.float32)
    high_t = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        n = tl.load(partial + tile, mask=tile < tiles, other=0.0)
        counts += n.to(tl.int64)
        rows += tl.load(partial + tiles + tile, mask=tile < tiles, other=0.0).to(tl.int64)
        if HAS_MOMENTS:
            of_s = tl.load(partial + 2 * tiles + tile, mask=tile < tiles, other=0.0)
            of_t = tl.load(partial + 5 * tiles + tile, mask=tile < tiles, other=0.0)
            high_s = tl.maximum(high_s, tl.where(n > 0, of_s, float("-inf")))
            high_t = tl.maximum(high_t, tl.where(n > 0, of_t, float("-inf")))
    count = tl.sum(counts)
    total = tl.maximum(count, 1).to(tl.float32)
    tl.store(matrix + COUNT, total)
    tl.store(matrix + ROWS_KEPT, tl.maximum(tl.sum(rows), 1).to(tl.float32))
    tl.store(matrix + IS_FULL, (count == full).to(tl.float32))
    if HAS_MOMENTS:
        has_any = count > 0
        pivot_s = tl.where(has_any, tl.max(high_s), 0.0)
        pivot_t = tl.where(has_any, tl.max(high_t), 0.0)
        sum_s, sum_t = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, tiles, BLOCK):
            n, s, t = _of_tiles(partial, tiles, start, pivot_s, pivot_t, BLOCK)
            sum_s += n * s
            sum_t += n * t
        mean_s, mean_t = tl.sum(sum_s) / total, tl.sum(sum_t) / total
        scale_s, scale_t = _scale(mean_s), _scale(mean_t)
        squares_s, squares_t = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for start in range(0, tiles, BLOCK):
            n, s, t = _of_tiles(partial, tiles, start, pivot_s, pivot_t, BLOCK)
            tile = start + tl.arange(0, BLOCK)
            own_s = tl.load(partial + 3 * tiles + tile, mask=tile < tiles, other=0.0)
            own_t = tl.load(partial + 6 * tiles + tile, mask=tile < tiles, other=0.0)
            own_s, own_t = _scale(own_s) / scale_s, _scale(own_t) / scale_t
            within_s = tl.load(partial + 4 * tiles + tile, mask=tile < tiles, other=0.0)
            within_t = tl.load(partial + 7 * tiles + tile, mask=tile < tiles, other=0.0)
            within = tl.load(partial + 8 * tiles + tile, mask=tile < tiles, other=0.0)
            s, t = (s - mean_s) / scale_s, (t - mean_t) / scale_t
            squares_s += within_s * own_s * own_s + n * s * s
            squares_t += within_t * own_t * own_t + n * t * t
            products += within * own_s * own_t + n * s * t
        n = count.to(tl.float32)
        to_s, to_t, along = _to_z(
            n, mean_s, mean_t, tl.sum(squares_s), tl.sum(squares_t), tl.sum(products), 2
        )
        tl.store(matrix + STUDENT, pivot_s)
        tl.store(matrix + STUDENT + 1, mean_s)
        tl.store(matrix + STUDENT + 2, to_s)
        tl.store(matrix + TEACHER, pivot_t)
        tl.store(matrix + TEACHER + 1, mean_t)
        tl.store(matrix + TEACHER + 2, to_t)
        tl.store(matrix + ALONG, along)


@triton.jit
def _of_tiles(partial, tiles, start, pivot_s, pivot_t, BLOCK: tl.constexpr):
    """Counts and means of some tiles, from the largest scores of the matrix."""
    tile = start + tl.arange(0, BLOCK)
    inside = tile < tiles
    n = tl.load(partial + tile, mask=inside, other=0.0)
    high_s = tl.load(partial + 2 * tiles + tile, mask=inside, other=0.0)
    high_t = tl.load(partial + 5 * tiles + tile, mask=inside, other=0.0)
    mean_s = tl.load(partial + 3 * tiles + tile, mask=inside, other=0.0)
    mean_t = tl.load(partial + 6 * tiles + tile, mask=inside, other=0.0)
    has_any = n > 0
    s = tl.where(has_any, (high_s - pivot_s) + mean_s, 0.0)
    t = tl.where(has_any, (high_t - pivot_t) + mean_t, 0.0)
    return n, s, t


@triton.jit
def _curvature(x):
    """``(exp(x) - 1 - x) / x^2`` between -1 and 1, as a polynomial that is off by 2e-7."""
    y = 2.5288434699e-05 * x + 2.0329041582e-04
    y = y * x + 1.3886447996e-03
    y = y * x + 8.3308862522e-03
    y = y * x + 4.1666697711e-02
    y = y * x + 1.6666696965e-01
    return y * x + 0.5


@triton.jit
def _distil(
    student,
    teacher,
    mask,
    temperature,
    matrix,
    sums,
    gradient,
    number,
    alpha_kl,
    alpha_mse,
    num_rows,
    num_columns,
    tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_KL: tl.constexpr,
    HAS_MSE: tl.constexpr,
    BY_ROW: tl.constexpr,
    IS_COUNTED: tl.constexpr,
    IS_LEARNED: tl.constexpr,
    IS_AGAIN: tl.constexpr,
):
    """Sums ``[5, tiles]`` of the terms and of the candidates, and the gradient of every score."""
    temp = number if temperature is None else tl.load(temperature)
    kept_rows, kept = num_rows * 1.0, (num_rows * 1.0) * num_columns
    last = tiles
    if IS_COUNTED:
        kept_rows, kept = tl.load(matrix + ROWS_KEPT), tl.load(matrix + COUNT)
    if IS_AGAIN:
        last = tl.where(tl.load(matrix + IS_FULL) == 1.0, 0, tiles)
    for turn in range(tl.program_id(0), last, tl.num_programs(0)):
        # What the pass before this one has read last may still be near.
        tile = tiles - 1 - turn
        row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        count, high_s, high_t = _largest(
            student, teacher, mask, row, num_rows, num_columns, 1, COLUMNS, IS_WHOLE
        )
        if HAS_KL:
            inverse = 1.0 / temp
            to_log2 = inverse * 1.4426950408889634
            sum_q, sum_p = tl.zeros_like(count), tl.zeros_like(count)
            for start in range(0, COLUMNS if IS_WHOLE else num_columns, COLUMNS):
                column = start + tl.arange(0, COLUMNS)[None, :]
                s, t, candidate = _load(student, teacher, mask, row, column, num_rows, num_columns)
                q = tl.exp2(_below(s, high_s, candidate) * to_log2)
                p = tl.exp2(_below(t, high_t, candidate) * to_log2)
                sum_q += _sum(tl.where(candidate, q, 0.0), 1)
                sum_p += _sum(tl.where(candidate, p, 0.0), 1)
            sum_q, sum_p = tl.where(count > 0, sum_q, 1.0), tl.where(count > 0, sum_p, 1.0)
            to_q, to_p = 1.0 / sum_q, 1.0 / sum_p
            # The logarithm of a ratio near 1 has digits that the difference of two has not.
            level = tl.log(sum_q / sum_p)
            weight = alpha_kl * temp / kept_rows
        if HAS_MSE:
            if BY_ROW:
                mean_s, mean_t, squares_s, squares_t, products = _moments(
                    student,
                    teacher,
                    mask,
                    row,
                    num_rows,
                    num_columns,
                    count,
                    high_s,
                    high_t,
                    1,
                    COLUMNS,
                    IS_WHOLE,
                )
                to_s, to_t, along = _to_z(count, mean_s, mean_t, squares_s, squares_t, products, 3)
            else:
                mean_s = tl.load(matrix + STUDENT + 1) - (high_s - tl.load(matrix + STUDENT))
                mean_t = tl.load(matrix + TEACHER + 1) - (high_t - tl.load(matrix + TEACHER))
                to_s, to_t = tl.load(matrix + STUDENT + 2), tl.load(matrix + TEACHER + 2)
                along = tl.load(matrix + ALONG)
            pull = 2.0 * alpha_mse * to_s / kept

        kl, squares = tl.zeros_like(count), tl.zeros_like(count)
        by_log_t, expected = tl.zeros_like(count), tl.zeros_like(count)
        for start in range(0, COLUMNS if IS_WHOLE else num_columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            s, t, candidate = _load(student, teacher, mask, row, column, num_rows, num_columns)
            below_s, below_t = _below(s, high_s, candidate), _below(t, high_t, candidate)
            slope = tl.zeros_like(below_s)
            if HAS_KL:
                q = tl.where(candidate, tl.exp2(below_s * to_log2), 0.0) * to_q
                p = tl.where(candidate, tl.exp2(below_t * to_log2), 0.0) * to_p
                x = (below_s - below_t) * inverse - level  # log(q / p)
                # The term p log(p / q) - p + q is p (exp(x) - 1 - x), and the gap q - p is it
                # plus p x: without this nearly equal numbers are subtracted.
                is_small = tl.abs(x) < 1.0
                product, gap = p * x, q - p
                term = tl.where(is_small, product * x * _curvature(x), gap - product)
                gap = tl.where(is_small, product + term, gap)
                slope += weight * gap
                if not IS_AGAIN:
                    kl += _sum(tl.where(candidate, term, 0.0), 1)
                if IS_LEARNED:
                    log_p = below_t * inverse
                    expected += _sum(tl.where(candidate, p * log_p, 0.0), 1)
                    by_log_t += _sum(tl.where(candidate, gap * x + log_p * term, 0.0), 1)
            if HAS_MSE:
                z_s = (below_s - mean_s) * to_s
                difference = tl.where(candidate, z_s - (below_t - mean_t) * to_t, 0.0)
                slope += pull * (difference - along * z_s)
                if not IS_AGAIN:
                    squares += _sum(difference * difference, 1)
            if gradient is not None:
                tl.store(
                    gradient + row * num_columns + column,
                    tl.where(candidate, slope, 0.0).to(gradient.dtype.element_ty),
                    mask=(row < num_rows) & (column < num_columns),
                    eviction_policy="evict_first",
                )
        if not IS_AGAIN:
            to = sums + tile + tl.zeros([1, 1], tl.int32)
            tl.store(to, _sum(count, None))
            tl.store(to + tiles, _sum((count > 0).to(tl.float32), None))
            if HAS_KL:
                tl.store(to + 2 * tiles, _sum(kl, None))
            if HAS_MSE:
                tl.store(to + 3 * tiles, _sum(squares, None))
            if IS_LEARNED:
                tl.store(to + 4 * tiles, _sum(by_log_t - expected * kl, None))


@triton.jit
def _total(
    sums,
    temperature,
    matrix,
    value,
    by_temperature,
    number,
    alpha_kl,
    alpha_mse,
    tiles,
    full,
    HAS_KL: tl.constexpr,
    HAS_MSE: tl.constexpr,
    IS_LEARNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The value and the derivative by the temperature, from the sums of the tiles."""
    temp = number if temperature is None else tl.load(temperature)
    counts, rows = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    kl, squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    by_log_t = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        inside = tile < tiles
        counts += tl.load(sums + tile, mask=inside, other=0.0).to(tl.int64)
        rows += tl.load(sums + tiles + tile, mask=inside, other=0.0).to(tl.int64)
        if HAS_KL:
            kl += tl.load(sums + 2 * tiles + tile, mask=inside, other=0.0)
        if HAS_MSE:
            squares += tl.load(sums + 3 * tiles + tile, mask=inside, other=0.0)
        if IS_LEARNED:
            by_log_t += tl.load(sums + 4 * tiles + tile, mask=inside, other=0.0)
    count = tl.sum(counts)
    kept, kept_rows = tl.maximum(count, 1).to(tl.float32), tl.maximum(tl.sum(rows), 1)
    weight = alpha_kl * temp / kept_rows.to(tl.float32)
    result = 0.0
    if HAS_KL:
        result += weight * temp * tl.sum(kl)
    if HAS_MSE:
        result += alpha_mse * (tl.sum(squares) / kept)
    tl.store(value, result)
    if IS_LEARNED:
        tl.store(by_temperature, weight * (2.0 * tl.sum(kl) - tl.sum(by_log_t)))
    tl.store(matrix + COUNT, kept)
    tl.store(matrix + ROWS_KEPT, kept_rows.to(tl.float32))
    tl.store(matrix + IS_FULL, (count == full).to(tl.float32))


@torch.library.custom_op("sparse_losses::distillation_value_and_gradients", mutates_args=())
def value_and_gradients(
    student: Tensor,
    temperature: Tensor | None,
    teacher: Tensor,
    mask: Tensor | None,
    number: float,
    alpha_kl: float,
    alpha_mse: float,
    by_row: bool,
    needs: list[bool],
) -> list[Tensor]:
    """The loss of scores ``[B, C]``, then its gradients by the student and by the temperature.

    The temperature is ``number`` unless it is a tensor, 0-d and fp32.
    """
    student, teacher = student.contiguous(), teacher.contiguous()
    mask = None if mask is None else mask.contiguous()
    num_rows, num_columns = student.shape
    is_whole = num_columns <= MOST_COLUMNS
    columns = next_power_of_2(num_columns) if is_whole else PIECE
    rows = max(TILE // columns, 1)
    tiles = triton.cdiv(num_rows, rows)
    scores = (student, teacher, mask)
    has_kl, has_mse = alpha_kl > 0, alpha_mse > 0
    is_learned = temperature is not None and needs[1]
    launch = {
        "ROWS": rows,
        "COLUMNS": columns,
        "IS_WHOLE": is_whole,
        "num_warps": max(rows * columns // PER_WARP, 1) if is_whole else PIECE_WARPS,
        "num_stages": 1,
        # What else a mask and a learned temperature keep would not fit.
        "maxnreg": REGISTERS if mask is None and not is_learned and rows == 1 else None,
    }
    terms = {"HAS_KL": has_kl, "HAS_MSE": has_mse}
    value = student.new_empty((), dtype=torch.float32)
    gradient = torch.empty_like(student, dtype=gradient_dtype(student)) if needs[0] else None
    by_temperature = torch.empty_like(value) if is_learned else None
    matrix = value.new_empty(SLOTS)
    sums = value.new_empty(5, tiles)
    full = num_rows * num_columns
    has_moments = has_mse and not by_row
    # A mask has gaps: then the counts come first, instead of a gradient that is written twice.
    is_counted = has_moments or (mask is not None and needs[0])
    with on_device(student):
        if is_counted:
            partial = value.new_empty(9, tiles)
            _statistics[(tiles,)](
                *scores, partial, num_rows, num_columns, HAS_MOMENTS=has_moments, **launch
            )
            _join[(1,)](partial, matrix, tiles, full, HAS_MOMENTS=has_moments, BLOCK=JOINED)

        def distil(programs: int, is_counted: bool, is_again: bool) -> None:
            _distil[(programs,)](
                *scores,
                temperature,
                matrix,
                sums,
                gradient,
                number,
                alpha_kl,
                alpha_mse,
                num_rows,
                num_columns,
                tiles,
                BY_ROW=by_row,
                IS_COUNTED=is_counted,
                IS_LEARNED=is_learned and has_kl and not is_again,
                IS_AGAIN=is_again,
                **terms,
                **launch,
            )

        distil(tiles, is_counted, False)
        _total[(1,)](
            sums,
            temperature,
            matrix,
            value,
            by_temperature,
            number,
            alpha_kl,
            alpha_mse,
            tiles,
            full,
            IS_LEARNED=is_learned and has_kl,
            BLOCK=JOINED,
            **terms,
        )
        if needs[0] and not is_counted:
            distil(min(tiles, PROGRAMS), True, True)
    if by_temperature is not None and not has_kl:
        by_temperature.zero_()
    nothing = [value.new_empty(0) for _ in range(2)]
    return [
        value,
        nothing[0] if gradient is None else gradient,
        nothing[1] if by_temperature is None else by_temperature,
    ]


@value_and_gradients.register_fake
def _(
    student: Tensor,
    temperature: Tensor | None,
    teacher: Tensor,
    mask: Tensor | None,
    number: float,
    alpha_kl: float,
    alpha_mse: float,
    by_row: bool,
    needs: list[bool],
) -> list[Tensor]:
    value = student.new_empty((), dtype=torch.float32)
    return [
        value,
        student.new_empty(student.shape, dtype=gradient_dtype(student))
        if needs[0]
        else value.new_empty(0),
        value.new_empty(() if temperature is not None and needs[1] else 0),
    ]


with_gradients(value_and_gradients, 2)


def fused(
    needs: Sequence[bool],
    student: Tensor,
    teacher: Tensor,
    temperature: Tensor | None,
    *,
    candidate_mask: Tensor | None,
    number: float,
    alpha_kl: float,
    alpha_mse: float,
    by_row: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """Value and gradients of the loss, for ``_core.fused.fuse``."""
    of_student, _, of_temperature = needs
    if temperature is None and torch.compiler.is_compiling():
        # An operator's number is a constant of the graph, which a schedule would compile anew.
        temperature = number * student.new_ones((), dtype=torch.float32)
        number = 1.0
    value, *found = value_and_gradients(
        student,
        temperature,
        teacher,
        candidate_mask,
        number,
        alpha_kl,
        alpha_mse,
        by_row,
        [of_student, of_temperature],
    )
    by_student, by_temperature = only([of_student, of_temperature], found)
    return value, [by_student, None, by_temperature]
