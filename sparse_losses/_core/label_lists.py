"""Multi-hot labels as lists: products and maxima that touch no zero."""

import functools

import torch
import torch.nn.functional as nnf
from torch import Tensor

__all__ = ["LabelLists"]


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
        self._row_bounds = _bounds(self.count)
        self._row_by_label = self._row[self._label.argsort(stable=True)]
        self._label_bounds = _bounds(torch.bincount(self._label, minlength=self.num_labels))

    def sums(self, table: Tensor) -> Tensor:
        """``labels [N, L] @ table [L, M]``."""
        return _sum_bags(self._label, self._row_bounds, table)

    def sums_by_label(self, table: Tensor) -> Tensor:
        """``labels.T [L, N] @ table [N, M]``."""
        return _sum_bags(self._row_by_label, self._label_bounds, table)

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


def _bounds(count: Tensor) -> Tensor:
    """Where each of consecutive lists starts, and the end."""
    return nnf.pad(count.cumsum(0), (1, 0)).int()


def _sum_bags(index: Tensor, bounds: Tensor, table: Tensor) -> Tensor:
    if len(index) == 0:
        return table.new_zeros(len(bounds) - 1, table.shape[1])
    return nnf.embedding_bag(
        index, table.contiguous(), bounds, mode="sum", include_last_offset=True
    )
