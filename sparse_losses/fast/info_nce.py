"""In-batch InfoNCE with its gradient, some rows of the score matrix at a time.

The gradient of a row's loss with respect to its scores is ``sigmoid(gap) * softmax`` over the
negatives and ``-sigmoid(gap)`` at the positive, with ``gap = logsumexp(negatives) - positive``; no
``softmax - 1`` cancels. A block of scores is computed, overwritten by its gradient, multiplied back
and freed: three matrix products in total, without the whole score matrix.

Candidates that are not negatives get the lowest finite score, so that the softmax of a row without
negatives is finite.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.implementations import Arguments, Options
from sparse_losses._core.softmax import softplus
from sparse_losses.distributed import gather_rows, num_ranks, rank, scatter_sum, sum_over_ranks
from sparse_losses.fast.scores import DenseScores

__all__ = [
    "blockwise_info_nce",
    "contrast",
    "dense_unsupported_reason",
    "direct_info_nce",
    "in_both_directions",
    "info_nce_of_scores",
    "losses",
    "own_gradient_unsupported_reason",
    "rows_of_a_block",
    "softmax",
    "too_many_scores",
]

Gradients = list[Tensor | None]


def own_gradient_unsupported_reason(arguments: Arguments, options: Options) -> str | None:
    """Return why the ways with their own gradient do not support the call, or ``None``."""
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
        batch = anchor.shape[0] * (num_ranks() if options["gather"] else 1)
        if options["positive_ids"] is not None or batch < 2:
            return "a negative in every row"
    kind = torch.finfo(torch.float64 if anchor.dtype == torch.float64 else torch.float32)
    if not isinstance(temperature, Tensor) and not kind.tiny <= temperature <= kind.max:
        return f"`temperature` from {kind.tiny:.2g} to {kind.max:.2g}, got {temperature},"
    if isinstance(temperature, Tensor) and temperature.device != anchor.device:
        return f"`temperature` on {anchor.device}, where `anchor` is, got {temperature.device}"
    return None


def dense_unsupported_reason(arguments: Arguments, options: Options) -> str | None:
    """Like ``own_gradient_unsupported_reason``, but tensors must also be dense."""
    if any(isinstance(x, Tensor) and x.layout != torch.strided for x in arguments):
        return "dense tensors"
    return own_gradient_unsupported_reason(arguments, options)


def too_many_scores(arguments: Arguments, options: Options) -> bool:
    """Whether the full score matrix is larger than a block."""
    anchor, _, negative, _ = arguments
    num_rows: int = anchor.shape[0]
    batch = num_rows * (num_ranks() if options["gather"] else 1)
    scores = num_rows * (batch + (0 if negative is None else negative.shape[-2]))
    return scores > most_scores(anchor.device)


def most_scores(device: torch.device) -> int:
    """Return the scores per block: 8 MB in fp32 on a CPU, else 256 MB, as launches cost time."""
    return 1 << 21 if device.type == "cpu" else 1 << 26


def direct_info_nce(
    needs: Sequence[bool], *arguments: Any, **options: Any
) -> tuple[Tensor, Gradients]:
    """Return value and gradients of InfoNCE; all scores are held at once."""
    return in_both_directions(contrast, needs, *arguments, **options)


def blockwise_info_nce(
    needs: Sequence[bool], *arguments: Any, **options: Any
) -> tuple[Tensor, Gradients]:
    """Return value and gradients of InfoNCE; some rows of the scores are held at a time."""
    return in_both_directions(
        functools.partial(contrast, rows_at_once=rows_of_a_block), needs, *arguments, **options
    )


def in_both_directions(
    one_direction: Callable[..., tuple[Tensor, Gradients]],
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
    """Call ``one_direction`` once per direction, or once for both without ``gather``.

    With ``gather`` this rank's rows are the queries and all ranks' rows the keys. DDP divides
    gradients by the number of ranks W, so they are returned W times as large. All keys are
    candidates: ``own_gradient_unsupported_reason`` excludes ``in_batch=False`` and ``positive_mask``, which are
    parameters only because every way is called with all options of the loss.
    """
    contrast = functools.partial(one_direction, cosine=similarity == "cosine", decoupled=decoupled)
    batch, ranks = anchor.shape[0], num_ranks() if gather else 1
    # The weight of one row's gradient; a mean divides by B here and by W through DDP.
    share = 1 / batch if reduction == "mean" else float(ranks)
    if symmetric:
        share /= 2
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
    """Return the sum of the row losses times ``share``, and the gradients of the four tensors.

    ``symmetric`` needs ``negative=None``. There may be more positives (and ids) than anchors: the
    positive of the first anchor has index ``first``. ``rows_at_once`` returns how many rows of
    scores are held (default: all). ``kind`` computes the products (default: ``DenseScores``).
    """
    batch = anchor.shape[0]
    scores = (kind or DenseScores)(
        needs, anchor, positive, negative, temperature, cosine, positive_ids is not None
    )
    share_of_scores = share / temperature
    step = rows_at_once(anchor, positive) if rows_at_once else batch
    chunks = [slice(i, min(i + step, batch)) for i in range(0, batch, step)]
    values = []

    if symmetric:  # the other direction, with positives as queries
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
    """Return the rows per block; each row holds its scores and vectors of the inputs' width."""
    most = most_scores(anchor.device)
    return min(max(most // (len(positive) + anchor.shape[1]), 1), len(anchor))


def _own(block: Tensor, rows: slice, first: int) -> Tensor:
    """Return a view of the rows' own positives ``[c]`` in their scores ``[c, B + N]``."""
    return block.diagonal(rows.start + first)


def _hide(block: Tensor, rows: slice, positive_ids: Tensor | None, first: int) -> Tensor:
    """Overwrite scores that are not of negatives; return the scores of the positives ``[c]``."""
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
    """Return softmax and log-sum-exp in six launches; ``logsumexp`` alone takes nine."""
    probabilities = scores.softmax(dim)
    # The largest probability is exp(0) over the sum of the exponentials. An infinite score makes it
    # NaN; the log-sum-exp is then infinite.
    log_largest = probabilities.amax(dim).log_().nan_to_num_(nan=0.0)
    return probabilities, scores.amax(dim) - log_largest


def losses(total: Tensor, own: Tensor, decoupled: bool) -> tuple[Tensor, Tensor]:
    """Return losses from log-sum-exp and positives' scores, and minus the slope in the latter."""
    gap = total - own
    return (gap, torch.ones_like(gap)) if decoupled else (softplus(gap), gap.sigmoid())


def info_nce_of_scores(
    needs: Sequence[bool],
    scores: Tensor,
    temperature: float | Tensor,
    *,
    symmetric: bool,
    positive_ids: Tensor | None,
    decoupled: bool,
    reduction: str,
) -> tuple[Tensor, Gradients]:
    """Return value of InfoNCE on precomputed scores, and gradients of scores and temperature."""
    share = (1.0 / len(scores) if reduction == "mean" else 1.0) / (2 if symmetric else 1)
    value, (by_scores, *_, by_temperature) = contrast(
        [needs[0], False, False, needs[1]],
        scores,
        scores,
        None,
        temperature,
        cosine=False,
        decoupled=decoupled,
        share=share,
        symmetric=symmetric,
        positive_ids=positive_ids,
        kind=_GivenScores,
    )
    return value, [by_scores, by_temperature]


class _GivenScores:
    """Precomputed scores ``[B, C]``, passed in place of the anchors."""

    def __init__(
        self,
        needs: Sequence[bool],
        scores: Tensor,
        _: Tensor,
        __: None,
        t: float | Tensor,
        *___: bool,
    ) -> None:
        self.needs, self.scores, self.temperature = needs, scores, t
        self.found: Gradients = [None] * 4

    def block(self, rows: slice) -> Tensor:
        """Return the scores divided by the temperature."""
        return self.scores[rows] / self.temperature

    def back(self, rows: slice, gradient: Tensor) -> None:
        """Store the gradient of the scores."""
        if self.needs[3]:
            self.found[3] = -(gradient * self.scores).sum() / self.temperature
        self.found[0] = gradient

    def gradients(self) -> Gradients:
        """Return the gradients of scores and temperature, at the indices of ``contrast``."""
        return self.found
