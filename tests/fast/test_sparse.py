"""Products over non-zeros, step by step, against dense matrices.

Reaches into fast/: the head, pooling, the encoder and InfoNCE share these functions.
"""

import subprocess
import sys

import pytest
import torch

from sparse_losses.fast.sparse import (
    bounds_of,
    csr,
    non_zeros,
    product,
    product_by_columns,
    sum_bags,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
X = torch.tensor([[0.0, 2.0, 0.0, -3.0, 0.0], [1.0, 5.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0, 6.0]])


def some(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return x * (torch.rand(rows, columns, generator=generator) < 0.2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_bounds_are_where_each_value_begins_and_the_end(dtype):
    index = torch.tensor([0, 0, 2], dtype=dtype)
    result = bounds_of(index, 4)
    assert (result.dtype, result.tolist()) == (dtype, [0, 2, 2, 3, 3])
    assert bounds_of(index[:0], 2).tolist() == [0, 0, 0]


def test_entries_by_row_are_a_csr_matrix():
    row, column = X.nonzero().unbind(1)
    result = csr(row, column, X[row, column], (3, 5))
    assert result.layout == torch.sparse_csr
    assert result.crow_indices().tolist() == [0, 2, 4, 6]
    assert torch.equal(result.to_dense(), X)


def test_pytorchs_notice_of_csr_is_not_for_users():
    """PyTorch shows the notice for the first CSR tensor of a process."""
    code = """
import torch, warnings
from sparse_losses.fast.sparse import _silence_the_beta_notice, csr
_silence_the_beta_notice.cache_clear()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    csr(torch.tensor([0]), torch.tensor([0]), torch.ones(1), (1, 1))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    exec(code)  # a trace of lines sees this process only


def test_bags_are_sums_of_weighted_rows_of_a_table():
    table = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    index, bounds = torch.tensor([2, 0, 1]), torch.tensor([0, 2, 2, 3])
    assert sum_bags(index, table, bounds).tolist() == [[5, 50], [0, 0], [2, 20]]
    weight = torch.tensor([1.0, -1.0, 3.0])
    assert sum_bags(index, table, bounds, weight).tolist() == [[3, 30], [0, 0], [6, 60]]
    assert sum_bags(index, table.T.contiguous().T, bounds).tolist() == [[5, 50], [0, 0], [2, 20]]
    nothing = sum_bags(index[:0], table, torch.tensor([0, 0, 0]))
    assert (nothing.shape, nothing.any()) == ((2, 2), False)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("stored", ["dense", "csr"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_zeros_are_sorted_by_column_then_row_and_know_their_place_by_row(stored, dtype):
    x = X.to(dtype)
    result = non_zeros(x if stored == "dense" else x.to_sparse_csr())
    assert result.column.tolist() == [0, 1, 1, 3, 3, 4]
    assert result.row.tolist() == [1, 0, 1, 0, 2, 2]
    assert result.value.tolist() == [1, 2, 5, -3, 4, 6]
    assert result.original.tolist() == [2, 0, 3, 1, 4, 5]
    assert (result.value.dtype, result.shape) == (dtype, (3, 5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5, 6])
def test_non_zeros_of_any_piece_of_memory(dtype, width):
    whole = some(9, 2 * width).to(dtype)
    pieces = (
        whole,
        whole[1:],
        whole[2:5],
        whole[:, :width],
        whole[:, 1 : 1 + width],
        whole.T,
        whole[:, 3:4],
    )
    pieces += whole[:8, 4:5], whole[:0], whole[:, :0], -0.0 * whole
    for start in (1, 2, 3):
        pieces += (whole.view(-1)[start : start + 60].view(-1, 2),)
    for piece in pieces:
        result = non_zeros(piece)
        dense = torch.zeros(piece.shape, dtype=dtype)
        dense[result.row, result.column] = result.value
        assert torch.equal(dense, piece)
        assert result.value.all()
        row, column = piece.nonzero().unbind(1)
        assert torch.equal(row[result.original], result.row)
        assert torch.equal(column[result.original], result.column)


def test_a_nan_is_not_zero():
    x = X.clone()
    x[0, 0] = torch.nan
    assert non_zeros(x).value.isnan().sum() == 1


@pytest.mark.parametrize(("rows", "others", "columns"), [(3, 4, 5), (2, 20_000, 200), (4, 3, 0)])
def test_products_are_those_of_the_dense_matrices(rows, others, columns):
    """Of 20,000 rows a tile has 64 columns."""
    a, b = some(rows, columns), some(others, columns, seed=1)
    torch.testing.assert_close(product(non_zeros(a), non_zeros(b)), a @ b.T)
    g = some(others, rows, seed=2)
    parts = list(product_by_columns(g.T, non_zeros(b)))
    widest = max((stop - start for start, stop, _ in parts), default=0)
    assert widest == min(columns, 64 if rows > 16384 else columns)
    for start, stop, part in parts:
        torch.testing.assert_close(part, (g.T @ b[:, start:stop]).T)
