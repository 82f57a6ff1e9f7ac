"""What terms on scores share: one matrix, which of it the teacher scored, InfoNCE of it."""

import inspect
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from sparse_losses._core.checks import check_choice
from sparse_losses._core.token_ids import as_mask
from sparse_losses.distributed import num_ranks, rank
from sparse_losses.losses.info_nce import InfoNCELoss, info_nce_from_scores, info_nce_loss
from sparse_losses.objective.batch import Similarity, SpladeBatch, need

# What InfoNCE of scores is told. Its `gather` exchanges no candidates, as that of InfoNCE does.
FROM_SCORES = inspect.signature(info_nce_from_scores).parameters.keys() - {"gather"}
DEFAULTS = {name: p.default for name, p in inspect.signature(info_nce_loss).parameters.items()}


def told_scores(loss: nn.Module, batch: SpladeBatch) -> dict[str, Any] | None:
    """Return the arguments with which ``info_nce_from_scores`` equals a loss on vectors.

    They are None if no term has computed the scores, or if nothing equals it: every hyperparameter
    that it does not know, but the similarity, must be at its default, and no other code may run.
    """
    hooks = loss._forward_hooks or loss._forward_pre_hooks
    hooks = hooks or loss._backward_hooks or loss._backward_pre_hooks
    if type(loss) is not InfoNCELoss or hooks or "forward" in loss.__dict__ or batch.gather:
        return None
    settings = loss.hyperparameters()
    similarity = settings.pop("similarity")
    told = {name: value for name, value in settings.items() if name in FROM_SCORES}
    for name, value in settings.items():
        is_tensor = isinstance(value, Tensor)  # which no default is
        if name not in told and (is_tensor or value != DEFAULTS.get(name, loss)):
            return None
    if (similarity, False) not in (batch.memory or {}):
        return None
    scores, ids, mask = batch.scores(similarity), batch.positive_ids, _candidate_mask(batch)
    own = torch.eye(*scores.shape, dtype=torch.bool, device=scores.device)
    if ids is not None:
        no_duplicate = nnf.pad(ids[:, None] != ids, (0, scores.shape[1] - len(ids)), value=True)
        mask = no_duplicate | own if mask is None else (no_duplicate | own) & mask
    return {"scores": scores, "positive_mask": own, "candidate_mask": mask, **told}


def taught(batch: SpladeBatch, similarity: Similarity) -> tuple[Tensor, Tensor, str]:
    """Return the scores ``[B, C]`` of the candidates that a teacher scored, and the teacher's.

    A candidate that is left out has ``-inf`` as the teacher's. Then it says which they are:
    ``"all"``, the ``"positives"``, or each anchor's ``"own"``.
    """
    teacher = need(batch, "teacher_scores")
    gather = batch.gather and teacher.shape[1] == _width(batch, num_ranks())
    scores, mask = batch.scores(similarity, gather=gather), _candidate_mask(batch)
    size, wanted, shapes = len(scores), batch.teacher_candidates, {"all": (*scores.shape,)}
    check_choice("batch.teacher_candidates", wanted, ("own", "batch", None))
    if (negative := batch.negative) is not None:
        if not gather:
            shapes["positives"] = size, size
        if len(own := negative.activations) == size:
            shapes["own"] = size, 1 + (own.shape[1] if own.ndim == 3 else 1)
    if wanted is not None:
        shapes = {name: x for name, x in shapes.items() if (name == "own") == (wanted == "own")}
    fitting = [name for name, shape in shapes.items() if shape == teacher.shape]
    if fitting in ([], ["positives", "own"]):
        either = " or ".join(f"{list(shape)} ({name})" for name, shape in shapes.items())
        raise ValueError(
            f"expected `batch.teacher_scores` of shape {either or '[B, 1 + N] (own)'}, and `batch."
            f'teacher_candidates` to be "batch" or "own" where two fit, got {list(teacher.shape)} '
            f"and {wanted!r}"
        )

    def select(x: Tensor) -> Tensor:
        if fitting[0] == "own":
            return own_candidates(x, batch)
        return x if fitting[0] == "all" else x[:, :size]

    teacher = teacher.to(scores.dtype)
    if mask is not None:
        mask = mask if mask.shape == scores.shape else _of_this_rank(mask, batch)
        teacher = teacher.masked_fill(~select(mask), -torch.inf)
    return select(scores), teacher, fitting[0]


def own_candidates(x: Tensor, batch: SpladeBatch) -> Tensor:
    """Select the positive and the anchor's own negatives, ``[B, 1 + N]``, of ``x [B, C]``."""
    negative, size = need(batch, "negative").activations, len(x)
    if negative.ndim == 2 and len(negative) != size:
        raise ValueError(f"expected each anchor's own negatives, got {list(negative.shape)}")
    ranks = 1 if x.shape[1] == _width(batch, 1) else num_ranks()
    first = rank() * size if ranks > 1 else 0
    others = x[:, ranks * size :]
    others = others if negative.ndim == 3 else others[:, first:].diagonal()[:, None]
    return torch.cat([x[:, first:].diagonal()[:, None], others], dim=1)


def own_mask(batch: SpladeBatch) -> Tensor | None:
    """Return ``candidate_mask`` of each anchor's own negatives, 0 in a row without a positive."""
    if (mask := _candidate_mask(batch)) is None:
        return None
    own = own_candidates(mask, batch)
    return own[:, :1] & own[:, 1:]


def _width(batch: SpladeBatch, ranks: int) -> int:
    """Return the number of an anchor's candidates."""
    shape = (0, 0) if batch.negative is None else batch.negative.activations.shape
    return ranks * len(batch.anchor.activations) + shape[-2] * (ranks if len(shape) == 2 else 1)


def _candidate_mask(batch: SpladeBatch) -> Tensor | None:
    if (mask := batch.candidate_mask) is None:
        return None
    expected = [len(mask), _width(batch, num_ranks() if batch.gather else 1)]
    if (received := list(mask.shape)) != expected:
        shape = "`batch.candidate_mask` of shape [B, B + N]"
        raise ValueError(f"expected {shape} = {expected}, got {received}")
    return as_mask("batch.candidate_mask", mask)


def _of_this_rank(mask: Tensor, batch: SpladeBatch) -> Tensor:
    """Select the columns of this rank's candidates from those of all ranks."""
    size, ranks = len(mask), num_ranks()
    positives, others = mask[:, : ranks * size], mask[:, ranks * size :]
    if batch.negative is not None and batch.negative.activations.ndim == 2:
        others = others.chunk(ranks, dim=1)[rank()]
    return torch.cat([positives.chunk(ranks, dim=1)[rank()], others], dim=1)
