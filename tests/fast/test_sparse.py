"""Products over non-zeros, step by step, against dense matrices.

Reaches into fast/: the head, pooling, the encoder and InfoNCE share these functions.
"""

import subprocess
import sys

import pytest
import torch

from sparse_losses.fast.sparse import (
    non_zeros,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def some(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return x * (torch.rand(rows, columns, generator=generator) < 0.2)


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
