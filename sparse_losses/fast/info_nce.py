"""In-batch InfoNCE with its gradient: all scores at once, or some rows of them at a time.

The gradient of a row's loss with respect to its scores is ``sigmoid(gap) * softmax`` over the
negatives and ``-sigmoid(gap)`` at the positive, with ``gap = logsumexp(negatives) - positive``; no
``softmax - 1`` cancels. The positive's score is subtracted from the row before the log-sum-exp, so
that large scores that differ little keep their digits. A block of scores is computed, overwritten
by its gradient, multiplied back and freed: three matrix products in total.

Candidates that are not negatives get the lowest finite score, so that the softmax of a row without
negatives is finite.
"""

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.softmax import softplus
from sparse_losses.distributed import gather_rows, num_ranks, rank, scatter_sum, sum_over_ranks
from sparse_losses.fast.scores import DenseScores, Scores

Gradients = dict[str, Tensor | None]


def most_scores(device: torch.device) -> int:
    """Return the scores per block: 8 MB in fp32 on a CPU, else 256 MB, as launches cost time."""
    return 1 << 21 if device.type == "cpu" else 1 << 26


def rows_of_a_block(anchor: Tensor, positive: Tensor) -> int:
    """Return the rows per block; each row holds its scores and vectors of the inputs' width."""
    most = most_scores(anchor.device)
    return min(max(most // (len(positive) + anchor.shape[1]), 1), len(anchor))


def direct_info_nce(needs: Set[str], **arguments: Any) -> tuple[Tensor, Gradients]:
    """Return value and gradients of InfoNCE; all scores are held at once."""
    return compute_info_nce(needs, DenseScores, in_blocks=False, **arguments)


def blockwise_info_nce(needs: Set[str], **arguments: Any) -> tuple[Tensor, Gradients]:
    """Return value and gradients of InfoNCE; some rows of the scores are held at a time."""
    return compute_info_nce(needs, DenseScores, in_blocks=True, **arguments)


def compute_info_nce(
    needs: Set[str],
    make_scores: Callable[..., Scores],
    *,
    in_blocks: bool,
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: float | Tensor,
    similarity: str,
    symmetric: bool,
    positive_ids: Tensor | None,
    decoupled: bool,
    gather: bool,
    reduction: str,
    **_: Any,  # the options that only the definition supports
) -> tuple[Tensor, Gradients]:
    """Return value and gradients, by the scores that ``make_scores`` makes.

    With ``gather`` this rank's rows are the queries and all ranks' rows the keys. DDP divides
    gradients by the number of ranks W, so they are returned W times as large.
    """
    batch, ranks = len(anchor), num_ranks() if gather else 1
    # The weight of one row's gradient; a mean divides by B here and by W through DDP.
    weight = (1 / batch if reduction == "mean" else float(ranks)) / (2 if symmetric else 1)
    options: dict[str, Any] = {
        "temperature": temperature,
        "cosine": similarity == "cosine",
        "hide_nan": positive_ids is not None,
    }
    if symmetric and negative is None and ranks == 1 and not in_blocks:
        scores = make_scores(_renamed(needs, "anchor", "positive"), anchor, positive, **options)
        value = _both_directions(scores, positive_ids, decoupled, weight / temperature, bool(needs))
        gradients = scores.gradients()
        gradients["anchor"], gradients["positive"] = gradients.pop("query"), gradients.pop("key")
        return value * weight, gradients
    is_shared = negative is not None and negative.ndim == 2
    ids = positive_ids
    if gather:
        negative = gather_rows(negative) if negative is not None and is_shared else negative
        ids = None if ids is None else gather_rows(ids)
    sides = {"anchor": anchor, "positive": positive}
    total, values = Gradients(), []
    for query, key in (("anchor", "positive"), ("positive", "anchor"))[: 2 if symmetric else 1]:
        keys = gather_rows(sides[key]) if gather else sides[key]
        scores = make_scores(_renamed(needs, query, key), sides[query], keys, negative, **options)
        values += _one_direction(
            scores,
            ids,
            decoupled,
            weight / temperature,
            bool(needs),
            num_rows=batch,
            rows_at_once=rows_of_a_block(sides[query], keys) if in_blocks else batch,
            first=rank() * batch if gather else 0,
        )
        for name, gradient in scores.gradients().items():
            if gradient is None:
                continue
            if gather and (name == "key" or (name == "negative" and is_shared)):
                gradient = scatter_sum(gradient)
            name = {"query": query, "key": key}.get(name, name)
            before = total.get(name)
            total[name] = gradient if before is None else before + gradient
    value = values[0] if len(values) == 1 else torch.stack(values).sum()
    return (sum_over_ranks(value) if gather else value) * (weight / ranks), total


def _renamed(needs: Set[str], query: str, key: str) -> frozenset[str]:
    """Return the names of ``needs`` as one direction has them."""
    return frozenset({query: "query", key: "key"}.get(name, name) for name in needs)


def _one_direction(
    scores: Scores,
    ids: Tensor | None,
    decoupled: bool,
    weight: float | Tensor,
    needs_gradient: bool,
    *,
    num_rows: int,
    rows_at_once: int,
    first: int,
) -> list[Tensor]:
    """Return the sum of the losses of each block; ``scores`` keeps the gradients.

    The positive of the first query is the key with index ``first``. ``weight`` is that of a row
    over the temperature.
    """
    values = []
    for start in range(0, num_rows, rows_at_once):
        rows = slice(start, min(start + rows_at_once, num_rows))
        block, place = scores.block(rows), start + first
        own_ids = None if ids is None else ids[place : rows.stop + first]
        own = block.diagonal(place).clone()
        _hide(block.sub_(own[:, None]), place, own_ids, ids)
        losses, gradient, slope = _terms(block, own, 1, decoupled)
        values.append(losses.sum())
        if needs_gradient:
            slope = slope.mul_(weight)
            gradient.mul_(slope[:, None]).diagonal(place).sub_(slope)
            scores.backward(rows, gradient)
    return values


def _both_directions(
    scores: Scores,
    ids: Tensor | None,
    decoupled: bool,
    weight: float | Tensor,
    needs_gradient: bool,
) -> Tensor:
    """Return the sum of all losses of both directions, which share one product."""
    rows = slice(None)
    block = scores.block(rows)
    own = block.diagonal().clone()
    by_column = block - own
    by_row = block.sub_(own[:, None])
    for differences in (by_row, by_column):
        _hide(differences, 0, ids, ids)
    losses, gradient, slope = _terms(by_row, own, 1, decoupled)
    more, gradient_by_column, slope_by_column = _terms(by_column, own, 0, decoupled)
    if needs_gradient:
        slope, slope_by_column = slope.mul_(weight), slope_by_column.mul_(weight)
        gradient.mul_(slope[:, None]).add_(gradient_by_column.mul_(slope_by_column))
        gradient.diagonal().sub_(slope.add_(slope_by_column))
        scores.backward(rows, gradient)
    return losses.add_(more).sum()


def _hide(block: Tensor, place: int, own_ids: Tensor | None, ids: Tensor | None) -> None:
    """Overwrite what is no negative: the positives and their duplicates."""
    lowest = torch.finfo(block.dtype).min
    block.diagonal(place).fill_(lowest)
    if own_ids is not None and ids is not None:
        block[:, : len(ids)].masked_fill_(own_ids[:, None] == ids, lowest)


def _terms(
    differences: Tensor, own: Tensor, dim: int, decoupled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, softmax over the negatives, and minus the slope at the positives."""
    probabilities, gap = softmax(differences, dim)
    gap.add_(own - own)  # the NaN of a positive without a negative
    if decoupled:
        return gap, probabilities, torch.ones_like(gap)
    return softplus(gap), probabilities, gap.sigmoid()


def softmax(scores: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return softmax and log-sum-exp in six launches; ``logsumexp`` alone takes nine."""
    probabilities = scores.softmax(dim)
    # The largest probability is exp(0) over the sum of the exponentials. An infinite score makes it
    # NaN; the log-sum-exp is then infinite.
    log_largest = probabilities.amax(dim).log_().nan_to_num_(nan=0.0)
    return probabilities, scores.amax(dim) - log_largest
