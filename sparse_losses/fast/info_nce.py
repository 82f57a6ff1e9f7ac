"""In-batch contrast with its gradient, some rows of the score matrix at a time.

The gradient of a row's loss by its scores is ``sigmoid(gap) * softmax`` over the negatives and
``-sigmoid(gap)`` at the positive, ``gap = logsumexp(negatives) - positive``; no ``softmax - 1``
cancels. So a block of scores is made, turned in place into its own gradient, multiplied back, and
forgotten: three matrix products in all, and never the whole score matrix.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.similarity import through_unit_rows_, unit_rows
from sparse_losses._core.softmax import softplus
from sparse_losses._core.ways import Arguments, Options
from sparse_losses.distributed import gather_rows, num_ranks, rank, scatter_sum, sum_over_ranks

__all__ = [
    "DenseScores",
    "as_tensor",
    "blockwise_info_nce",
    "direct_info_nce",
    "exponentials",
    "in_both_directions",
    "losses",
    "merged",
    "rows_of_a_block",
    "too_many_scores",
    "why_no_gradient",
    "why_not_dense",
]

MOST_SCORES = 1 << 22  # held at once: 16 MB in fp32

Gradients = list[Tensor | None]


def why_no_gradient(arguments: Arguments, options: Options) -> str | None:
    """Why no way with a gradient of its own takes the call."""
    anchor, _, negative, temperature = arguments
    if not options["in_batch"]:
        return "in_batch=True"
    if options["positive_mask"] is not None:
        return "no `positive_mask`"
    if options["reduction"] == "none":
        return 'reduction="mean" or "sum"'
    if min(anchor.shape) == 0:
        return f"B and D of at least 1, got {list(anchor.shape)},"
    if options["decoupled"] and (negative is None or negative.shape[-2] == 0):
        batch = len(anchor) * (num_ranks() if options["gather"] else 1)
        if options["positive_ids"] is not None or batch < 2:
            return "a negative in every row"
    kind = torch.finfo(torch.float64 if anchor.dtype == torch.float64 else torch.float32)
    if not isinstance(temperature, Tensor) and not kind.tiny <= temperature <= kind.max:
        return f"`temperature` from {kind.tiny:.2g} to {kind.max:.2g}, got {temperature},"
    if isinstance(temperature, Tensor) and temperature.device != anchor.device:
        return f"`temperature` on {anchor.device}, where `anchor` is, got {temperature.device}"
    return None


def why_not_dense(arguments: Arguments, options: Options) -> str | None:
    """The same, and dense tensors."""
    if any(isinstance(x, Tensor) and x.layout != torch.strided for x in arguments):
        return "dense tensors"
    return why_no_gradient(arguments, options)


def too_many_scores(arguments: Arguments, options: Options) -> bool:
    """Whether all scores at once are more than a block."""
    anchor, _, negative, _ = arguments
    batch = len(anchor) * (num_ranks() if options["gather"] else 1)
    return len(anchor) * (batch + (0 if negative is None else negative.shape[-2])) > MOST_SCORES


def direct_info_nce(
    needs: Sequence[bool], *arguments: Any, **options: Any
) -> tuple[Tensor, Gradients]:
    """Value and gradients of InfoNCE, all scores held once."""
    return in_both_directions(contrast, needs, *arguments, **options)


def blockwise_info_nce(
    needs: Sequence[bool], *arguments: Any, **options: Any
) -> tuple[Tensor, Gradients]:
    """Value and gradients of InfoNCE, some rows of the scores at a time."""
    return in_both_directions(
        functools.partial(contrast, rows_at_once=rows_of_a_block), needs, *arguments, **options
    )


def in_both_directions(
    contrast: Callable[..., tuple[Tensor, Gradients]],
    needs: Sequence[bool],
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: float | Tensor,
    *,
    similarity: str,
    symmetric: bool,
    positive_ids: Tensor | None,
    decoupled: bool,
    gather: bool,
    reduction: str,
    in_batch: bool = True,
    positive_mask: None = None,
) -> tuple[Tensor, Gradients]:
    """``contrast`` at once where one process holds both directions, else one after the other.

    Under ``gather`` this rank's rows ask and all ranks' rows answer. DDP divides gradients by the
    number of ranks W that contributed to them; they come W times as large. All keys are candidates:
    ``why_no_gradient`` refuses another ``in_batch`` and a ``positive_mask``.
    """
    t = as_tensor(temperature, anchor)
    contrast = functools.partial(contrast, cosine=similarity == "cosine", decoupled=decoupled)
    batch, ranks = len(anchor), num_ranks() if gather else 1
    share = 1.0 / (batch if reduction == "mean" else 1 / ranks) / (2 if symmetric else 1)
    if ranks == 1 and not (symmetric and negative is not None):
        return contrast(
            needs,
            anchor,
            positive,
            negative,
            t,
            symmetric=symmetric,
            positive_ids=positive_ids,
            share=share,
        )
    is_shared = negative is not None and negative.ndim == 2
    if negative is not None and is_shared:
        negative = gather_rows(negative, gather)
    ids = None if positive_ids is None else gather_rows(positive_ids, gather)
    value, found = t.new_zeros(()), Gradients([None] * 4)
    inputs = anchor, positive
    for asks, answers in ((0, 1), (1, 0)) if symmetric else ((0, 1),):
        part, gradients = contrast(
            [needs[asks], needs[answers], *needs[2:]],
            inputs[asks],
            gather_rows(inputs[answers], gather),
            negative,
            t,
            positive_ids=ids,
            share=share,
            first=rank() * batch if gather else 0,
        )
        value += part
        for place, gradient in zip((asks, answers, 2, 3), gradients, strict=True):
            if gradient is None:
                continue
            if gather and (place == answers or (place == 2 and is_shared)):
                gradient = scatter_sum(gradient)
            before = found[place]
            found[place] = gradient if before is None else before + gradient
    return (sum_over_ranks(value) if gather else value) / ranks, found


def as_tensor(temperature: float | Tensor, anchor: Tensor) -> Tensor:
    """The temperature as a 0-d tensor; a number is filled in on the device: no copy to wait for."""
    if isinstance(temperature, Tensor):
        return temperature.to(anchor.dtype)
    return torch.full((), temperature, dtype=anchor.dtype, device=anchor.device)


def contrast(
    needs: Sequence[bool],
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: Tensor,
    *,
    cosine: bool,
    decoupled: bool,
    share: float,
    symmetric: bool = False,
    positive_ids: Tensor | None = None,
    first: int = 0,
    rows_at_once: Callable[[Tensor, Tensor], int] | None = None,
    kind: Any = None,
) -> tuple[Tensor, Gradients]:
    """The losses of all rows, added up and times ``share``, and their gradient by four tensors.

    ``symmetric`` goes without negatives. There may be more positives (and ids) than anchors: that
    of the first anchor is number ``first``. ``rows_at_once`` says how many rows of scores are held,
    all without it; ``kind`` multiplies, ``DenseScores`` by default.
    """
    batch = anchor.shape[0]
    scores = (kind or DenseScores)(
        needs, anchor, positive, negative, temperature, cosine, positive_ids is not None
    )
    step = rows_at_once(anchor, positive) if rows_at_once else batch
    chunks = [slice(i, min(i + step, batch)) for i in range(0, batch, step)]
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


def rows_of_a_block(anchor: Tensor, positive: Tensor) -> int:
    """As many rows as make a block; a row is one of scores and some of the inputs' width."""
    return min(max(MOST_SCORES // (len(positive) + anchor.shape[1]), 1), len(anchor))


def _own(block: Tensor, rows: slice, first: int) -> Tensor:
    """Of the scores ``[c, B]`` of some rows, a view of those of their own positives ``[c]``."""
    return block[:, rows.start + first : rows.stop + first].diagonal()


def _hide(block: Tensor, rows: slice, positive_ids: Tensor | None, first: int) -> Tensor:
    """Takes what is no negative out of the scores ``[c, B]``; returns the positives' ``[c]``."""
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


class DenseScores:
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
        self.grad_anchor = torch.empty_like(anchor) if needs[0] else None
        self.grad_positive = torch.zeros_like(positive) if needs[1] else None
        self.others = self.grad_negative = None
        if negative is not None:
            self.others, self.other_length = self._represent(negative)
            self.grad_negative = torch.zeros_like(negative) if needs[2] else None
        self.grad_temperature = torch.zeros_like(temperature) if needs[3] else None
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
        self, rows: slice, gradient: Tensor, grad_negative_scores: Tensor | None, factor: Tensor
    ) -> None:
        """Takes in the gradient by those scores, up to a factor a row."""
        if not self.cosine:
            for scores in (gradient, grad_negative_scores):
                if scores is not None:
                    scores.mul_(factor / self.temperature)
        if self.grad_anchor is not None or self.grad_temperature is not None:
            if self.grad_anchor is None:
                d = gradient @ self.keys
            else:
                d = torch.mm(gradient, self.keys, out=self.grad_anchor[rows])
            if grad_negative_scores is not None and self.others is not None:
                if self.others.ndim == 2:
                    d.addmm_(grad_negative_scores, self.others)
                else:
                    d += torch.einsum("bn,bnd->bd", grad_negative_scores, self.others[rows])
            if self.cosine:
                d *= factor / self.temperature
            if self.grad_temperature is not None:
                # The sum of gradient times score, without another look at the scores.
                along = (d * self.queries).sum()
                self.grad_temperature -= along if self.cosine else along / self.temperature
            if self.grad_anchor is not None and self.query_length is not None:
                through_unit_rows_(d, self.queries, self.query_length, self.temperature)
        queries = self.queries.mul_(factor) if self.cosine else self.queries
        if self.grad_positive is not None:
            self.grad_positive.addmm_(gradient.T, queries)
        if self.grad_negative is not None and grad_negative_scores is not None:
            if self.grad_negative.ndim == 2:
                self.grad_negative.addmm_(grad_negative_scores.T, queries)
            else:
                torch.mul(
                    grad_negative_scores[:, :, None], queries[:, None], out=self.grad_negative[rows]
                )

    def gradients(self) -> list[Tensor | None]:
        """By anchor, positive, negative and temperature."""
        if self.grad_positive is not None and self.key_length is not None:
            through_unit_rows_(self.grad_positive, self.keys, self.key_length)
        if self.grad_negative is not None and self.others is not None and self.cosine:
            assert self.other_length is not None
            through_unit_rows_(self.grad_negative, self.others, self.other_length)
        return [self.grad_anchor, self.grad_positive, self.grad_negative, self.grad_temperature]
