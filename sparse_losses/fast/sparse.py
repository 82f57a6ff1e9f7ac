"""CSR tensors, sums of bags, and products of CSR and dense matrices."""

import functools
import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core import products
from sparse_losses._core.entries import csr_tensor, entries_of, with_values

LARGEST = 1 << 26  # numbers in a dense block: 256 MB in fp32


def csr(row: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a sparse matrix of entries sorted by row."""
    _silence_the_beta_notice()
    crow = nnf.pad(torch.bincount(row, minlength=shape[0]).cumsum(0), (1, 0)).to(row.dtype)
    return csr_tensor(crow, column, values, shape)


@functools.cache
def _silence_the_beta_notice() -> None:
    # PyTorch warns once per process that CSR is in beta; here its use is an implementation detail.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1, device="cpu").to_sparse_csr()


def sum_bags(index: Tensor, table: Tensor, bounds: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return ``sum_k weight[k] * table[index[k]]`` for ``k`` in ``[bounds[i], bounds[i + 1])``."""
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


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b.T`` as a dense matrix; each may be CSR."""
    if a.layout == b.layout == torch.strided:
        return products.product(a, b.T)
    parts = [a @ columns for _, columns in _transposed_blocks(b)]
    parts = parts or [torch.zeros(len(a), 0, dtype=a.dtype, device=a.device)]
    return torch.cat(parts, dim=1)


def add_product(x: Tensor, total: Tensor | None, g: Tensor, b: Tensor) -> Tensor:
    """Return ``total + g @ b``, of a CSR ``x`` at its entries; may overwrite the total."""
    is_dense = x.layout == torch.strided
    if is_dense and b.layout == torch.strided:
        return products.add_product_(total, g, b)
    if total is None:
        total = torch.zeros_like(x) if is_dense else with_values(x, torch.zeros_like(x.values()))
    for rows, columns in _transposed_blocks(b):
        add = torch.addmm if is_dense else torch.sparse.sampled_addmm
        total = add(total, g[:, rows].contiguous(), columns.T)
    return total


def _transposed_blocks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield some rows at a time and these as columns ``[V, R]``; nothing waits for the device."""
    width = x.shape[1]
    size = max(LARGEST // max(width, 1), 1)
    for start in range(0, len(x), size):
        rows = slice(start, min(start + size, len(x)))
        if x.layout == torch.strided:
            yield rows, x[rows].T
            continue
        value, row, column = entries_of(x)
        count = rows.stop - start
        is_inside = (row >= start) & (row < rows.stop)
        # What is outside goes to a last place.
        place = torch.where(is_inside, column.long() * count + row - start, width * count)
        block = value.new_zeros(width * count + 1).scatter_(0, place, value)
        yield rows, block[:-1].view(width, count)
