"""What each loss computes from a trainer's columns: anchors, positives, negatives, and labels."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import sparse_losses as sl
from sparse_losses._core.precision import compute_dtype
from sparse_losses._core.similarity import normalize
from sparse_losses._core.token_ids import as_mask
from sparse_losses.distributed import gather_rows, num_ranks
from sparse_losses.objective.teacher import Teacher, score_candidates


class Columns(NamedTuple):
    """The columns of a batch, their labels, and the options of ``SentenceTransformersLoss``.

    ``there`` is a mask ``[B, n]`` of the negatives that are there, ``None`` if all are.
    """

    texts: Sequence[sl.Texts]
    labels: Tensor | None
    there: Tensor | None = None
    similarity: str = "dot"
    labels_are_positive_ids: bool = False
    teacher: Teacher | None = None
    prototype: Tensor | None = None

    @property
    def vectors(self) -> list[Tensor]:
        """The vectors of the columns."""
        return [texts.activations for texts in self.texts]


def compute_loss(loss: nn.Module, columns: Columns) -> Tensor | sl.ObjectiveOutput:
    """Return the value of a loss, or the output of an objective."""
    least, compute = next(COMPUTE[kind] for kind in type(loss).__mro__ if kind in COMPUTE)
    name, count = type(loss).__name__, len(columns.texts)
    if count < least:
        kinds = ", ".join(("anchors", "positives", "negatives")[:least])
        raise ValueError(f"{name} expected {least} columns or more ({kinds}), got {count}")
    value: Tensor | sl.ObjectiveOutput = compute(loss, columns)
    return value


def texts_of_column(activations: Tensor, column: Mapping[str, Any]) -> sl.Texts:
    """Return the vectors of a column, with its token ids if they have one row per vector."""
    ids, mask = column.get("input_ids"), column.get("attention_mask")
    for x in (ids, mask):
        if x is None or x.ndim != 2 or len(x) != len(activations):
            return sl.Texts(activations)
    return sl.Texts(activations, ids, mask)


def has_tokens(column: Mapping[str, Any], special_token_ids: Tensor) -> Tensor:
    """Mask ``[B]`` of the texts with a token of their own, beside special ones and a prompt's."""
    ids, attended = column["input_ids"], as_mask("attention_mask", column["attention_mask"])
    own = attended & ~torch.isin(ids, special_token_ids.to(ids.device))
    if (prompt := column.get("prompt_length")) is not None:  # a number, or the same in every row
        own &= attended.cumsum(1) > (prompt.flatten()[:1] if torch.is_tensor(prompt) else prompt)
    return own.any(1)


def _candidate_mask(columns: Columns, *, own: bool, in_batch: bool, gather: bool) -> Tensor | None:
    """Return the mask of the positives, and of a row's own negatives or those of all rows."""
    if (there := columns.there) is None:
        return None
    keys = len(there) * (num_ranks() if gather else 1) if in_batch else 1
    all_rows = gather_rows(there.T.flatten(), gather).expand(len(there), -1)
    return torch.cat([there.new_ones(len(there), keys), there if own else all_rows], 1)


def _regularizer(loss: Any, columns: Columns) -> Any:
    return loss(torch.cat(columns.vectors))


def _self_reconstruction(loss: Any, columns: Columns) -> Any:
    joined = reduce(sl.Texts.join, columns.texts)
    return loss(joined.activations, *_ids_and_mask(type(loss).__name__, joined))


def _positive_activation(loss: Any, columns: Columns) -> Any:
    anchor, positive, *_ = columns.texts
    return loss(anchor.activations, *_ids_and_mask(type(loss).__name__, positive))


def _nws(loss: Any, columns: Columns) -> Any:
    (query, *keys), labels = columns.vectors, columns.labels
    if labels is None or len(keys) > 1:
        raise ValueError(
            f"{type(loss).__name__} expected labels [B, L] and one column or two (queries, keys), "
            f"got {_shape(labels)} and {1 + len(keys)} columns"
        )
    options = {"key": keys[0], "key_labels": labels} if keys else {}
    return loss(query, labels, columns.prototype, **options)


def _info_nce(loss: Any, columns: Columns) -> Any:
    anchor, positive, *negatives = columns.vectors
    positive_ids = columns.labels if columns.labels_are_positive_ids else None
    negative = None
    if negatives:
        negative = torch.cat(negatives) if loss.in_batch else torch.stack(negatives, 1)
    where = {"own": not loss.in_batch, "in_batch": loss.in_batch, "gather": loss.gather}
    mask = _candidate_mask(columns, **where)
    return loss(anchor, positive, negative, positive_ids=positive_ids, candidate_mask=mask)


def _n_pair(loss: Any, columns: Columns) -> Any:
    anchor, positive, *negatives = columns.vectors
    return loss(anchor, positive, torch.cat(negatives) if negatives else None)


def _pairwise(loss: Any, columns: Columns) -> Any:
    if len(columns.texts) > 2 or columns.labels is None:
        raise ValueError(
            f"{type(loss).__name__} expected two columns and labels [B], got "
            f"{len(columns.texts)} and {_shape(columns.labels)}"
        )
    return loss(*columns.vectors, columns.labels)


def _triplet(loss: Any, columns: Columns) -> Any:
    anchor, positive, *negatives = columns.vectors
    return loss(anchor, positive, torch.stack(negatives, 1), columns.there)


def _distillation(loss: Any, columns: Columns) -> Any:
    student, mask = _student_scores(columns), None
    if columns.there is not None:  # and the positive always is
        mask = torch.nn.functional.pad(columns.there, (1, 0), value=True)
    teacher = _teacher_scores(type(loss).__name__, columns.labels, student)
    return loss(student, teacher, candidate_mask=mask)


def _margin_mse(loss: Any, columns: Columns) -> Any:
    student = _student_scores(columns)
    teacher = _teacher_scores(type(loss).__name__, columns.labels, student, or_margins=True)
    sides = (x for scores in (student, teacher) for x in (scores[:, 0], scores[:, 1:]))
    return loss(*sides, columns.there)


def _objective(loss: sl.SpladeObjective, columns: Columns) -> Any:
    anchor, positive, *others = columns.texts
    negative = others[0] if others else None
    if len(others) > 1:
        joined = reduce(sl.Texts.join, others)
        known = {name: x for name, x in joined._asdict().items() if x is not None}
        stacked = {name: torch.stack(x.chunk(len(others)), 1) for name, x in known.items()}
        negative = joined._replace(**stacked)
    where = {"own": len(others) > 1, "in_batch": True, "gather": loss.gather}
    mask = _candidate_mask(columns, **where)
    batch = sl.SpladeBatch(anchor, positive, negative, candidate_mask=mask)
    if columns.labels_are_positive_ids:
        batch = batch._replace(positive_ids=columns.labels)
    active = {*loss.active()}
    distilled = {"distillation", "margin_mse", "ranknet"} & active
    if columns.teacher is not None:
        batch = batch._replace(**_taught(columns.teacher, batch, active))
    elif distilled and not columns.labels_are_positive_ids:
        candidates = anchor.activations.new_empty(len(anchor.activations), 1 + len(others))
        or_margins = distilled == {"margin_mse"}
        scores = _teacher_scores("SpladeObjective", columns.labels, candidates, or_margins)
        batch = batch._replace(teacher_scores=scores, teacher_candidates="own")
    return loss(batch)


# By the class of the loss: the least number of columns, and what it computes.
COMPUTE: dict[type, tuple[int, Callable[[Any, Columns], Any]]] = {
    sl.SpladeObjective: (2, _objective),
    sl.InfoNCELoss: (2, _info_nce),
    sl.NPairLoss: (2, _n_pair),
    sl.TripletMarginLoss: (3, _triplet),
    sl.PairwiseContrastiveLoss: (2, _pairwise),
    sl.DistillationLoss: (3, _distillation),
    sl.MarginMSELoss: (3, _margin_mse),
    sl.RankNetLoss: (3, _distillation),
    sl.NWSLoss: (1, _nws),
    sl.FlopsLoss: (1, _regularizer),
    sl.IdfFlopsLoss: (1, _regularizer),
    sl.MinActivationLoss: (1, _regularizer),
    sl.LanguagePenaltyLoss: (1, _regularizer),
    sl.SelfReconstructionLoss: (1, _self_reconstruction),
    sl.PositiveActivationLoss: (2, _positive_activation),
}


def _student_scores(columns: Columns) -> Tensor:
    """Return the scores of the anchors with their positives and negatives, ``[B, 1 + n]``."""
    vectors = columns.vectors
    dtype = compute_dtype(**{f"column_{i}": x for i, x in enumerate(vectors)})
    vectors = [x.to(dtype) for x in vectors]
    if columns.similarity == "cosine":
        vectors = [normalize(x) for x in vectors]
    return torch.stack([(vectors[0] * x).sum(-1) for x in vectors[1:]], 1)


def _teacher_scores(
    name: str, labels: Tensor | None, student: Tensor, or_margins: bool = False
) -> Tensor:
    """Return scores ``[B, 1 + n]``; for margins, scores with these differences."""
    rows, candidates = student.shape
    if labels is not None and labels.shape == (rows, candidates):
        return labels.to(student.dtype)
    if or_margins and labels is not None and labels.shape == (rows,):
        labels = labels[:, None]
    if not or_margins or labels is None or labels.shape != (rows, candidates - 1):
        margins = f", or [{rows}, {candidates - 1}], its margins" if or_margins else ""
        raise ValueError(
            f"{name} expected labels [{rows}, {candidates}], the teacher's scores of positive and "
            f"negatives{margins}, got {_shape(labels)}"
        )
    return torch.nn.functional.pad(-labels.to(student.dtype), (1, 0))


def _taught(teacher: Teacher, batch: sl.SpladeBatch, active: set[str]) -> dict[str, Any]:
    sides = [texts for texts in batch[:3] if texts is not None]
    for texts in sides:
        _ids_and_mask("`teacher`", texts)
    anchor, *documents = [texts._asdict() for texts in sides]
    scores: dict[str, Any] = {}
    if {"distillation", "margin_mse", "ranknet"} & active:
        scores["teacher_scores"] = score_candidates(teacher, anchor, *documents)
        scores["teacher_candidates"] = "batch"
    if "context_distillation" in active:
        scores["teacher_anchor_scores"] = score_candidates(teacher, anchor, anchor)
    return scores


def _ids_and_mask(name: str, texts: sl.Texts) -> tuple[Tensor, Tensor]:
    if texts.input_ids is None or texts.attention_mask is None:
        raise ValueError(
            f"{name} expected token ids and attention masks [B, S] with the vectors, got none "
            "(SpladeLoss passes on vectors only: use a term of a SpladeObjective instead)"
        )
    return texts.input_ids, texts.attention_mask


def _shape(labels: Tensor | None) -> str:
    return "None" if labels is None else str(list(labels.shape))
