"""Losses of the objective that share one matrix of scores of anchors and candidates."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparse_losses._core.implementations import Arguments, Implementation, Options, always, compute
from sparse_losses._core.reduction import Reduction
from sparse_losses.distributed import rank, sum_over_ranks
from sparse_losses.fast.info_nce import info_nce_of_scores, own_gradient_unsupported_reason
from sparse_losses.losses import info_nce_from_scores
from sparse_losses.objective.batch import SpladeBatch, Texts

__all__ = [
    "candidates",
    "info_nce_of_shared_scores",
    "over_pairs",
    "own_candidates",
    "scored_candidates",
    "takes_scores",
]


def info_nce_of_shared_scores(
    scores: Tensor, temperature: float | Tensor, impl: str, **options: Any
) -> Tensor:
    """Compute InfoNCE of scores ``[B, C]`` whose first B columns are the rows' positives."""
    return compute(_definition, IMPLEMENTATIONS, impl, (scores, temperature), options)


def _definition(
    scores: Tensor,
    temperature: float | Tensor,
    *,
    symmetric: bool,
    positive_ids: Tensor | None,
    decoupled: bool,
    reduction: Reduction,
) -> Tensor:
    """Apply the row formula with the diagonal as positives."""
    scores, size = scores / temperature, len(scores)
    is_positive = torch.eye(*scores.shape, dtype=torch.bool, device=scores.device)
    candidates = torch.ones_like(is_positive)
    if positive_ids is not None:
        same = positive_ids[:, None] == positive_ids
        candidates[:, :size] = ~same | is_positive[:, :size]
    of = functools.partial(info_nce_from_scores, decoupled=decoupled, reduction=reduction)
    value = of(scores, is_positive, candidates)
    return (value + of(scores.T, is_positive.T, candidates.T)) / 2 if symmetric else value


def _why_not_direct(arguments: Arguments, options: Options) -> str | None:
    scores, temperature = arguments
    dense = {**options, "in_batch": True, "positive_mask": None, "gather": False}
    return own_gradient_unsupported_reason((scores, None, None, temperature), dense)


IMPLEMENTATIONS = (
    Implementation(
        "direct",
        unsupported_reason=_why_not_direct,
        is_preferred=always,
        compute=info_nce_of_scores,
    ),
)


def over_pairs(
    loss: Callable[..., Tensor],
    is_pair: Tensor,
    columns: Sequence[Tensor],
    *,
    is_mean: bool,
    gathers: bool,
) -> Tensor:
    """Compute a loss of MarginMSE's four columns over the pairs of a mask only.

    Other entries are 0 on both sides and are not counted: selecting pairs would force a wait.
    """
    flat = [torch.where(is_pair, column.expand_as(is_pair), 0.0).flatten() for column in columns]
    value = loss(*flat)
    if not is_mean:
        return value
    counted = torch.stack([torch.ones_like(is_pair).sum(), is_pair.sum()]).to(value.dtype)
    of_all, of_pairs = sum_over_ranks(counted) if gathers else counted
    mean: Tensor = value * (of_all / of_pairs.clamp(min=1))
    return mean


def takes_scores(loss: nn.Module) -> bool:
    """Whether the loss's class takes scores, and no hook or own ``forward`` would be skipped."""
    has_hooks = loss._forward_hooks or loss._forward_pre_hooks or "forward" in loss.__dict__
    return "takes_scores" in type(loss).__dict__ and not has_hooks


def own_candidates(scores: Tensor, negative: Texts | None, ranks: int) -> Tensor:
    """Select the scores of the positive and the anchor's own negatives, ``[B, 1 + N]``."""
    size = scores.shape[0]
    first = rank() * size if ranks > 1 else 0
    others = scores[:, ranks * size :]
    if negative is not None and negative.activations.ndim == 2:
        others = others[:, first:].diagonal()[:, None]
    return torch.cat([scores[:, first:].diagonal()[:, None], others], dim=1)


COLUMNS = {
    "all": "every anchor with all positives and negatives",
    "positives": "with the positives alone",
    "own": "with its own positive and negatives",
}


def candidates(scores: Tensor, batch: SpladeBatch, came: torch.Size, ranks: int) -> Tensor:
    """Select the student's scores of the candidates that the teacher scored."""
    scored = scored_candidates(scores, batch, came, ranks)
    if scored == "own":
        return own_candidates(scores, batch.negative, ranks)
    return scores if scored == "all" else scores[:, : len(scores)]


def scored_candidates(scores: Tensor, batch: SpladeBatch, came: torch.Size, ranks: int) -> str:
    """Return what the teacher scored: ``"all"`` candidates, ``"positives"``, or each one's own."""
    size, wanted = len(scores), batch.teacher_candidates
    negative = None if batch.negative is None else batch.negative.activations
    shapes: dict[str, tuple[int, ...]] = {}
    if wanted != "own":
        shapes["all"] = tuple(scores.shape)
        if negative is not None and ranks == 1:
            shapes["positives"] = (size, size)
    if wanted != "batch" and negative is not None and len(negative) == size:
        shapes["own"] = (size, 1 + (negative.shape[1] if negative.ndim == 3 else 1))
    fitting = [name for name, shape in shapes.items() if shape == came]
    if fitting == ["positives", "own"]:
        raise ValueError(
            'expected `batch.teacher_candidates` to be "batch" or "own", got None: '
            f"`teacher_scores` {list(came)} fit the batch's positives and each anchor's own"
        )
    if not fitting:
        found = " or ".join(f"{list(shape)} ({COLUMNS[name]})" for name, shape in shapes.items())
        raise ValueError(
            f"expected `batch.teacher_scores` of shape {found or '[B, 1 + N] with own negatives'}"
            f", got {list(came)}"
        )
    return fitting[0]
