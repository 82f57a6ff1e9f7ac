"""Products that touch only the non-zeros."""

import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

__all__ = [
    "NonZeros",
    "bounds_of",
    "column_tiles",
    "csr",
    "non_zeros",
    "product",
    "product_by_columns",
    "sum_bags",
]


def bounds_of(index: Tensor, size: int) -> Tensor:
    """Where each of ``size`` values starts in the sorted ``index``, and the end."""
    return nnf.pad(torch.bincount(index, minlength=size).cumsum(0), (1, 0)).to(index.dtype)


def csr(row: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A sparse matrix from entries sorted by row."""
    _silence_the_beta_notice()
    return torch.sparse_csr_tensor(
        bounds_of(row, shape[0]), column, values, shape, check_invariants=False
    )


@functools.cache
def _silence_the_beta_notice() -> None:
    # PyTorch says once a process that CSR tensors are in beta; our users did not ask for one.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zero = torch.zeros(1, dtype=torch.int64)
        torch.sparse_csr_tensor(zero, zero[:0], torch.zeros(0), (0, 0))


def sum_bags(index: Tensor, table: Tensor, bounds: Tensor, weight: Tensor | None = None) -> Tensor:
    """``sum_k weight[k] * table[index[k]]`` over the bags ``k`` in ``[bounds[i], bounds[i + 1])``.

    Each bag is summed by one thread in order, so to the same bits.
    """
    if index.numel() == 0:
        return table.new_zeros(bounds.shape[0] - 1, table.shape[1])
    return nnf.embedding_bag(
        index,
        table.contiguous(),
        bounds,
        mode="sum",
        per_sample_weights=weight,
        include_last_offset=True,
    )


class NonZeros(NamedTuple):
    """The non-zeros of a matrix ``[R, V]``, by column; ``original`` is where each stood by row."""

    row: Tensor
    column: Tensor
    value: Tensor
    original: Tensor
    shape: tuple[int, int]


def non_zeros(x: Tensor) -> NonZeros:
    """The non-zeros of a dense matrix, or what a CSR matrix stores."""
    if x.layout == torch.sparse_csr:
        crow, column, value = x.crow_indices(), x.col_indices(), x.values()
        row = torch.arange(x.shape[0], device=x.device).repeat_interleave(crow.diff())
    else:
        flat = x.reshape(-1)
        where = _nonzero_of(flat)
        row = where // max(x.shape[1], 1)
        column, value = where - row * x.shape[1], flat[where]
    original = column.int().argsort(stable=True)
    shape = (x.shape[0], x.shape[1])
    return NonZeros(row[original], column[original], value[original], original, shape)


def _nonzero_of(flat: Tensor) -> Tensor:
    """``flat.nonzero()``, looking at two numbers at a time: twice as fast where few are not 0."""
    wide = {4: torch.int64, 2: torch.int32}.get(flat.element_size())
    odd = flat.numel() % 2 or flat.storage_offset() % 2 or not flat.is_contiguous()
    if wide is None or odd:
        return flat.nonzero()[:, 0]
    pair = 2 * flat.view(wide).nonzero()[:, 0]
    where = torch.stack([pair, pair + 1], dim=1).reshape(-1)
    return where[flat[where] != 0]


def column_tiles(x: NonZeros, width: int) -> Iterator[tuple[int, int, NonZeros]]:
    """The non-zeros of ``width`` columns at a time, with the first column and the one after."""
    starts = torch.arange(0, x.shape[1], width, device=x.column.device)
    ends = [*torch.searchsorted(x.column, starts).tolist(), x.column.numel()]
    for number, (first, last) in enumerate(itertools.pairwise(ends)):
        start = number * width
        stop = min(start + width, x.shape[1])
        row, column, value, original = (t[first:last] for t in x[:4])
        yield (
            start,
            stop,
            NonZeros(row, column - start, value, original, (x.shape[0], stop - start)),
        )


def product(a: NonZeros, b: NonZeros) -> Tensor:
    """``a @ b.T``, dense."""
    rows, columns = a.shape[0], b.shape[0]
    total = a.value.new_zeros(rows, columns)
    width = _tile_width(columns)
    for (start, stop, x), (_, _, y) in zip(
        column_tiles(a, width), column_tiles(b, width), strict=True
    ):
        table = total.new_zeros(stop - start, columns)
        table[y.column, y.row] = y.value
        order = x.row.argsort(stable=True)
        total += sum_bags(x.column[order], table, bounds_of(x.row, rows), x.value[order])
    return total


def product_by_columns(g: Tensor, b: NonZeros) -> Iterator[tuple[int, int, Tensor]]:
    """``(g @ b).T`` for a dense ``g``, some columns at a time: first, one after, ``[T, R]``."""
    table = g.T.contiguous()
    for start, stop, y in column_tiles(b, _tile_width(g.shape[0])):
        yield start, stop, sum_bags(y.row, table, bounds_of(y.column, stop - start), y.value)


def _tile_width(rows: int) -> int:
    # A tile of four million bytes stays in the cache while it is summed up.
    return max((1 << 20) // max(rows, 1), 64)
