"""Sums and maxima over the labels of multi-hot rows, without tensors ``[rows, rows, labels]``."""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses.fast.sparse import bounds_of, sum_bags

# Powers of four with exponents from minus this number to it are normal numbers, as are their sums.
TOP_POWER = {torch.float32: 63, torch.float64: 511}


class DenseLabels:
    """Products with the labels ``[I, L]`` of keys and queue."""

    def __init__(self, labels: Tensor) -> None:
        self.dense = labels
        self.count = labels.sum(-1, keepdim=True)

    def times(self, values: Tensor) -> Tensor:
        """Return ``labels @ values.T`` for ``values [c, L]``."""
        return (values @ self.dense.T).T

    def by_label(self, values: Tensor) -> Tensor:
        """Return ``values.T @ labels`` for ``values [I, c]``."""
        return values.T @ self.dense


class LabelLists:
    """``DenseLabels`` for few labels per row; for the CPU, as shapes depend on the values."""

    def __init__(self, row: Tensor, label: Tensor, size: int, like: Tensor) -> None:
        """Take the rows' labels as pairs sorted by row; ``like`` is ``[c, L]``."""
        self._row, self._label, self._like = row, label, like
        self._row_bounds = bounds_of(row, size)
        self.count = self._row_bounds.diff()[:, None]
        self._row_by_label = row[label.argsort()]
        self._label_bounds = bounds_of(label, like.shape[1])

    @classmethod
    def for_few_labels(cls, labels: Sequence[Tensor], like: Tensor) -> "LabelLists | None":
        """Return lists for labels ``[N_k, L]``, or ``None`` if more than one in eight is set."""
        size = sum(map(len, labels))
        pairs, start = [], 0
        for part in labels:
            row, label = part.nonzero().int().unbind(1)
            pairs.append((row + start, label))
            start += len(part)
        row, label = (torch.cat(part) for part in zip(*pairs, strict=True))
        return cls(row, label, size, like) if 8 * len(row) <= size * like.shape[1] else None

    @property
    def dense(self) -> Tensor:
        """The labels ``[I, L]``."""
        labels = self._like.new_zeros(len(self.count), self._like.shape[1])
        labels[self._row, self._label] = 1.0
        return labels

    def times(self, values: Tensor) -> Tensor:
        """Return ``labels @ values.T`` for ``values [c, L]``."""
        return sum_bags(self._label, values.T, self._row_bounds)

    def by_label(self, values: Tensor) -> Tensor:
        """Return ``values.T @ labels`` for ``values [I, c]``."""
        return sum_bags(self._row_by_label, values, self._label_bounds).T


def largest_of_labels(values: Tensor, labels: Tensor) -> Tensor:
    """Return the largest of ``values [M, L]``, at least 0, among the labels of each row ``[N, L]``.

    A matrix product avoids the tensor ``[M, N, L]``. Each label is encoded as a power of four by
    the rank of its value. The logarithm of a sum of such powers gives the largest, as all smaller
    ones add up to a third of it. A block has as many labels as there are powers.
    """
    top = TOP_POWER[values.dtype]
    blocks = []
    parts = torch.split(values, 2 * top, dim=-1), torch.split(labels, 2 * top, dim=-1)
    for some, hot in zip(*parts, strict=True):
        by_rank, order = some.sort(descending=True)
        none = by_rank.shape[-1]  # the rank for no label, with value 0
        exponents = top - torch.arange(none, device=values.device)
        powers = torch.exp2(2 * exponents.to(values.dtype)).expand(some.shape)
        by_label = torch.zeros_like(some).scatter(-1, order, powers)
        rank = (by_label @ hot.T).log2_().mul_(-0.5).add_(top + 0.5)
        rank = rank.nan_to_num_(none, none).clamp(0, none).long()
        blocks.append(nnf.pad(by_rank, (0, 1)).gather(-1, rank))
    return functools.reduce(torch.maximum, blocks).clamp(min=0)
