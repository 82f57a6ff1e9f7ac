"""In-batch contrast with its gradient, some rows of the score matrix at a time.

The gradient of a row's loss by its scores is ``sigmoid(gap) * softmax`` over the rivals and
``-sigmoid(gap)`` at the positive, ``gap = logsumexp(rivals) - positive``; no ``softmax - 1``
cancels. So a block of scores is made, turned in place into its own gradient, multiplied back, and
forgotten: three matrix products in all, and never the whole score matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_losses._core.similarity import through_unit_rows_, unit_rows
from sparse_losses._core.softmax import softplus
from sparse_losses._core.sparse import NonZeros, non_zeros, product, product_by_columns

__all__ = ["BLOCK", "contrast", "exponentials", "losses", "merged"]

# Without a chunk size, as many rows as make a block of this many scores.
BLOCK = 1 << 22


def contrast(
    needs: Sequence[bool],
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: Tensor,
    *,
    cosine: bool = False,
    symmetric: bool = False,
    decoupled: bool = False,
    positive_ids: Tensor | None = None,
    chunk_size: int | None = None,
    mean: bool = True,
    sparse: bool = False,
    first: int = 0,
) -> tuple[Tensor, list[Tensor | None]]:
    """InfoNCE over the batch, reduced, and its gradient by the four tensors that need one.

    ``symmetric`` goes without negatives. ``sparse`` products need shared ones, if any. There may be
    more positives (and ids) than anchors: that of the first anchor is number ``first``.
    """
    batch, columns = anchor.shape[0], positive.shape[0]
    scores: _DenseScores | _SparseScores
    kind = _SparseScores if sparse else _DenseScores
    hides = positive_ids is not None
    scores = kind(needs, anchor, positive, negative, temperature, cosine, hides)
    if sparse or (symmetric and chunk_size is None):
        chunk_size = batch  # the columns' sums need all rows: at once, that saves a product
    # A row of a block is one of scores and some of the inputs' width.
    chunk_size = min(chunk_size or max(BLOCK // (columns + anchor.shape[1]), 1), batch)
    chunks = [slice(i, min(i + chunk_size, batch)) for i in range(0, batch, chunk_size)]
    share = 1.0 / (batch if mean else 1) / (2 if symmetric else 1)
    value = temperature.new_zeros(())

    if symmetric:  # the other direction: positives ask, anchors answer
        highest, total, own = value.new_zeros(3, batch)
        for rows in chunks:
            block = scores.block(rows)
            own[rows] = _hide(block, rows, positive_ids, first)
            by_columns, block_highest, block_total = exponentials(block, 0, len(chunks) > 1)
            highest, total = merged(highest, total, block_highest, block_total)
        row_losses, column_slope, column_factor = losses(highest, total, own, decoupled, share)
        value += row_losses.sum() * share
        column_highest = highest

    for rows in chunks:
        if not symmetric or len(chunks) > 1:
            block = scores.block(rows)
            own = _hide(block, rows, positive_ids, first)
        negatives = scores.negatives(rows)
        if symmetric and any(needs):
            if len(chunks) > 1:
                by_columns = (block - column_highest).exp_()
            by_columns *= column_factor
        # From here on the scores are their exponentials, and then the gradient.
        block, highest, total = exponentials(block, 1, True)
        if negatives is not None:
            negatives, other_highest, other_total = exponentials(negatives, 1, True)
            both, total = merged(highest, total, other_highest, other_total)
            block *= _ratio(highest, both)
            negatives *= _ratio(other_highest, both)
            highest = both
        row_losses, slope, factor = losses(highest, total, own, decoupled, share)
        value += row_losses.sum() * share
        if not any(needs):
            continue
        at_own = -total  # times the factor, that is minus the slope
        if symmetric:
            block = block.mul_(factor[:, None]).add_(by_columns)
            at_own, factor = -(slope + column_slope[rows]), torch.ones_like(factor)
        _own(block, rows, first).copy_(at_own)
        scores.back(rows, block, negatives, factor[:, None])
    return value, scores.gradients()


def _own(block: Tensor, rows: slice, first: int) -> Tensor:
    """Of the scores ``[c, B]`` of some rows, a view of those of their own positives ``[c]``."""
    return block[:, rows.start + first : rows.stop + first].diagonal()


def _hide(block: Tensor, rows: slice, positive_ids: Tensor | None, first: int) -> Tensor:
    """Takes what is no rival out of the scores ``[c, B]``; returns the positives' ``[c]``."""
    diagonal = _own(block, rows, first)
    own = diagonal.clone()
    diagonal.fill_(-torch.inf)
    if positive_ids is not None:
        own_ids = positive_ids[rows.start + first : rows.stop + first]
        block.masked_fill_(own_ids[:, None] == positive_ids, -torch.inf)
    return own


def exponentials(scores: Tensor, dim: int, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``exp(scores - m)``, the largest score ``m`` (0 if it is infinite), and their sum."""
    if scores.shape[dim] == 0:
        nothing = scores.sum(dim)
        return scores, nothing, nothing
    highest = scores.amax(dim)
    highest = torch.where(highest.isinf(), 0.0, highest)  # inf - inf is NaN
    shift = highest.unsqueeze(dim)
    exponentials = (scores.sub_(shift) if in_place else scores - shift).exp_()
    return exponentials, highest, exponentials.sum(dim)


def merged(
    highest: Tensor, total: Tensor, other_highest: Tensor, other_total: Tensor
) -> tuple[Tensor, Tensor]:
    """Two sums of exponentials as one; a sum of nothing has no say in the largest."""
    both = torch.maximum(
        torch.where(total == 0, other_highest, highest),
        torch.where(other_total == 0, highest, other_highest),
    )
    here = torch.where(total == 0, 0.0, total * (highest - both).exp())
    there = torch.where(other_total == 0, 0.0, other_total * (other_highest - both).exp())
    return both, here + there


def _ratio(highest: Tensor, both: Tensor) -> Tensor:
    # Of nothing but hidden scores the largest is called 0, perhaps above the true one.
    return (highest - both).clamp(max=0).exp()[:, None]


def losses(
    highest: Tensor, total: Tensor, own: Tensor, decoupled: bool, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses; minus their slope by the positive's score; what makes exponentials slopes."""
    gap = highest + total.log() - own
    values = gap if decoupled else softplus(gap)
    slope = (torch.ones_like(gap) if decoupled else gap.sigmoid()) * share
    return values, slope, torch.where(total == 0, 0.0, slope / total)


class _DenseScores:
    """Scores by matrix products, and the way back."""

    def __init__(
        self,
        needs: Sequence[bool],
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor | None,
        temperature: Tensor,
        cosine: bool,
        hides: bool,
    ) -> None:
        self.anchor, self.temperature, self.cosine = anchor, temperature, cosine
        self.keys, self.key_length = self._represent(positive)
        self.is_nan = None
        if hides:  # 0 * NaN is NaN: what is hidden must not reach a product
            self.is_nan = self.keys.isnan().any(1)
            self.keys = torch.where(self.is_nan[:, None], 0.0, self.keys)
        self.of_anchor = torch.empty_like(anchor) if needs[0] else None
        self.of_positive = torch.zeros_like(positive) if needs[1] else None
        self.others = self.of_negative = None
        if negative is not None:
            self.others, self.other_length = self._represent(negative)
            self.of_negative = torch.zeros_like(negative) if needs[2] else None
        self.of_temperature = torch.zeros_like(temperature) if needs[3] else None
        self.buffer: Tensor | None = None

    def _represent(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return unit_rows(x) if self.cosine else (x, None)

    def block(self, rows: slice) -> Tensor:
        """Scores of some anchors over the temperature ``[c, B]``."""
        self.queries, self.query_length = self._represent(self.anchor[rows])
        if self.buffer is None:  # the first chunk is the largest
            self.buffer = self.keys.new_empty(self.queries.shape[0], self.keys.shape[0])
        if self.cosine:  # unit rows are copies, and divided need no other; scores are divided else
            self.queries.div_(self.temperature)
        block = torch.mm(self.queries, self.keys.T, out=self.buffer[: self.queries.shape[0]])
        if not self.cosine:
            block.div_(self.temperature)
        if self.is_nan is not None:
            block.masked_fill_(self.is_nan, torch.nan)
        return block

    def negatives(self, rows: slice) -> Tensor | None:
        """Scores of the same anchors against the negatives ``[c, N]``."""
        if self.others is None:
            return None
        if self.others.ndim == 2:
            scores = self.queries @ self.others.T
        else:
            scores = torch.einsum("bd,bnd->bn", self.queries, self.others[rows])
        return scores if self.cosine else scores.div_(self.temperature)

    def back(
        self, rows: slice, gradient: Tensor, of_negatives: Tensor | None, factor: Tensor
    ) -> None:
        """Takes in the gradient by those scores, up to a factor a row."""
        if not self.cosine:
            for scores in (gradient, of_negatives):
                if scores is not None:
                    scores.mul_(factor / self.temperature)
        if self.of_anchor is not None or self.of_temperature is not None:
            if self.of_anchor is None:
                d = gradient @ self.keys
            else:
                d = torch.mm(gradient, self.keys, out=self.of_anchor[rows])
            if of_negatives is not None and self.others is not None:
                if self.others.ndim == 2:
                    d.addmm_(of_negatives, self.others)
                else:
                    d += torch.einsum("bn,bnd->bd", of_negatives, self.others[rows])
            if self.cosine:
                d *= factor / self.temperature
            if self.of_temperature is not None:
                # The sum of gradient times score, without another look at the scores.
                along = (d * self.queries).sum()
                self.of_temperature -= along if self.cosine else along / self.temperature
            if self.of_anchor is not None and self.query_length is not None:
                through_unit_rows_(d, self.queries, self.query_length, self.temperature)
        queries = self.queries.mul_(factor) if self.cosine else self.queries
        if self.of_positive is not None:
            self.of_positive.addmm_(gradient.T, queries)
        if self.of_negative is not None and of_negatives is not None:
            if self.of_negative.ndim == 2:
                self.of_negative.addmm_(of_negatives.T, queries)
            else:
                torch.mul(of_negatives[:, :, None], queries[:, None], out=self.of_negative[rows])

    def gradients(self) -> list[Tensor | None]:
        """By anchor, positive, negative and temperature."""
        if self.of_positive is not None and self.key_length is not None:
            through_unit_rows_(self.of_positive, self.keys, self.key_length)
        if self.of_negative is not None and self.others is not None and self.cosine:
            assert self.other_length is not None
            through_unit_rows_(self.of_negative, self.others, self.other_length)
        return [self.of_anchor, self.of_positive, self.of_negative, self.of_temperature]


class _SparseScores:
    """Scores through the non-zeros; gradients where the inputs have room for them.

    That of a dense tensor is exact everywhere, that of a CSR tensor is by what it stores.
    """

    def __init__(
        self,
        needs: Sequence[bool],
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor | None,
        temperature: Tensor,
        cosine: bool,
        hides: bool,
    ) -> None:
        self.needs, self.temperature = needs, temperature
        self.tensors = anchor, positive, negative
        self.represented = [self._represent(x, cosine) for x in self.tensors if x is not None]
        # No entry of the others may meet a NaN: which rows have one is noted instead.
        self.is_nan = [self._rows_with_nan(entries) for entries, _ in self.represented]
        if hides:  # and what is hidden must not reach a gradient
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
        """All scores over the temperature ``[B, B]``."""
        return self._scores(1)

    def negatives(self, rows: slice) -> Tensor | None:
        """All scores against the shared negatives ``[B, N]``."""
        return None if len(self.represented) < 3 else self._scores(2)

    def back(
        self, rows: slice, gradient: Tensor, of_negatives: Tensor | None, factor: Tensor
    ) -> None:
        """Takes in the gradient by those scores, up to a factor a row."""
        factor = factor / self.temperature
        gradients = [g * factor for g in (gradient, of_negatives) if g is not None]
        if self.needs[0] or self.needs[3]:
            along = self._gradient(0, list(zip(gradients, (1, 2), strict=False)))
            if self.needs[3]:
                self.found[3] = -along
        for number, g in enumerate(gradients, start=1):
            if self.needs[number]:
                self._gradient(number, [(g.T, 0)])

    def _gradient(self, number: int, terms: list[tuple[Tensor, int]]) -> Tensor:
        """The gradient by one input, ``sum_k g_k @ x_k``; returns its product with the scores."""
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
            if length is not None:
                tile /= length
            last = int(torch.searchsorted(entries.column, stop))
            here = slice(first, last)
            at_entries[here] = tile[entries.column[here] - start, entries.row[here]]
            first = last
            if dense is not None:
                dense[:, start:stop] = tile.T.contiguous()
        along = entries.value.new_zeros(entries.shape[0])
        along.index_add_(0, entries.row, entries.value * at_entries)
        if length is not None:  # the part along the row changes its length alone
            change = entries.value * along[entries.row]
            at_entries -= change
            along = torch.where(along == 0, 0.0, along * length)
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
        """By anchor, positive, negative and temperature."""
        return self.found
