"""In-batch contrast with its gradient, some rows of the score matrix at a time.

The gradient of a row's loss by its scores is ``sigmoid(gap) * softmax`` over the negatives and
``-sigmoid(gap)`` at the positive, ``gap = logsumexp(negatives) - positive``; no ``softmax - 1``
cancels. So a block of scores is made, turned into its own gradient, multiplied back, and
forgotten: three matrix products in all, and never the whole score matrix.

What is no negative has the lowest finite score: a row of nothing else has a softmax all the same.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_losses._core.products import HALVES, product
from sparse_losses._core.similarity import half_rows, through_unit_rows_, unit_rows
from sparse_losses._core.softmax import softplus
from sparse_losses._core.ways import Arguments, Options
from sparse_losses.distributed import gather_rows, num_ranks, rank, scatter_sum, sum_over_ranks

__all__ = [
    "DenseScores",
    "blockwise_info_nce",
    "contrast",
    "direct_info_nce",
    "in_both_directions",
    "losses",
    "rows_of_a_block",
    "sides",
    "softmax",
    "too_many_scores",
    "why_no_gradient",
    "why_not_dense",
]

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
    scores = len(anchor) * (batch + (0 if negative is None else negative.shape[-2]))
    return scores > most_scores(anchor.device)


def most_scores(device: torch.device) -> int:
    """How many are held at once: 8 MB in fp32 on a CPU; elsewhere 256 MB, as launches cost time."""
    return 1 << 21 if device.type == "cpu" else 1 << 26


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
    contrast = functools.partial(contrast, cosine=similarity == "cosine", decoupled=decoupled)
    batch, ranks = len(anchor), num_ranks() if gather else 1
    share = 1.0 / (batch if reduction == "mean" else 1 / ranks) / (2 if symmetric else 1)
    if ranks == 1 and not (symmetric and negative is not None):
        return contrast(
            needs,
            anchor,
            positive,
            negative,
            temperature,
            symmetric=symmetric,
            positive_ids=positive_ids,
            share=share,
        )
    is_shared = negative is not None and negative.ndim == 2
    if negative is not None and is_shared:
        negative = gather_rows(negative, gather)
    ids = None if positive_ids is None else gather_rows(positive_ids, gather)
    values, found = [], Gradients([None] * 4)
    inputs = anchor, positive
    for asks, answers in ((0, 1), (1, 0)) if symmetric else ((0, 1),):
        part, gradients = contrast(
            [needs[asks], needs[answers], *needs[2:]],
            inputs[asks],
            gather_rows(inputs[answers], gather),
            negative,
            temperature,
            positive_ids=ids,
            share=share,
            first=rank() * batch if gather else 0,
        )
        values.append(part)
        for place, gradient in zip((asks, answers, 2, 3), gradients, strict=True):
            if gradient is None:
                continue
            if gather and (place == answers or (place == 2 and is_shared)):
                gradient = scatter_sum(gradient)
            before = found[place]
            found[place] = gradient if before is None else before + gradient
    value = torch.stack(values).sum()
    return (sum_over_ranks(value) if gather else value) / ranks, found


def contrast(
    needs: Sequence[bool],
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: float | Tensor,
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
    share_of_scores = share / temperature
    step = rows_at_once(anchor, positive) if rows_at_once else batch
    chunks = [slice(i, min(i + step, batch)) for i in range(0, batch, step)]
    values = []

    if symmetric:  # the other direction: positives ask, anchors answer
        totals, owns = [], []
        for rows in chunks:
            block = scores.block(rows)
            owns.append(_hide(block, rows, positive_ids, first))
            by_columns, total = softmax(block, 0)
            totals.append(total)
        column_total = functools.reduce(torch.logaddexp, totals)
        values_of_columns, column_slope = losses(column_total, torch.cat(owns), decoupled)
        values.append(values_of_columns.sum())
        column_slope *= share_of_scores

    for rows in chunks:
        if not symmetric or len(chunks) > 1:
            block = scores.block(rows)
            own = _hide(block, rows, positive_ids, first)
        else:
            own = owns[0]
        gradient, total = softmax(block, 1)
        values_of_rows, slope = losses(total, own, decoupled)
        values.append(values_of_rows.sum())
        if not any(needs):
            continue
        slope = slope.mul_(share_of_scores)
        gradient.mul_(slope[:, None])
        if symmetric:
            if len(chunks) > 1:
                by_columns = (block - column_total).exp_()
            gradient.add_(by_columns.mul_(column_slope))
            slope += column_slope[rows]
        _own(gradient, rows, first).sub_(slope)
        scores.back(rows, gradient)
    value = values[0] if len(values) == 1 else torch.stack(values).sum()
    return value * share, scores.gradients()


def rows_of_a_block(anchor: Tensor, positive: Tensor) -> int:
    """As many rows as make a block; a row is one of scores and some of the inputs' width."""
    most = most_scores(anchor.device)
    return min(max(most // (len(positive) + anchor.shape[1]), 1), len(anchor))


def _own(block: Tensor, rows: slice, first: int) -> Tensor:
    """Of the scores ``[c, B + N]`` of some rows, a view of those of their own positives ``[c]``."""
    return block[:, rows.start + first : rows.stop + first].diagonal()


def _hide(block: Tensor, rows: slice, positive_ids: Tensor | None, first: int) -> Tensor:
    """Takes what is no negative out of the scores; returns the positives' ``[c]``."""
    lowest = torch.finfo(block.dtype).min
    diagonal = _own(block, rows, first)
    own = diagonal.clone()
    diagonal.fill_(lowest)
    if positive_ids is not None:
        own_ids = positive_ids[rows.start + first : rows.stop + first]
        in_batch = block[:, : len(positive_ids)]
        in_batch.masked_fill_(own_ids[:, None] == positive_ids, lowest)
    return own


def softmax(scores: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Softmax and log-sum-exp in six launches; ``logsumexp`` alone takes nine."""
    probabilities = scores.softmax(dim)
    # The largest probability is exp(0) over the sum of the exponentials; NaN for an infinite score,
    # whose log-sum-exp is infinite.
    log_largest = probabilities.amax(dim).log_().nan_to_num_(nan=0.0)
    return probabilities, scores.amax(dim) - log_largest


def losses(total: Tensor, own: Tensor, decoupled: bool) -> tuple[Tensor, Tensor]:
    """Losses by log-sum-exp and positive's score; minus their slope by the latter."""
    gap = total - own
    return (gap, torch.ones_like(gap)) if decoupled else (softplus(gap), gap.sigmoid())


class Side(NamedTuple):
    """Rows of an input ``[..., D]`` as they are multiplied."""

    values: Tensor
    norm: Tensor | None  # what products are still divided by: halves, under cosine
    inverse: Tensor | None  # 1 over the lengths of the rows that came, or that power of two

    def gradient(self, by_values: Tensor, rows: slice | None = None) -> Tensor:
        """The gradient by the rows that came, of that by the values, in its place."""
        if self.inverse is None:
            return by_values
        rows = rows or slice(None)
        unit = self.values[rows]
        if self.norm is not None:
            unit = unit / self.norm[rows]
        return through_unit_rows_(by_values, unit, self.inverse[rows])

    def single(self) -> "Side":
        """In fp32, for the gradient: an easy row's slopes are below the range of fp16."""
        values = self.values.float() if self.norm is None else self.values / self.norm
        return Side(values, None, self.inverse)


def sides(cosine: bool, *inputs: Tensor) -> list[Side]:
    """Unit rows under cosine; of halves the rows themselves, and their norms."""
    if not cosine:
        return [Side(x, None, None) for x in inputs]
    if inputs[0].dtype in HALVES:
        return [Side(*rows) for rows in half_rows(*inputs)]
    return [Side(unit, None, inverse) for unit, inverse in map(unit_rows, inputs)]


class DenseScores:
    """Scores by matrix products, and the way back."""

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
        self.num_positives, self.is_shared = len(positive), negative is None or negative.ndim == 2
        self.is_nan = None
        if hides:  # 0 * NaN is NaN: what is hidden must not reach a product
            self.is_nan = positive.isnan().any(1)
            positive = torch.where(self.is_nan[:, None], 0.0, positive)
        self.each: Side | None = None  # the negatives of each anchor
        if negative is not None and not self.is_shared:
            (self.each,) = sides(cosine, negative)
        elif negative is not None:
            positive = torch.cat([positive, negative])
        self.query, self.key = sides(cosine, anchor, positive)
        self.back_query, self.back_key, self.back_each = self.query, self.key, self.each
        if any(needs) and anchor.dtype == torch.float16:
            self.back_query, self.back_key = self.query.single(), self.key.single()
            self.back_each = None if self.each is None else self.each.single()
        self.grad_query: list[Tensor] = []  # a part for each block
        self.grad_each: list[Tensor] = []
        self.grad_key: Tensor | None = None
        self.grad_temperature: Tensor | None = None

    def block(self, rows: slice) -> Tensor:
        """Scores of some anchors over the temperature ``[c, B + N]``."""
        query, keys, t = self.query.values[rows], self.key.values, self.temperature
        if isinstance(t, float) and query.dtype not in HALVES and self.each is None:
            scores = query.new_empty(len(query), len(keys))
            scores.addmm_(query, keys.T, beta=0, alpha=1 / t)  # over the temperature in one pass
            t = 1.0
        else:
            scores = product(query, keys.T)
        if self.key.norm is not None:
            scores.div_(self.key.norm.T)
        if self.is_nan is not None:
            scores[:, : self.num_positives].masked_fill_(self.is_nan, torch.nan)
        if self.each is not None:
            more = product(self.each.values[rows], query.unsqueeze(2)).squeeze(2)
            if self.each.norm is not None:
                more.div_(self.each.norm[rows].squeeze(2))
            scores = torch.cat([scores, more], dim=1)
        elif isinstance(t, float) and t == 1.0 and self.query.norm is None:
            return scores
        return scores.div_(t if self.query.norm is None else self.query.norm[rows] * t)

    def back(self, rows: slice, gradient: Tensor) -> None:
        """Takes in the gradient by those scores times the temperature, and uses it up."""
        query, keys = self.back_query.values[rows], self.back_key.values
        if self.back_query.norm is not None:
            gradient.div_(self.back_query.norm[rows])
        by_keys = _as_operand(gradient[:, : len(keys)], self.back_key.norm, keys)
        if self.needs[1] or (self.needs[2] and self.is_shared):
            self.grad_key = _add_product(self.grad_key, by_keys.T, query)
        if self.back_each is not None:
            each, by_each = self.back_each.values[rows], gradient[:, len(keys) :]
            if self.back_each.norm is not None:
                by_each = by_each / self.back_each.norm[rows].squeeze(2)
            if self.needs[2]:
                self.grad_each.append(by_each[:, :, None] * query[:, None])
        if not (self.needs[0] or self.needs[3]):
            return
        by_query = product(by_keys, keys)
        if self.back_each is not None:
            by_query += product(by_each.to(each.dtype).unsqueeze(1), each).squeeze(1)
        if self.needs[3]:  # the sum of gradient times score, without another look at the scores
            along = (by_query * query).sum() / self.temperature
            before = self.grad_temperature
            self.grad_temperature = -along if before is None else before - along
        if self.needs[0]:
            self.grad_query.append(self.back_query.gradient(by_query, rows))

    def gradients(self) -> list[Tensor | None]:
        """By anchor, positive, negative and temperature."""
        grad_negative = None
        grad_key = None if self.grad_key is None else self.back_key.gradient(self.grad_key)
        if grad_key is not None and len(grad_key) > self.num_positives:
            grad_key, grad_negative = grad_key.tensor_split([self.num_positives])
        elif self.back_each is not None:
            grad_negative = _joined(self.grad_each)
            if grad_negative is not None:
                grad_negative = self.back_each.gradient(grad_negative)
        return [_joined(self.grad_query), grad_key, grad_negative, self.grad_temperature]


def _as_operand(gradient: Tensor, norm: Tensor | None, keys: Tensor) -> Tensor:
    """The gradient ``[c, B]`` over the keys' norms, in the dtype in which it is multiplied."""
    if norm is None:
        return gradient.to(keys.dtype)
    return torch.div(gradient, norm.T, out=torch.empty_like(gradient, dtype=keys.dtype))


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b``, in place."""
    if total is None:
        return product(a, b)
    return total.addmm_(a, b) if b.dtype == total.dtype else total.add_(product(a, b))


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)
