"""All regularisers of a matrix of texts ``[B, V]`` in one read of it, their gradient in one write.

A program owns some columns of all rows. What FLOPS and the language penalty ask of a column is then
known before the gradient is written, and no row is ever reduced across programs: the language
penalty is a column's sum times its price, and binary cross-entropy needs nothing of its row but
weights that are known beforehand. Minimum activation does; for it the largest number of every few
columns is kept, in the blocks with the ``k`` largest of which the ``k`` largest numbers lie.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_losses.kernels._language import INTERPRETED, larger, next_power_of_2, on_device
from sparse_losses.kernels._operators import gradient_dtype, only, with_gradients

__all__ = ["regularisers"]

COLUMNS = 32  # of a program: as many as bits in a word of the targets; 128 bytes of fp32
ROWS = 64  # of a program at a time; it reads all twice, the second time from a cache
WARPS = 8  # 8 numbers a thread: at 45 to 80 registers three to five programs share an SM
WIDE = 1 << 31  # numbers from which their positions take 64 bits

# log(1 + e) / e for e in [0, 1], to 3e-8 of itself: one multiply-add a coefficient.
LOG1P = tl.constexpr(
    (
        5.232624243944883e-3,
        -2.9504956677556038e-2,
        7.822549343109131e-2,
        -1.366320699453354e-1,
        1.910598874092102e-1,
        -2.484297752380371e-1,
        3.331909477710724e-1,
        -4.999949336051941e-1,
        9.999999403953552e-1,
    )
)
LAST = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-(1 << 31))
LOWEST = tl.constexpr(-(1 << 63))


@triton.jit
def _exp2(x):
    """Without the care for subnormal numbers that is half of the work elsewhere."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _reciprocal(x):
    """Of ordinary numbers, to one unit in the last place: a third of a division."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _softplus_and_sigmoid(x):
    """``log(1 + exp(x))`` and its derivative, both to rounding however small they are."""
    e = _exp2(tl.abs(x) * -1.4426950408889634)
    log1p = tl.full(x.shape, LOG1P[0], tl.float32)
    for power in tl.static_range(1, 9):
        log1p = log1p * e + LOG1P[power]
    return tl.maximum(x, 0.0) + log1p * e, tl.where(x < 0, e, 1.0) * _reciprocal(1.0 + e)


@triton.jit
def _mark(
    ids_pointer,
    attended_pointer,
    ignored_pointer,
    num_ignored_pointer,
    words_pointer,
    shares_pointer,
    B,
    S,
    V,
    IGNORES: tl.constexpr,
    BALANCED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sets a row's targets as bits, ``[V / 32, B]``; what a target and another token count there.

    An atomic OR gives the same bits in any order, and as many of them are new: each id counts once.
    """
    row = tl.program_id(0)
    count = tl.full([], 0, tl.int32)
    for first in range(0, S, BLOCK):
        position = first + tl.arange(0, BLOCK)
        inside = position < S
        at = row.to(tl.int64) * S + position
        token = tl.load(ids_pointer + at, mask=inside, other=0)
        wanted = inside & (tl.load(attended_pointer + at, mask=inside, other=0) != 0)
        if IGNORES:
            wanted = wanted & (tl.load(ignored_pointer + token, mask=wanted, other=1) == 0)
        bit = tl.full([BLOCK], 1, tl.int32) << (token % 32).to(tl.int32)
        word = words_pointer + (token // 32) * B + row
        old = tl.atomic_or(word, bit, mask=wanted, sem="relaxed")
        count += tl.sum(tl.where(wanted & ((old & bit) == 0), 1, 0))
    kept = tl.full([], 0, tl.int32) + V
    if IGNORES:
        kept -= tl.load(num_ignored_pointer).to(tl.int32)
    share = 1.0 / tl.maximum(kept, 1).to(tl.float32)
    target_share = share
    if BALANCED:
        share = 0.5 / tl.maximum(kept - count, 1).to(tl.float32)
        target_share = 0.5 / tl.maximum(count, 1).to(tl.float32)
    tl.store(shares_pointer + row, share)
    tl.store(shares_pointer + B + row, target_share)


@triton.jit
def _columns(
    x_pointer,
    gradient_pointer,
    factors_pointer,
    idf_pointer,
    hidden_pointer,
    price_pointer,
    ignored_pointer,
    words_pointer,
    shares_pointer,
    maxima_pointer,
    sums_pointer,
    B,
    stride,
    flops_weight,
    price_weight,
    reconstruction_weight,
    beta,
    FLOPS: tl.constexpr,
    UNBIASED: tl.constexpr,
    IDF: tl.constexpr,
    HIDES: tl.constexpr,
    PRICED: tl.constexpr,
    RECONSTRUCTS: tl.constexpr,
    IGNORES: tl.constexpr,
    BALANCED: tl.constexpr,
    MAXIMA: tl.constexpr,
    GRADIENT: tl.constexpr,
    FACTORS: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums of the terms over a program's columns, the gradient there, and the rows' maxima.

    The gradient is that of the weighted sum, but for minimum activation's part of it.
    """
    block = tl.program_id(0)
    if FACTORS:
        flops_weight *= tl.load(factors_pointer)
        price_weight *= tl.load(factors_pointer + 2)
        reconstruction_weight *= tl.load(factors_pointer + 3)
    V = stride * ALIGNED  # told so: a row starts at such a multiple
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    in_v = column < V
    constant = tl.zeros([COLUMNS], tl.float32)  # a column's part of the gradient ...
    slope = tl.zeros([COLUMNS], tl.float32)  # ... and what it has beside for every x
    hidden = tl.zeros([COLUMNS], tl.int1)
    if HIDES:
        hidden = tl.load(hidden_pointer + column, mask=in_v, other=1) != 0
    if FLOPS or PRICED:
        totals = tl.zeros([ROWS, COLUMNS], tl.float32)
        squares = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, B, ROWS):
            row = first + tl.arange(0, ROWS)
            inside = (row < B)[:, None] & in_v[None, :]
            if WIDE:
                row = row.to(tl.int64)
            at = x_pointer + row[:, None] * V + column[None, :]
            x = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            totals += x
            if UNBIASED:
                squares += x * x
        total = tl.sum(totals, 0)
        if PRICED:
            price = tl.load(price_pointer + column, mask=in_v, other=0.0)
            tl.store(sums_pointer + tl.num_programs(0) + block, tl.sum(price * total, 0))
            constant += price_weight * price
        if FLOPS:
            mean = total / B
            square = mean * mean
            by_square = 2.0 / B * mean
            if UNBIASED:
                square = (total * total - tl.sum(squares, 0)) / (B * (B - 1.0))
                by_square = 2.0 / (B * (B - 1.0)) * total
                slope += -2.0 * flops_weight / (B * (B - 1.0))
            if IDF:
                idf = tl.load(idf_pointer + column, mask=in_v, other=1.0)
                sign = tl.where(mean > 0, 1.0, tl.where(mean < 0, -1.0, 0.0))
                square = idf * (tl.abs(mean) + beta * square)
                by_square = idf * (sign / B + beta * by_square)
                slope *= beta * idf
            constant += tl.where(hidden, 0.0, flops_weight * by_square)
            flops = tl.where(hidden | (in_v == 0), 0.0, square)
            tl.store(sums_pointer + block, tl.sum(flops, 0))

    if GRADIENT or MAXIMA or RECONSTRUCTS:
        if IGNORES:
            ignored = tl.load(ignored_pointer + column, mask=in_v, other=1) != 0
        if RECONSTRUCTS:
            share = tl.load(shares_pointer)  # of every token of every text, unless BALANCED
            reconstruction = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, B, ROWS):
            row = first + tl.arange(0, ROWS)
            in_b = row < B
            inside = in_b[:, None] & in_v[None, :]
            wide = row
            if WIDE:
                wide = row.to(tl.int64)
            at = wide[:, None] * V + column[None, :]
            gradient = tl.zeros([ROWS, COLUMNS], tl.float32) + constant[None, :]
            if (FLOPS and UNBIASED) or MAXIMA or RECONSTRUCTS:
                # Where there is nothing, -inf: never a maximum, and both functions below are 0.
                x = tl.load(
                    x_pointer + at, mask=inside, other=-float("inf"), eviction_policy="evict_first"
                ).to(tl.float32)
            if FLOPS and UNBIASED:
                if HIDES:  # a hidden NaN too
                    gradient += tl.where(hidden[None, :], 0.0, slope[None, :] * x)
                else:
                    gradient += slope[None, :] * x
            if MAXIMA:
                largest = tl.reduce(x, 1, larger)
                of_row = maxima_pointer + wide * tl.num_programs(0)
                tl.store(of_row + block, largest, mask=in_b)
            if RECONSTRUCTS:
                word = tl.load(words_pointer + block.to(tl.int64) * B + row, mask=in_b, other=0)
                flip = (word[:, None] << (31 - tl.arange(0, COLUMNS))[None, :]) & SIGN
                toward = (x.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)
                if IGNORES:
                    toward = tl.where(ignored[None, :], -float("inf"), toward)
                value, by_x = _softplus_and_sigmoid(toward)
                if BALANCED:
                    of_other = tl.load(shares_pointer + row, mask=in_b, other=0.0)
                    of_target = tl.load(shares_pointer + B + row, mask=in_b, other=0.0)
                    counts = tl.where(flip != 0, of_target[:, None], of_other[:, None])
                else:
                    counts = share
                reconstruction += counts * value
                by_x = ((counts * by_x).to(tl.int32, bitcast=True) ^ flip).to(
                    tl.float32, bitcast=True
                )
                gradient += reconstruction_weight * by_x
            if GRADIENT:
                gradient = gradient.to(gradient_pointer.dtype.element_ty)
                tl.store(gradient_pointer + at, gradient, mask=inside)
        if RECONSTRUCTS:
            of_block = tl.sum(tl.sum(reconstruction, 1), 0)
            tl.store(sums_pointer + 2 * tl.num_programs(0) + block, of_block)


@triton.jit
def _ranked(x, index):
    """Numbers that order as ``x`` does, NaN first, and among equals the smaller index first."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(x != x, LAST, bits ^ ((bits >> 31) & LAST))
    return (key.to(tl.int64) << 32) | (index ^ LAST).to(tl.int64)


@triton.jit
def _value_of(rank):
    key = (rank >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & LAST)).to(tl.float32, bitcast=True)


@triton.jit
def _index_of(rank):
    return (rank & LAST) ^ LAST


@triton.jit
def _rows(
    x_pointer,
    gradient_pointer,
    factors_pointer,
    counts_pointer,
    maxima_pointer,
    values_pointer,
    B,
    V,
    weight,
    threshold,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    COUNTS: tl.constexpr,
    MEAN: tl.constexpr,
    GRADIENT: tl.constexpr,
    FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Minimum activation of a row, already reduced, and what it adds to the gradient."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.cdiv(V, SPAN)
    group = tl.arange(0, GROUPS)
    maxima = tl.load(
        maxima_pointer + row * groups + group, mask=group < groups, other=-float("inf")
    )
    slot = tl.arange(0, SLOTS)
    chosen = tl.full([SLOTS], LAST, tl.int64)
    rank = tl.where(group < groups, _ranked(maxima, group), LOWEST)
    for turn in range(TOP_K):
        best = tl.max(rank, 0)
        chosen = tl.where((slot == turn) & (best != LOWEST), _index_of(best), chosen)
        rank = tl.where(rank == best, LOWEST, rank)

    column = chosen[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    inside = column < V
    x = tl.load(x_pointer + row * V + column, mask=inside, other=0.0).to(tl.float32)
    rank = tl.where(inside, _ranked(x, column), LOWEST)
    count = tl.full([], TOP_K, tl.int32)
    valid_rows = tl.full([], 0, tl.int32) + B
    if COUNTS:
        count = tl.minimum(tl.maximum(tl.load(counts_pointer + row), 0), TOP_K).to(tl.int32)
        if MEAN:
            valid_rows -= B
            for first in range(0, B, BLOCK):
                other = first + tl.arange(0, BLOCK)
                found = tl.load(counts_pointer + other, mask=other < B, other=0)
                valid_rows += tl.sum(tl.where(found > 0, 1, 0))
    total = tl.full([], 0.0, tl.float32)
    position = tl.zeros([SLOTS], tl.int64)
    for turn in range(TOP_K):
        best = tl.max(tl.max(rank, 1), 0)
        total += tl.where(turn < count, _value_of(best), 0.0)
        position = tl.where(slot == turn, _index_of(best), position)
        rank = tl.where(rank == best, LOWEST, rank)
    divisor = tl.maximum(count, 1).to(tl.float32)
    lack = threshold - total / divisor
    scale = 1.0
    if MEAN:
        scale = 1.0 / tl.maximum(valid_rows, 1).to(tl.float32)
    value = tl.where(count > 0, tl.where(lack <= 0, 0.0, lack), 0.0)  # a NaN stays
    tl.store(values_pointer + row, value * scale)
    if GRADIENT:
        if FACTORS:
            weight *= tl.load(factors_pointer + 1)
        at = gradient_pointer + row * V + position
        wanted = slot < tl.where(lack > 0, count, 0)
        gradient = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
        gradient -= weight * scale / divisor
        tl.store(at, gradient.to(gradient_pointer.dtype.element_ty), mask=wanted)


@triton.jit
def _sum(pointer, size, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        index = first + tl.arange(0, BLOCK)
        total += tl.load(pointer + index, mask=index < size, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _finish(
    sums_pointer,
    values_pointer,
    factors_pointer,
    terms_pointer,
    total_pointer,
    B,
    programs,
    flops_weight,
    least_weight,
    price_weight,
    reconstruction_weight,
    price_scale,
    reconstruction_scale,
    FLOPS: tl.constexpr,
    LEAST: tl.constexpr,
    PRICED: tl.constexpr,
    RECONSTRUCTS: tl.constexpr,
    FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The terms, and their weighted sum: added up by one program, so always in the same order."""
    if FACTORS:
        flops_weight *= tl.load(factors_pointer)
        least_weight *= tl.load(factors_pointer + 1)
        price_weight *= tl.load(factors_pointer + 2)
        reconstruction_weight *= tl.load(factors_pointer + 3)
    flops, least, price, reconstruction, total = 0.0, 0.0, 0.0, 0.0, 0.0
    if FLOPS:
        flops = _sum(sums_pointer, programs, BLOCK)
        total += flops_weight * flops
    if LEAST:
        least = _sum(values_pointer, B, BLOCK)
        total += least_weight * least
    if PRICED:
        price = price_scale * _sum(sums_pointer + programs, programs, BLOCK)
        total += price_weight * price
    if RECONSTRUCTS:
        reconstruction = _sum(sums_pointer + 2 * programs, programs, BLOCK) * reconstruction_scale
        total += reconstruction_weight * reconstruction
    tl.store(terms_pointer, flops)
    tl.store(terms_pointer + 1, least)
    tl.store(terms_pointer + 2, price)
    tl.store(terms_pointer + 3, reconstruction)
    tl.store(total_pointer, total)


@torch.library.custom_op("sparse_losses::regularisers", mutates_args=())
def _regularisers(
    x: Tensor,
    factors: Tensor | None,
    idf: Tensor | None,
    hidden: Tensor | None,
    price: Tensor | None,
    ids: Tensor | None,
    attended: Tensor | None,
    ignored: Tensor | None,
    counts: Tensor | None,
    needs_gradient: bool,
    weights: list[float],
    is_sum: list[bool],
    unbiased: bool,
    beta: float,
    top_k: int,
    threshold: float,
    balanced: bool,
) -> list[Tensor]:
    """``[weighted sum, its gradient by x, the terms]``; the terms are its gradient by the factors.

    A term whose weight is 0 is not computed.
    """
    flops_weight, least_weight, price_weight, reconstruction_weight = weights
    flops, least, priced, reconstructs = (weight != 0 for weight in weights)
    _, sums_least, sums_price, sums_reconstruction = is_sum
    num_rows, width = x.shape
    x = x.contiguous()
    gradient = x.new_empty(x.shape if needs_gradient else 0, dtype=gradient_dtype(x))
    aligned = _alignment(x)
    rows = min(next_power_of_2(num_rows), ROWS)
    programs = triton.cdiv(width, COLUMNS)
    sums = x.new_empty(3, programs, dtype=torch.float32)
    values = x.new_empty(num_rows, dtype=torch.float32)
    maxima = x.new_empty((num_rows, programs) if least else 0, dtype=torch.float32)
    terms, total = x.new_empty(4, dtype=torch.float32), x.new_empty((), dtype=torch.float32)
    price_scale = 1.0 if sums_price else 1 / num_rows
    reconstruction_scale = 1.0 if sums_reconstruction else 1 / num_rows
    idf, price = (None if each is None else each.float().contiguous() for each in (idf, price))
    hidden, ignored, attended = (
        None if each is None else each.contiguous().view(torch.uint8)
        for each in (hidden, ignored, attended)
    )
    factors = None if factors is None else factors.contiguous()
    words, shares = None, None
    with on_device(x):
        if reconstructs:
            assert ids is not None
            words = x.new_zeros(programs, num_rows, dtype=torch.int32)
            shares = x.new_empty(2, num_rows, dtype=torch.float32)
            _mark[(num_rows,)](
                ids.contiguous(),
                attended,
                ignored,
                None if ignored is None else ignored.sum(),
                words,
                shares,
                num_rows,
                ids.shape[1],
                width,
                IGNORES=ignored is not None,
                BALANCED=balanced,
                BLOCK=min(max(next_power_of_2(ids.shape[1]), 128), 1024),
            )
        _columns[(programs,)](
            x,
            gradient,
            factors,
            idf,
            hidden,
            price,
            ignored,
            words,
            shares,
            maxima,
            sums,
            num_rows,
            width // aligned,
            flops_weight,
            price_weight * price_scale,
            reconstruction_weight * reconstruction_scale,
            beta,
            FLOPS=flops,
            UNBIASED=unbiased,
            IDF=idf is not None,
            HIDES=hidden is not None,
            PRICED=priced,
            RECONSTRUCTS=reconstructs,
            IGNORES=ignored is not None,
            BALANCED=balanced,
            MAXIMA=least,
            GRADIENT=needs_gradient,
            FACTORS=factors is not None,
            WIDE=num_rows * width >= WIDE,
            ALIGNED=aligned,
            ROWS=rows,
            COLUMNS=COLUMNS,
            num_warps=max(WARPS * rows // ROWS, 1),
        )
        if least:
            groups = next_power_of_2(programs)
            _rows[(num_rows,)](
                x,
                gradient,
                factors,
                counts,
                maxima,
                values,
                num_rows,
                width,
                least_weight,
                threshold,
                TOP_K=top_k,
                SLOTS=next_power_of_2(top_k),
                GROUPS=groups,
                SPAN=COLUMNS,
                COUNTS=counts is not None,
                MEAN=not sums_least,
                GRADIENT=needs_gradient,
                FACTORS=factors is not None,
                BLOCK=1024,
                num_warps=min(max(groups // 1024, 4), 16),
            )
        _finish[(1,)](
            sums,
            values,
            factors,
            terms,
            total,
            num_rows,
            programs,
            *weights,
            price_scale,
            reconstruction_scale,
            FLOPS=flops,
            LEAST=least,
            PRICED=priced,
            RECONSTRUCTS=reconstructs,
            FACTORS=factors is not None,
            BLOCK=min(max(next_power_of_2(programs), 1024), 8192),
            num_warps=8,
        )
    return [total, gradient, terms]


@_regularisers.register_fake
def _(x, factors, idf, hidden, price, ids, attended, ignored, counts, needs_gradient, *options):
    return [
        x.new_empty((), dtype=torch.float32),
        x.new_empty(x.shape if needs_gradient else 0, dtype=gradient_dtype(x)),
        x.new_empty(4, dtype=torch.float32),
    ]


with_gradients(_regularisers, 2)


def _alignment(x: Tensor) -> int:
    """Numbers that may be read at once in every row, up to 16 bytes.

    Rows of 250,002 numbers start at multiples of two of them, which Triton does not see by itself.
    """
    most = 16 // x.element_size()
    return next(n for n in (8, 4, 2, 1) if n <= most and x.shape[1] % n == 0)


def regularisers(
    needs: Sequence[bool],
    x: Tensor,
    factors: Tensor | None,
    *,
    weights: Sequence[float],
    is_sum: Sequence[bool],
    idf: Tensor | None = None,
    beta: float = 1.0,
    unbiased: bool = False,
    hidden: Tensor | None = None,
    counts: Tensor | None = None,
    top_k: int = 1,
    threshold: float = 0.0,
    price: Tensor | None = None,
    ids: Tensor | None = None,
    attended: Tensor | None = None,
    ignored: Tensor | None = None,
    balanced: bool = False,
) -> tuple[Tensor, list[Tensor | None], Sequence[Tensor]]:
    """The weighted sum of up to four terms, its gradients by ``x`` and ``factors``, and the terms.

    The terms ``[4]`` are FLOPS, minimum activation, language penalty and self-reconstruction. The
    sum is over ``weights * factors * terms``; a factor may ask for a gradient where its weight is
    1, a term of weight 0 is not computed. Of equal activations the one of the smallest id is among
    the ``top_k``.
    """
    total, *gradients, terms = _regularisers(
        x,
        factors,
        idf,
        hidden,
        price,
        ids,
        attended,
        ignored,
        counts,
        needs[0],
        list(weights),
        list(is_sum),
        unbiased,
        beta,
        top_k,
        threshold,
        balanced,
    )
    # Gradients are scaled in place: those by the factors are not the terms themselves.
    of_factors = terms.detach().clone() if needs[1] else terms
    return total, only(needs, [*gradients, of_factors]), terms.detach().unbind()
