"""Sums and maxima over the labels of multi-hot rows, without a tensor of rows by rows by labels."""

import functools

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses.fast.sparse import bounds_of, sum_bags

__all__ = ["LabelLists", "largest_of_labels"]

# Powers of four from this one down to its inverse are normal numbers, and so are their sums.
TOP_POWER = {torch.float32: 63, torch.float64: 511}


class LabelLists:
    """The labels of ``[N, L]`` 0/1 rows. For the CPU: how many there are decides shapes."""

    def __init__(self, *labels: Tensor) -> None:
        """Reads the rows of each tensor ``[N_k, L]`` in turn."""
        self.size, self.num_labels = sum(map(len, labels)), labels[0].shape[1]
        found, start = [], 0
        for rows in labels:
            entries = (rows if rows.dtype == torch.bool else rows != 0).nonzero().int()
            found.append((entries[:, 0] + start, entries[:, 1]))
            start += len(rows)
        self._row, self._label = (torch.cat(part) for part in zip(*found, strict=True))
        self.count = torch.bincount(self._row, minlength=self.size)
        self._row_bounds = bounds_of(self._row, self.size)
        self._row_by_label = self._row[self._label.argsort(stable=True)]
        self._label_bounds = bounds_of(self._label, self.num_labels)

    def sums(self, table: Tensor) -> Tensor:
        """``labels [N, L] @ table [L, M]``."""
        return sum_bags(self._label, table, self._row_bounds)

    def sums_by_label(self, table: Tensor) -> Tensor:
        """``labels.T [L, N] @ table [N, M]``."""
        return sum_bags(self._row_by_label, table, self._label_bounds)

    def largest(self, table: Tensor) -> Tensor:
        """Largest value of ``table [L, M]``, at least 0, among the labels of each row."""
        # `embedding_bag` with mode="max" takes a hundred times as long as a sum.
        largest = table.new_zeros(self.size, table.shape[1])
        for row, label in self._in_turn:
            best = table.index_select(0, label)
            torch.maximum(best, largest.index_select(0, row), out=best)
            largest.index_copy_(0, row, best)
        return largest

    @functools.cached_property
    def _in_turn(self) -> list[tuple[Tensor, Tensor]]:
        """Rows and their first labels, rows and their second ones: no row comes twice in a turn."""
        turn = torch.arange(len(self._row)) - self._row_bounds[self._row]
        order, sizes = turn.argsort(stable=True), torch.bincount(turn).tolist()
        parts = (torch.split(x[order].long(), sizes) for x in (self._row, self._label))
        return list(zip(*parts, strict=True))


def largest_of_labels(values: Tensor, labels: Tensor) -> Tensor:
    """Largest of ``values [M, L]``, at least 0, among the labels of each row of ``[N, L]``.

    A product in place of ``[M, N, L]``: labels stand for powers of four by the rank of their value.
    Of a sum of powers the logarithm knows the largest, as all smaller ones add up to a third of it.
    In blocks of as many labels as there are powers.
    """
    top = TOP_POWER[values.dtype]
    blocks = []
    parts = torch.split(values, 2 * top, dim=-1), torch.split(labels, 2 * top, dim=-1)
    for some, hot in zip(*parts, strict=True):
        by_rank, order = some.sort(dim=-1, descending=True)
        none = by_rank.shape[-1]  # the rank of no label at all: a value of 0
        exponents = top - torch.arange(none, device=values.device)
        powers = torch.exp2(2 * exponents.to(values.dtype)).expand(some.shape)
        by_label = torch.zeros_like(some).scatter(-1, order, powers)
        rank = (by_label @ hot.T).log2_().mul_(-0.5).add_(top + 0.5)
        rank = rank.nan_to_num_(none, none).clamp(0, none).long()
        blocks.append(nnf.pad(by_rank, (0, 1)).gather(-1, rank))
    return functools.reduce(torch.maximum, blocks).clamp(min=0)
