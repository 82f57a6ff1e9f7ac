"""InfoNCE with products over the non-zeros of its inputs only."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.implementations import Arguments, Options
from sparse_losses._core.products import as_single
from sparse_losses.fast.info_nce import (
    contrast,
    in_both_directions,
    own_gradient_unsupported_reason,
)
from sparse_losses.fast.sparse import NonZeros, non_zeros, product, product_by_columns

__all__ = ["nonzeros_info_nce", "nonzeros_unsupported_reason", "prefers_nonzeros"]

# Used below this density with at least this number of rows; for fewer rows, the limit is
# proportionally smaller. It was chosen by hand. benchmarks/results/aims-run-1.csv has cases on both
# sides: with 0.5% and 1,024 rows a sixth of the time of "direct", with 10% and 256 rows 1.3 times.
DENSEST, ROWS_FOR_DENSEST = 0.12, 512
FEWEST_COLUMNS = 4096
SAMPLED_ROWS = 16


def nonzeros_unsupported_reason(arguments: Arguments, options: Options) -> str | None:
    """Return why sparse products do not support the call, or ``None``."""
    negative = arguments[2]
    if negative is not None and negative.ndim == 3:
        return "no negatives per row"
    if arguments[0].device.type == "meta":
        return "tensors with values"
    return own_gradient_unsupported_reason(arguments, options)


def prefers_nonzeros(arguments: Arguments, options: Options) -> bool:
    """Whether an input is CSR or, on the CPU, a sample of the inputs has few non-zeros."""
    inputs: list[Tensor] = [x for x in arguments[:3] if x is not None]
    if any(x.layout != torch.strided for x in inputs):
        return True
    rows, columns = inputs[0].shape
    if inputs[0].device.type != "cpu" or columns < FEWEST_COLUMNS:
        return False
    sample = [x[:: max(x.shape[0] // SAMPLED_ROWS, 1)] for x in inputs]
    found = sum(int(x.count_nonzero()) for x in sample)
    densest = DENSEST * min(1.0, rows / ROWS_FOR_DENSEST)
    return found < densest * sum(x.numel() for x in sample)


def nonzeros_info_nce(needs: Sequence[bool], *arguments: Any, **options: Any) -> Any:
    """Return value and gradients of InfoNCE by sparse products; all scores are held at once."""
    by_nonzeros = functools.partial(contrast, kind=_SparseScores)
    single = [as_single(x) if isinstance(x, Tensor) else x for x in arguments]
    return in_both_directions(by_nonzeros, needs, *single, **options)


class _SparseScores:
    """Scores from non-zeros; gradients are dense, or for a CSR input restricted to its pattern."""

    def __init__(
        self,
        needs: Sequence[bool],
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor | None,
        temperature: float | Tensor,
        cosine: bool,
        hides: bool,
    ) -> None:
        self.needs, self.temperature = needs, temperature
        self.tensors, self.num_positives = (anchor, positive, negative), len(positive)
        self.represented = [self._represent(x, cosine) for x in self.tensors if x is not None]
        # Products over non-zeros may skip a NaN, so rows that contain one are marked.
        self.is_nan = [self._rows_with_nan(entries) for entries, _ in self.represented]
        if hides:  # a NaN of an excluded key must not reach a gradient
            keys, length = self.represented[1]
            kept = keys.value.masked_fill(self.is_nan[1][keys.row], 0.0)
            self.represented[1] = keys._replace(value=kept), length
        self.found: list[Tensor | None] = [None] * 4

    @staticmethod
    def _represent(x: Tensor, cosine: bool) -> tuple[NonZeros, Tensor | None]:
        entries = non_zeros(x)
        if not cosine:
            return entries, None
        rows, value = entries.shape[0], entries.value
        scale = value.new_zeros(rows).scatter_reduce_(0, entries.row, value.abs(), "amax")
        scale = torch.where(scale == 0, 1.0, scale)
        unit = value / scale[entries.row]
        norm = value.new_zeros(rows).index_add_(0, entries.row, unit.square()).sqrt()
        is_zero = norm == 0
        unit = unit / torch.where(is_zero, 1.0, norm)[entries.row]
        return entries._replace(value=unit), torch.where(is_zero, torch.inf, scale * norm)

    @staticmethod
    def _rows_with_nan(entries: NonZeros) -> Tensor:
        found = entries.value.new_zeros(entries.shape[0], dtype=torch.bool)
        found[entries.row[entries.value.isnan()]] = True
        return found

    def _scores(self, number: int) -> Tensor:
        scores = product(self.represented[0][0], self.represented[number][0])
        is_nan = self.is_nan[0][:, None] | self.is_nan[number]
        return scores.div_(self.temperature).masked_fill_(is_nan, torch.nan)

    def block(self, rows: slice) -> Tensor:
        """Return all scores, divided by the temperature ``[B, B + N]``."""
        if len(self.represented) < 3:
            return self._scores(1)
        return torch.cat([self._scores(1), self._scores(2)], dim=1)

    def back(self, rows: slice, gradient: Tensor) -> None:
        """Store the input gradients, given the scores' gradient times the temperature."""
        gradients = gradient.tensor_split([self.num_positives], dim=1)[: len(self.represented) - 1]
        if self.needs[0] or self.needs[3]:
            along = self._gradient(0, list(zip(gradients, (1, 2), strict=False)))
            if self.needs[3]:
                self.found[3] = -along
        for number, g in enumerate(gradients, start=1):
            if self.needs[number]:
                self._gradient(number, [(g.T, 0)])

    def _gradient(self, number: int, terms: list[tuple[Tensor, int]]) -> Tensor:
        """Store the gradient of one input, ``sum_k g_k @ x_k``; return minus the temperature's."""
        tensor = self.tensors[number]
        assert tensor is not None
        entries, length = self.represented[number]
        dense = torch.empty_like(tensor) if tensor.layout == torch.strided else None
        at_entries = torch.empty_like(entries.value)
        first = 0
        tiles = [product_by_columns(g, self.represented[k][0]) for g, k in terms]
        for parts in zip(*tiles, strict=True):
            start, stop, tile = parts[0]
            for _, _, other in parts[1:]:
                tile += other
            last = int(torch.searchsorted(entries.column, stop))
            here = slice(first, last)
            at_entries[here] = tile[entries.column[here] - start, entries.row[here]]
            first = last
            if dense is not None:
                if length is not None:
                    tile /= length
                dense[:, start:stop] = tile.T.contiguous()
        along = entries.value.new_zeros(entries.shape[0])
        along.index_add_(0, entries.row, entries.value * at_entries)
        if length is not None:  # remove the part parallel to the row
            at_entries -= entries.value * along[entries.row]
            at_entries /= length[entries.row]
            if dense is not None:
                dense.index_put_((entries.row, entries.column), at_entries)
        if dense is None:
            values = torch.empty_like(at_entries)
            values[entries.original] = at_entries
            dense = torch.sparse_csr_tensor(
                tensor.crow_indices(),
                tensor.col_indices(),
                values,
                tensor.shape,
                check_invariants=False,
            )
        if self.needs[number]:
            self.found[number] = dense
        return along.sum() / self.temperature

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of anchor, positive, negative and temperature."""
        return self.found
