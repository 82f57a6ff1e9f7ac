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
from sparse_losses.objective.batch import Similarity, SpladeBatch, need, score

# Settings that InfoNCE of scores takes over. Not `gather`: it exchanges no candidates there.
FROM_SCORES = inspect.signature(info_nce_from_scores).parameters.keys() - {"gather"}
DEFAULTS = {name: p.default for name, p in inspect.signature(info_nce_loss).parameters.items()}


def told_scores(loss: nn.Module, batch: SpladeBatch) -> dict[str, Any] | None:
    """Return the arguments with which ``info_nce_from_scores`` equals a loss on vectors.

    Return None if no term has computed the scores, if the loss has hooks, or if a hyperparameter
    that scores cannot express is not at its default.
    """
    if type(loss) is not InfoNCELoss or loss._forward_hooks or loss._forward_pre_hooks:
        return None
    settings = loss.hyperparameters()
    similarity = settings.pop("similarity")
    if batch.gather or similarity not in (batch.memory or {}):
        return None
    told = {name: settings.pop(name) for name in FROM_SCORES & settings.keys()}
    # A tensor never counts as a default, nor does an option that InfoNCE itself lacks.
    if any(isinstance(x, Tensor) or x != DEFAULTS.get(name, loss) for name, x in settings.items()):
        return None
    scores, ids, mask = batch.scores(similarity), batch.positive_ids, candidate_mask(batch)
    own = torch.eye(*scores.shape, dtype=torch.bool, device=scores.device)
    if ids is not None:
        no_duplicate = nnf.pad(ids[:, None] != ids, (0, scores.shape[1] - len(ids)), value=True)
        mask = no_duplicate | own if mask is None else (no_duplicate | own) & mask
    return {"scores": scores, "positive_mask": own, "candidate_mask": mask, **told}


def taught(batch: SpladeBatch, similarity: Similarity, of: str) -> tuple[Tensor, Tensor]:
    """Return scores ``[B, C]`` and a teacher's, which are ``-inf`` for what is left out.

    They are of the ``"candidates"`` that it scored, of the positive and the anchor's ``"own"``
    negatives, or of all ``"anchors"``.
    """
    if of == "anchors":
        student = score(batch.anchor.activations, similarity=similarity)
        return student, need(batch, "teacher_anchor_scores")
    teacher, wanted = need(batch, "teacher_scores"), batch.teacher_candidates
    scores, mask = batch.scores(similarity), candidate_mask(batch)
    check_choice("batch.teacher_candidates", wanted, ("own", "batch", None))
    columns, size = {"all": scores.shape[1]}, len(scores)
    if batch.negative is not None:
        shape = batch.negative.activations.shape
        columns |= {} if of == "own" else {"positives": size}
        columns |= {"own": 1 + (shape[1] if len(shape) == 3 else 1)} if shape[0] == size else {}
    if wanted is not None:
        columns = {name: n for name, n in columns.items() if (name == "own") == (wanted == "own")}
    fitting = [name for name, number in columns.items() if number == teacher.shape[1]]
    if fitting in ([], ["positives", "own"]):
        either = " or ".join(f"[{size}, {number}] ({name})" for name, number in columns.items())
        raise ValueError(
            f"expected `batch.teacher_scores` of shape {either or '[B, 1 + N] (own)'}, and `batch."
            f'teacher_candidates` to be "batch" or "own" where two fit, got {list(teacher.shape)} '
            f"and {wanted!r}"
        )

    def select(x: Tensor) -> Tensor:
        is_own = "own" in (of, fitting[0])
        return own_candidates(x, batch) if is_own else x[:, : teacher.shape[1]]

    student, its_scores = select(scores), teacher.to(scores.dtype)
    if fitting[0] == "all":
        its_scores = select(its_scores)
    if mask is not None:
        its_scores = its_scores.masked_fill(~select(mask), -torch.inf)
    return student, its_scores


def own_candidates(x: Tensor, batch: SpladeBatch) -> Tensor:
    """Select the positive and the anchor's own negatives, ``[B, 1 + N]``, of ``x [B, B + N]``."""
    negative, size = need(batch, "negative").activations, len(x)
    if negative.ndim == 2 and len(negative) != size:
        raise ValueError(f"expected each anchor's own negatives, got {list(negative.shape)}")
    others = x[:, size:] if negative.ndim == 3 else x[:, size:].diagonal()[:, None]
    return torch.cat([x.diagonal()[:, None], others], dim=1)


def candidate_mask(batch: SpladeBatch) -> Tensor | None:
    """Return ``candidate_mask`` of this rank's candidates; with ``gather`` it has all ranks'."""
    if (mask := batch.candidate_mask) is None:
        return None
    size, ranks = len(mask), num_ranks() if batch.gather else 1
    shape = (0, 0) if batch.negative is None else batch.negative.activations.shape
    sections = [ranks * size, shape[-2] * (ranks if len(shape) == 2 else 1)]
    if mask.shape[1] != sum(sections):
        expected = f"`batch.candidate_mask` of shape [B, B + N] = {[size, sum(sections)]}"
        raise ValueError(f"expected {expected}, got {list(mask.shape)}")
    mask = as_mask("batch.candidate_mask", mask)
    if ranks == 1:
        return mask
    positives, others = torch.split(mask, sections, 1)
    others = others.chunk(ranks, 1)[rank()] if len(shape) == 2 and shape[0] else others
    return torch.cat([positives.chunk(ranks, 1)[rank()], others], 1)
