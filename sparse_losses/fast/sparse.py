"""Matrix products over non-zeros only."""

import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor


def bounds_of(index: Tensor, size: int) -> Tensor:
    """Return the start of each of ``size`` values in the sorted ``index``, and the end."""
    return nnf.pad(torch.bincount(index, minlength=size).cumsum(0), (1, 0)).to(index.dtype)


def csr(row: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a sparse matrix of entries sorted by row."""
    _silence_the_beta_notice()
    return torch.sparse_csr_tensor(
        bounds_of(row, shape[0]),
        column,
        values,
        shape,
        device=values.device,  # not the default one
        check_invariants=False,
    )


@functools.cache
def _silence_the_beta_notice() -> None:
    # PyTorch warns once per process that CSR is in beta; here its use is an implementation detail.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1, device="cpu").to_sparse_csr()


def sum_bags(index: Tensor, table: Tensor, bounds: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return ``sum_k weight[k] * table[index[k]]`` for ``k`` in ``[bounds[i], bounds[i + 1])``.

    One thread sums each bag in order, so the result is deterministic.
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
    """The non-zeros of ``[R, V]``, sorted by column; ``original`` is their index by row."""

    row: Tensor
    column: Tensor
    value: Tensor
    original: Tensor
    shape: tuple[int, int]


def non_zeros(x: Tensor) -> NonZeros:
    """Return the non-zeros of a dense matrix, or the stored entries of a CSR matrix."""
    if x.layout == torch.sparse_csr:
        crow, column, value = x.crow_indices(), x.col_indices(), x.values()
        row = torch.arange(x.shape[0], device=x.device).repeat_interleave(crow.diff())
    else:
        row, column = x.nonzero(as_tuple=True)
        value = x[row, column]
    original = column.int().argsort(stable=True)
    shape = (x.shape[0], x.shape[1])
    return NonZeros(row[original], column[original], value[original], original, shape)


def column_tiles(x: NonZeros, width: int) -> Iterator[tuple[int, int, NonZeros]]:
    """Yield start, stop and non-zeros of ``width`` columns at a time."""
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
    """Return ``a @ b.T`` as a dense matrix."""
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
    """Yield start, stop and ``(g @ b).T [T, R]`` of some columns at a time, for a dense ``g``."""
    table = g.T.contiguous()
    for start, stop, y in column_tiles(b, _tile_width(g.shape[0])):
        yield start, stop, sum_bags(y.row, table, bounds_of(y.column, stop - start), y.value)


def _tile_width(rows: int) -> int:
    # A tile of 4 MB stays in the cache during the sum.
    return max((1 << 20) // max(rows, 1), 64)
