"""Which candidates' scores a term compares: all of the batch, or each anchor's own."""

import inspect
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from sparse_losses._core.token_ids import as_mask
from sparse_losses.distributed import num_ranks, rank
from sparse_losses.losses.info_nce import InfoNCELoss, info_nce_from_scores, info_nce_loss
from sparse_losses.objective.batch import Similarity, SpladeBatch

# What InfoNCE of scores is told. Its `gather` exchanges no candidates, as that of InfoNCE does.
FROM_SCORES = inspect.signature(info_nce_from_scores).parameters.keys() - {"gather"}
DEFAULTS = {name: p.default for name, p in inspect.signature(info_nce_loss).parameters.items()}


def need(part: Any, name: str, whose: str = " of the batch") -> Any:
    """Return a field that must be there."""
    if (value := getattr(part, name)) is None:
        source = ": BM25Teacher computes them" if name == "teacher_scores" else ""
        if name == "teacher_anchor_scores":
            source = ": SpladeBatch.from_columns(score_anchors=True) computes them"
        raise ValueError(f"expected `{name}`{whose}, got None{source}")
    return value


def told_scores(loss: nn.Module, batch: SpladeBatch) -> dict[str, Any] | None:
    """Return the arguments of ``info_nce_from_scores`` that make it equal to a loss on vectors.

    They are None if no term has computed the scores, or if it cannot be equal: every hyperparameter
    that it does not know, but the similarity, must be at its default, and the module must not run
    other code.
    """
    hooks = loss._forward_hooks, loss._forward_pre_hooks, loss._backward_hooks
    runs_more = any(map(len, (*hooks, loss._backward_pre_hooks))) or "forward" in vars(loss)
    if type(loss) is not InfoNCELoss or runs_more or batch.gather:
        return None
    loss.check_hyperparameters()
    settings = loss.hyperparameters()
    similarity = settings.pop("similarity")
    told = {name: value for name, value in settings.items() if name in FROM_SCORES}
    for name in settings.keys() - told.keys():
        if isinstance(settings[name], Tensor) or settings[name] != DEFAULTS.get(name, loss):
            return None
    if not batch.has_scores(similarity):
        return None
    scores, ids = batch.scores(similarity), batch.positive_ids
    own = torch.eye(*scores.shape, dtype=torch.bool, device=scores.device)
    mask = None if batch.candidate_mask is None else _candidate_mask(batch)
    if ids is not None:
        others = nnf.pad(ids[:, None] != ids, (0, scores.shape[1] - len(ids)), value=True) | own
        mask = others if mask is None else others & mask
    return {"scores": scores, "positive_mask": own, "candidate_mask": mask, **told}


def own_candidates(x: Tensor, batch: SpladeBatch) -> Tensor:
    """Select the positive and the anchor's own negatives, ``[B, 1 + N]``, of ``x [B, C]``."""
    _check_own(batch)
    size, ranks = len(x), 1 if x.shape[1] == _width(batch, 1) else num_ranks()
    first = rank() * size if ranks > 1 else 0
    others = x[:, ranks * size :]
    if batch.negative is not None and batch.negative.activations.ndim == 2:
        others = others[:, first:].diagonal()[:, None]
    return torch.cat([x[:, first:].diagonal()[:, None], others], dim=1)


def own_mask(batch: SpladeBatch) -> Tensor | None:
    """Return ``candidate_mask`` of each anchor's own negatives, all 0 in a row without positive."""
    _check_own(batch)
    if batch.candidate_mask is None:
        return None
    own = own_candidates(_candidate_mask(batch), batch)
    return own[:, :1] & own[:, 1:]


def taught(batch: SpladeBatch, similarity: Similarity) -> tuple[Tensor, Tensor, str]:
    """Return the scores ``[B, C]`` of the candidates that a teacher scored, and the teacher's.

    A candidate that is left out has ``-inf`` as the teacher's. Then it says which these are:
    ``"all"``, the ``"positives"``, or each anchor's ``"own"``.
    """
    teacher = need(batch, "teacher_scores")
    gather = batch.gather and teacher.shape[1] == _width(batch, num_ranks())
    scores = batch.scores(similarity, gather=gather)
    scored, teacher = _scored(batch, scores, teacher, gather), teacher.to(scores.dtype)

    def select(x: Tensor) -> Tensor:
        if scored == "own":
            return own_candidates(x, batch)
        return x if scored == "all" else x[:, : len(x)]

    if batch.candidate_mask is not None:
        mask = _candidate_mask(batch)
        if mask.shape != scores.shape:  # of all ranks' candidates
            mask = _of_this_rank(mask, batch)
        teacher = teacher.masked_fill(~select(mask), -torch.inf)
    return select(scores), teacher, scored


def _scored(batch: SpladeBatch, scores: Tensor, teacher: Tensor, gather: bool) -> str:
    """Tell by its shape which candidates a teacher scored."""
    size, wanted, shapes = len(scores), batch.teacher_candidates, {}
    negative = None if batch.negative is None else batch.negative.activations
    if wanted != "own":
        shapes["all"] = (*scores.shape,)
        if negative is not None and not gather:
            shapes["positives"] = size, size
    if wanted != "batch" and negative is not None and len(negative) == size:
        shapes["own"] = size, 1 + (negative.shape[1] if negative.ndim == 3 else 1)
    fitting = [name for name, shape in shapes.items() if shape == teacher.shape]
    if fitting == ["positives", "own"]:
        raise ValueError(
            'expected `batch.teacher_candidates` to be "batch" or "own", got None: `teacher_scores`'
            f" {list(teacher.shape)} fit the batch's positives and each anchor's own"
        )
    if not fitting:
        either = " or ".join(f"{list(shape)} ({name})" for name, shape in shapes.items())
        expected = either or "[B, 1 + N] with own negatives"
        received = list(teacher.shape)
        raise ValueError(f"expected `batch.teacher_scores` of shape {expected}, got {received}")
    return fitting[0]


def _width(batch: SpladeBatch, ranks: int) -> int:
    """Return the number of an anchor's candidates."""
    width = ranks * len(batch.anchor.activations)
    if batch.negative is not None:
        shape = batch.negative.activations.shape
        width += shape[-2] * (ranks if len(shape) == 2 else 1)
    return width


def _candidate_mask(batch: SpladeBatch) -> Tensor:
    mask, width = batch.candidate_mask, _width(batch, num_ranks() if batch.gather else 1)
    assert mask is not None
    if mask.shape[1] != width:
        raise ValueError(
            f"expected `batch.candidate_mask` of shape [B, B + N] = [{len(mask)}, {width}], got "
            f"{list(mask.shape)}"
        )
    return as_mask("batch.candidate_mask", mask)


def _of_this_rank(mask: Tensor, batch: SpladeBatch) -> Tensor:
    """Select the columns of this rank's candidates from those of all ranks."""
    size, negative = len(mask), batch.negative
    positives, others = mask.tensor_split([num_ranks() * size], dim=1)
    if negative is not None and negative.activations.ndim == 2:
        others = others.tensor_split(num_ranks(), dim=1)[rank()]
    return torch.cat([positives[:, rank() * size :][:, :size], others], dim=1)


def _check_own(batch: SpladeBatch) -> None:
    size = len(batch.anchor.activations)
    shape = (size, 0) if batch.negative is None else batch.negative.activations.shape
    if len(shape) == 2 and shape[0] != size:
        raise ValueError(
            "expected each anchor's own negatives, [B, N, V] or one each [B, V], with B = "
            f"{size}, got {list(shape)}"
        )
