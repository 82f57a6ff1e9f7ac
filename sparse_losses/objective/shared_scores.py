"""Losses of the objective that share one matrix of scores of anchors and candidates."""

import torch
from torch import Tensor, nn

from sparse_losses._core.precision import compute_dtype
from sparse_losses._core.reduction import Reduction, reduce
from sparse_losses._core.similarity import normalize
from sparse_losses._core.softmax import diagonal, one_positive_rows
from sparse_losses.distributed import num_ranks, rank
from sparse_losses.objective.batch import SpladeBatch, Texts


def shared_scores(query: Tensor, key: Tensor, negative: Tensor | None, *, cosine: bool) -> Tensor:
    """Return scores ``[B, C]`` of each query with all keys, then the negatives; differentiable.

    Negatives are ``[N, D]``, shared by all queries, or ``[B, N, D]``, ``N`` for each query.
    """
    named = {"query": query, "key": key, "negative": negative}
    dtype = compute_dtype(**named)
    inputs = [x.to(dtype) for x in named.values() if x is not None]
    if cosine:
        unit = normalize(inputs[0])
        inputs = [unit, *(unit if x is inputs[0] else normalize(x) for x in inputs[1:])]
    query, key, *others = inputs
    scores = [query @ key.T]
    for other in others:
        is_shared = other.ndim == 2
        scores.append(query @ other.T if is_shared else torch.einsum("bd,bnd->bn", query, other))
    return torch.cat(scores, dim=1) if others else scores[0]


def info_nce_of_shared_scores(
    scores: Tensor,
    positive_ids: Tensor | None,
    *,
    symmetric: bool,
    decoupled: bool,
    reduction: Reduction,
) -> Tensor:
    """Compute InfoNCE of scores ``[B, C]`` whose first B columns are the rows' positives.

    ``info_nce_from_scores``, which takes several positives, needs more launches.
    """
    absent = torch.eye(*scores.shape, dtype=torch.bool, device=scores.device)  # no negatives
    if positive_ids is not None:
        absent[:, : len(scores)] |= positive_ids[:, None] == positive_ids
    valid = None
    if decoupled:  # a row without negatives is not valid
        valid = ~absent.all(-1)
        scores = torch.where(valid[:, None], scores, 0.0)  # or 0 * NaN would reach the gradient
    own = diagonal(scores)
    values = one_positive_rows(scores, own, absent, decoupled=decoupled)
    if symmetric:  # the mask is symmetric
        values = (values + one_positive_rows(scores.T, own, absent, decoupled=decoupled)) / 2
    return reduce(values, reduction, valid)


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


def of_this_rank(mask: Tensor, batch: SpladeBatch) -> Tensor:
    """Select the columns of this rank's candidates from those of all ranks."""
    size, negative = len(mask), batch.negative
    positives, others = mask.tensor_split([num_ranks() * size], dim=1)
    if negative is not None and negative.activations.ndim == 2:  # those of all ranks
        others = others.tensor_split(num_ranks(), dim=1)[rank()]
    return torch.cat([positives[:, rank() * size :][:, :size], others], dim=1)


def candidates(scores: Tensor, batch: SpladeBatch, shape: torch.Size, ranks: int) -> Tensor:
    """Select the student's scores of the candidates that the teacher scored."""
    scored = scored_candidates(scores, batch, shape, ranks)
    if scored == "own":
        return own_candidates(scores, batch.negative, ranks)
    return scores if scored == "all" else scores[:, : len(scores)]


def scored_candidates(scores: Tensor, batch: SpladeBatch, shape: torch.Size, ranks: int) -> str:
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
    fitting = [name for name, expected in shapes.items() if expected == shape]
    if fitting == ["positives", "own"]:
        raise ValueError(
            'expected `batch.teacher_candidates` to be "batch" or "own", got None: '
            f"`teacher_scores` {list(shape)} fit the batch's positives and each anchor's own"
        )
    if not fitting:
        expected = " or ".join(f"{list(x)} ({name})" for name, x in shapes.items())
        expected = expected or "[B, 1 + N] with own negatives"
        raise ValueError(f"expected `batch.teacher_scores` of shape {expected}, got {list(shape)}")
    return fitting[0]
