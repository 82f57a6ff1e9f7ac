"""Matrix products over non-zeros only: sums of bags on a CPU, tiles of columns elsewhere."""

import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.entries import entries_of


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
        value, row, column = entries_of(x)
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


def sums_bags(x: NonZeros) -> bool:
    """Whether products are sums over bags of rows, which only a CPU does fast."""
    return x.value.is_cpu


def dense_tile(x: NonZeros, start: int, stop: int) -> Tensor:
    """Return some columns of the matrix, ``[R, stop - start]``; nothing waits for the device."""
    rows, width = x.shape[0], stop - start
    is_inside = (x.column >= start) & (x.column < stop)
    # What is outside goes to a last place.
    place = torch.where(is_inside, x.row * width + x.column - start, rows * width)
    return x.value.new_zeros(rows * width + 1).scatter_(0, place, x.value)[:-1].view(rows, width)


def product(a: NonZeros, b: NonZeros) -> Tensor:
    """Return ``a @ b.T`` as a dense matrix."""
    rows, columns = a.shape[0], b.shape[0]
    total = a.value.new_zeros(rows, columns)
    width = _tile_width(a, b)
    if not sums_bags(a):
        for start, stop in _bounds(a.shape[1], width):
            total.addmm_(dense_tile(a, start, stop), dense_tile(b, start, stop).T)
        return total
    for (start, stop, x), (_, _, y) in zip(
        column_tiles(a, width), column_tiles(b, width), strict=True
    ):
        table = total.new_zeros(stop - start, columns)
        table[y.column, y.row] = y.value
        order = x.row.argsort(stable=True)
        total += sum_bags(x.column[order], table, bounds_of(x.row, rows), x.value[order])
    return total


def products_by_columns(
    terms: list[tuple[Tensor, NonZeros]], at: NonZeros
) -> Iterator[tuple[int, int, Tensor, Tensor | slice]]:
    """Yield start, stop and the sum of ``(g @ b).T [T, R]`` of some columns at a time.

    The last part tells which of the entries of ``at`` lie in these columns.
    """
    width, first = _tile_width(at, *(b for _, b in terms)), 0
    if not sums_bags(at):
        for start, stop in _bounds(at.shape[1], width):
            tile = _total(g @ dense_tile(b, start, stop) for g, b in terms)
            yield start, stop, tile.T, (at.column >= start) & (at.column < stop)
        return
    tables = [g.T.contiguous() for g, _ in terms]
    for parts in zip(*(column_tiles(b, width) for _, b in terms), strict=True):
        (start, stop, _), *_ = parts
        tile = _total(
            sum_bags(y.row, table, bounds_of(y.column, stop - start), y.value)
            for table, (_, _, y) in zip(tables, parts, strict=True)
        )
        last = int(torch.searchsorted(at.column, stop))
        yield start, stop, tile, slice(first, last)
        first = last


def read_tile(out: Tensor, at: NonZeros, tile: Tensor, start: int, here: Tensor | slice) -> None:
    """Write the values of a tile ``[T, R]`` at the entries that lie in it."""
    if isinstance(here, slice):
        out[here] = tile[at.column[here] - start, at.row[here]]
    else:
        found = tile[(at.column - start).clamp(0, len(tile) - 1), at.row]
        out.copy_(torch.where(here, found, out))


def _total(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def _bounds(size: int, width: int) -> list[tuple[int, int]]:
    return [(start, min(start + width, size)) for start in range(0, size, width)]


def _tile_width(*matrices: NonZeros) -> int:
    """Return the columns of a tile: of 4 MB on a CPU, for its cache, of 256 MB elsewhere."""
    if sums_bags(matrices[0]):
        return max((1 << 20) // max(matrices[-1].shape[0], 1), 64)
    return max((1 << 26) // max(x.shape[0] for x in matrices), 64)
