"""Sums and maxima over the labels of multi-hot rows, without a tensor of rows by rows by labels."""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses.fast.sparse import bounds_of, sum_bags

__all__ = ["DenseLabels", "LabelLists", "largest_of_labels"]

# Powers of four from this one down to its inverse are normal numbers, and so are their sums.
TOP_POWER = {torch.float32: 63, torch.float64: 511}


class DenseLabels:
    """Products with the labels ``[I, L]`` of keys and queue."""

    def __init__(self, labels: Tensor) -> None:
        self.dense = labels
        self.count = labels.sum(-1, keepdim=True)

    def times(self, values: Tensor) -> Tensor:
        """``labels @ values.T`` of ``values [c, L]``."""
        return (values @ self.dense.T).T

    def by_label(self, values: Tensor) -> Tensor:
        """``values.T @ labels`` of ``values [I, c]``."""
        return values.T @ self.dense


class LabelLists:
    """The same for few labels a row. For the CPU: how many there are decides shapes."""

    def __init__(self, row: Tensor, label: Tensor, size: int, like: Tensor) -> None:
        """Of the labels that the rows have, in the order of the rows; ``like`` is ``[c, L]``."""
        self._row, self._label, self._like = row, label, like
        self._row_bounds = bounds_of(row, size)
        self.count = self._row_bounds.diff().to(like.dtype)[:, None]
        self._row_by_label = row[label.argsort(stable=True)]
        self._label_bounds = bounds_of(label, like.shape[1])

    @classmethod
    def where_they_pay(cls, labels: Sequence[Tensor], like: Tensor) -> "LabelLists | None":
        """The lists of labels ``[N_k, L]``, or ``None`` if more than one in eight is there."""
        size = sum(map(len, labels))
        found, start = [], 0
        for part in labels:
            row, label = part.nonzero().int().unbind(1)
            found.append((row + start, label))
            start += len(part)
        row, label = (torch.cat(part) for part in zip(*found, strict=True))
        return cls(row, label, size, like) if 8 * len(row) <= size * like.shape[1] else None

    @property
    def dense(self) -> Tensor:
        """The labels ``[I, L]``."""
        labels = self._like.new_zeros(len(self.count), self._like.shape[1])
        labels[self._row, self._label] = 1.0
        return labels

    def times(self, values: Tensor) -> Tensor:
        """``labels @ values.T`` of ``values [c, L]``."""
        return sum_bags(self._label, values.T, self._row_bounds)

    def by_label(self, values: Tensor) -> Tensor:
        """``values.T @ labels`` of ``values [I, c]``."""
        return sum_bags(self._row_by_label, values, self._label_bounds).T


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
