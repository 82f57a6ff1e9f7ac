"""The entries of a CSR tensor, with their gradient, and those of all ranks."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses.distributed import gather_rows, num_ranks, scatter_sum


class Entries(NamedTuple):
    """Values, which have the tensor's graph, with their rows and columns."""

    value: Tensor
    row: Tensor
    column: Tensor

    def sum_columns(self, size: int, value: Tensor | None = None) -> Tensor:
        """Return the sums ``[V]`` of the values, or of others in their place, by column."""
        value = self.value if value is None else value
        return value.new_zeros(size).index_add(0, self.column, value)

    def sum_rows(self, size: int, value: Tensor | None = None) -> Tensor:
        """Return the sums ``[B]`` of the values, or of others in their place, by row."""
        value = self.value if value is None else value
        return value.new_zeros(size).index_add(0, self.row, value)


def entries_of(x: Tensor) -> Entries:
    """Return the entries of a CSR tensor; nothing waits for an accelerator."""
    value, rows = x.values(), torch.arange(len(x), device=x.device)
    row = rows.repeat_interleave(x.crow_indices().diff(), output_size=len(value))
    return Entries(value, row, x.col_indices())


def csr_tensor(crow: Tensor, column: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a CSR tensor where its values are, whatever the default device."""
    return torch.sparse_csr_tensor(
        crow, column, values, shape, device=values.device, check_invariants=False
    )


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """Return a CSR tensor with the pattern of ``x``."""
    return csr_tensor(x.crow_indices(), x.col_indices(), values, x.shape)


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of matrices, dense or CSR, one after the other."""
    if parts[0].layout == torch.strided:
        return torch.cat([*parts])
    crow = torch.cat([x.crow_indices().diff() for x in parts]).cumsum(0)
    crow = nnf.pad(crow, (1, 0)).to(parts[0].crow_indices().dtype)
    column = torch.cat([x.col_indices() for x in parts])
    values = torch.cat([x.values() for x in parts])
    return csr_tensor(crow, column, values, (len(crow) - 1, parts[0].shape[1]))


def values_at(x: Tensor, columns: Tensor) -> Tensor:
    """Return the values of ``x [B, V]``, CSR, at ``columns [B, S]``, 0 where there is no entry."""
    value, row, column = entries_of(x)
    if len(value) == 0:
        return columns * value.sum()
    number = row * x.shape[1] + column.long()
    wanted = torch.arange(len(x), device=x.device)[:, None] * x.shape[1] + columns
    place = torch.searchsorted(number, wanted).clamp(max=len(value) - 1)
    return torch.where(number[place] == wanted, value[place], 0.0)


def largest_of_rows(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest values of each row of ``x [B, V]``, CSR and >= 0, and columns."""
    value, row, column = entries_of(x)
    order = value.detach().argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]  # by row, the largest first
    rank = torch.arange(len(value), device=x.device) - x.crow_indices()[:-1].long()[row]
    place = torch.where(rank < k, row * k + rank, len(x) * k)  # the last place is for the others
    size, parts = len(x) * k + 1, (value[order], column[order])
    values, columns = (part.new_zeros(size).index_put((place,), part) for part in parts)
    return values[:-1].view(-1, k), columns[:-1].view(-1, k)


def gather_matrix(x: Tensor, gather: bool) -> Tensor:
    """Return the rows of all ranks; of a CSR matrix entries are sent, as many as the most."""
    if x.layout == torch.strided or not gather or num_ranks() == 1:
        return gather_rows(x, gather)
    counts = gather_rows(x.crow_indices().diff())
    sizes = counts.view(num_ranks(), -1).sum(1).tolist()

    def gathered(own: Tensor) -> Tensor:
        padded = nnf.pad(own, (0, max(sizes) - len(own)))
        parts = torch.split(gather_rows(padded), max(sizes) or 1)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=False)] or [own])

    crow = nnf.pad(counts.cumsum(0), (1, 0)).to(x.crow_indices().dtype)
    shape = (len(counts), x.shape[1])
    column, value = gathered(x.col_indices()), gathered(x.values())
    return csr_tensor(crow, column, value, shape)


def scatter_matrix(gradient: Tensor, own: Tensor) -> Tensor:
    """Return this rank's rows of the sum over ranks of a gradient of ``gather_matrix``."""
    if gradient.layout == torch.strided:
        return scatter_sum(gradient)
    ends = gradient.crow_indices()[len(own) :: len(own)].tolist()
    sizes = [end - start for start, end in itertools.pairwise([0, *ends])]
    padded = [nnf.pad(x, (0, max(sizes) - len(x))) for x in torch.split(gradient.values(), sizes)]
    value = scatter_sum(torch.cat(padded))[: len(own.values())]
    return with_values(own, value)
