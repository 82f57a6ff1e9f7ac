"""The input of an objective: the vectors of a batch and the tokens of its texts."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.checks import check_choice, check_shapes
from sparse_losses._core.precision import compute_dtype
from sparse_losses._core.similarity import normalize
from sparse_losses.distributed import gather_rows
from sparse_losses.objective.teacher import Teacher, score_candidates

Similarity = Literal["cosine", "dot"]


class Texts(NamedTuple):
    """Texts: their sparse vectors and, where known, their tokens and logits.

    Attributes:
        activations: ``[B, V]``; the negatives of ``SpladeBatch`` may be ``[B, N, V]``.
        input_ids: token ids ``[B, S]`` (``[B, N, S]`` with activations ``[B, N, V]``).
        attention_mask: 0/1, in the shape of ``input_ids``.
        logits: signed pooled logits, in the shape of ``activations``. Self-reconstruction and
            minimum activation use them where present, and then reach inactive tokens too.

    Examples:
        >>> import torch
        >>> from sparse_losses import Texts
        >>> texts = Texts(torch.rand(2, 9), torch.tensor([[3, 1], [4, 0]]))
    """

    activations: Tensor
    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    logits: Tensor | None = None

    def flatten(self) -> "Texts":
        """Return the texts with one row per text."""
        fields: Any = [None if x is None else x.flatten(0, -2) for x in self]
        return Texts(*fields)  # not by `_replace`, which PyTorch 2.6 cannot compile

    def join(self, other: "Texts") -> "Texts":
        """Return these texts, then the others; shorter ids and masks are padded with zeros."""
        fields: list[Any] = []
        for name, one, two in zip(Texts._fields, self, other, strict=True):
            if (one is None) != (two is None):
                raise ValueError(f"expected `{name}` of both texts that are joined, or of neither")
            if one is not None and two is not None:
                if name in ("input_ids", "attention_mask") and one.shape[-1] != two.shape[-1]:
                    longest = max(one.shape[-1], two.shape[-1])
                    one, two = (nnf.pad(x, (0, longest - x.shape[-1])) for x in (one, two))
                one = torch.cat([one, two])
            fields.append(one)
        return Texts(*fields)


class SpladeBatch(NamedTuple):
    """A batch: anchors (queries), their positives (documents), and what some terms need besides.

    Attributes:
        anchor: ``B`` texts.
        positive: ``B`` texts; row ``i`` is the positive of anchor ``i``.
        negative: ``N`` texts for all anchors, ``[N, V]``, or ``N`` for each, ``[B, N, V]``.
        positive_ids: ``[B]`` integers; positives of one id are not each other's negatives.
        teacher_scores: a teacher's scores of the anchors' candidates: ``[B, B]``; with negatives
            ``[B, B + N]``, or ``[B, B]`` for the positives alone, or ``[B, 1 + N]`` for the
            positive and the anchor's own negatives. A score of ``-inf`` excludes a candidate.
        teacher_anchor_scores: a teacher's scores of every anchor with every anchor, ``[B, B]``.
        teacher_candidates: which candidates ``teacher_scores`` holds: ``"own"`` for ``[B, 1 + N]``,
            ``"batch"`` for the other shapes, ``None`` to tell by the shape.
        candidate_mask: ``[B, B]``, with negatives ``[B, B + N]``, bool, int or float 0/1: 0 leaves
            a candidate out of the row in the terms on scores. Its vector must be finite.
        gather: whether the terms use all ranks' texts; the objective sets it.
        memory: what the terms of one call share; the objective sets it, and drops it at its end.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeBatch, Texts
        >>> batch = SpladeBatch(Texts(torch.eye(3)), Texts(torch.eye(3)))
        >>> batch.scores("dot").diagonal()
        tensor([1., 1., 1.])
    """

    anchor: Texts
    positive: Texts
    negative: Texts | None = None
    positive_ids: Tensor | None = None
    teacher_scores: Tensor | None = None
    teacher_anchor_scores: Tensor | None = None
    teacher_candidates: Literal["own", "batch"] | None = None
    candidate_mask: Tensor | None = None
    gather: bool = False
    memory: dict[object, Any] | None = None

    def texts(self, side: str) -> Texts:
        """Return the anchors for ``"query"``, positives and then negatives for ``"document"``."""
        negative, memory = self.negative, {} if self.memory is None else self.memory
        if side == "query" or negative is None:
            return self.anchor if side == "query" else self.positive
        if "documents" not in memory:  # a copy
            flat = negative.flatten() if negative.activations.ndim == 3 else negative
            memory["documents"] = self.positive.join(flat)
        return memory["documents"]  # type: ignore[no-any-return]

    def scores(self, similarity: Similarity = "cosine", *, gather: bool = False) -> Tensor:
        """Return each anchor's scores with all positives, then the negatives: ``[B, B + N]``.

        With ``gather`` these are of all ranks. The terms of one call compute them once.
        """
        memory = {} if self.memory is None else self.memory
        if (key := (similarity, gather)) not in memory:
            x, *documents = (texts.activations for texts in self[:3] if texts is not None)
            memory[key] = score(x, *documents, similarity=similarity, gather=gather)
        return memory[key]  # type: ignore[no-any-return]

    @classmethod
    def from_columns(
        cls,
        encoder: Callable[..., Any],
        columns: Mapping[str, Any],
        *,
        teacher: Teacher | None = None,
        score_anchors: bool = False,
        **options: Any,
    ) -> "SpladeBatch":
        """Encode columns: a batch's fields by name, with texts or tokens in place of ``Texts``.

        Args:
            encoder: maps ``input_ids`` and ``attention_mask`` ``[N, S]`` to activations ``[N, V]``,
                or to activations and logits. Its method ``tokenize`` is called with texts.
            columns: each side is a list of texts, or a dict of ``input_ids`` and ``attention_mask``
                ``[B, S]``; negatives are also lists of lists, or ``[B, N, S]``.
            teacher: a ``BM25Teacher``, or another function of queries and documents, such dicts
                (with ``texts``, if they were texts), to scores ``[Q, D]``, here of all candidates.
            score_anchors: whether the teacher also scores every anchor with every anchor.
            **options: arguments of the encoder, such as ``return_logits=True``.
        """
        fields = {name: column for name, column in columns.items() if column is not None}
        tokens = {s: _tokens(encoder, s, fields[s]) for s in cls._fields[:3] if s in fields}
        if teacher is not None:
            if "teacher_scores" in fields:
                raise ValueError("expected no `teacher` beside `teacher_scores`, got both")
            fields["teacher_scores"] = score_candidates(teacher, *tokens.values())
            fields["teacher_candidates"] = "batch"
            if score_anchors:
                scored = score_candidates(teacher, tokens["anchor"], tokens["anchor"])
                fields["teacher_anchor_scores"] = scored
        for side, column in tokens.items():
            ids, mask = column["input_ids"], column["attention_mask"]
            flat = {"input_ids": ids.flatten(0, -2), "attention_mask": mask.flatten(0, -2)}
            output = encoder(**flat, **options)
            vectors = output if isinstance(output, tuple) else (output,)
            activations, *logits = (x.unflatten(0, ids.shape[:-1]) for x in vectors)
            fields[side] = Texts(activations, ids, mask, *logits)
        return cls(**fields)


def _tokens(encoder: Any, side: str, column: Any) -> Mapping[str, Any]:
    """Return ids, mask and texts of a column of texts; a column of tokens as it is."""
    if isinstance(column, Mapping):
        return column
    if not hasattr(encoder, "tokenize"):
        raise TypeError(f"expected `encoder.tokenize` for the texts of {side!r}, got {encoder!r}")
    rows = [row if isinstance(row, (list, tuple)) else [row] for row in column]
    texts = [text for row in rows for text in row]
    if len({*map(len, rows)}) != 1 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected {side!r} to be texts, as many in every row, got {column!r}")
    tokens = {name: encoder.tokenize(texts)[name] for name in ("input_ids", "attention_mask")}
    if isinstance(column[0], (list, tuple)):
        tokens = {name: x.unflatten(0, (len(rows), -1)) for name, x in tokens.items()}
    return {**tokens, "texts": texts}


def score(query: Tensor, *keys: Tensor, similarity: Similarity, gather: bool = False) -> Tensor:
    """Return scores ``[B, C]`` of queries with keys ``[K, V]`` and their own keys ``[B, N, V]``.

    With ``gather`` the former are those of all ranks.
    """
    check_choice("similarity", similarity, ("cosine", "dot"))
    check_shapes(query=(query, "B V"))  # which is dense
    dtype = compute_dtype(query=query, **{f"key {i}": key for i, key in enumerate(keys)})
    rows = [x.to(dtype) for x in (query, *(key for key in keys if key is not query))]
    rows = [normalize(x) for x in rows] if similarity == "cosine" else rows
    scores = []
    for key in rows[1:] or rows:
        every = gather_rows(key, gather and key.ndim == 2)
        one = rows[0] @ every.T if key.ndim == 2 else torch.einsum("bv,bnv->bn", rows[0], every)
        scores.append(one)
    return scores[0] if len(scores) == 1 else torch.cat(scores, 1)


def check_batch(batch: object) -> None:
    """Raise unless an objective received a ``SpladeBatch`` whose tensors belong together."""
    expected = "SpladeBatch(Texts(activations, ...), Texts(activations, ...))"
    if not isinstance(batch, SpladeBatch):
        kind = type(batch).__name__
        raise TypeError(f"expected `batch` to be a SpladeBatch, {expected}, got {kind}")
    shapes: dict[str, tuple[Tensor | None, str]] = {}
    for side, texts, rows, length in zip(batch._fields[:3], batch[:3], "BBN", "STU", strict=True):
        if side == "negative" and getattr(getattr(texts, "activations", None), "ndim", 0) == 3:
            rows = "B N"
        if isinstance(texts, Texts):
            columns = "V, csr", f"{length}, optional", f"{length}, optional", "V, optional"
            for name, x, column in zip(Texts._fields, texts, columns, strict=True):
                shapes[f"{side}.{name}"] = x, f"{rows} {column}"
        elif texts is not None or side != "negative":
            kind = type(texts).__name__
            raise TypeError(f"expected `batch.{side}` to be Texts, {expected}, got {kind}")
    shapes["positive_ids"] = batch.positive_ids, "B, optional"
    for letter, name in zip(
        "CAK", ("teacher_scores", "teacher_anchor_scores", "candidate_mask"), strict=True
    ):
        shapes[name] = getattr(batch, name), f"B {letter}, optional"
    check_shapes(**shapes)
    if (ids := batch.positive_ids) is not None and (
        ids.is_floating_point() or ids.dtype == torch.bool
    ):
        raise TypeError(f"expected `positive_ids` to be integers, got {ids.dtype}")


def need(part: Any, name: str, whose: str = "batch") -> Any:
    """Return a field that must be there."""
    sources = {
        "teacher_scores": ": BM25Teacher computes them; or leave the term out",
        "teacher_anchor_scores": ": from_columns(score_anchors=True) computes them",
    }
    if (value := getattr(part, name)) is None:
        raise ValueError(f"expected `{whose}.{name}`, got None{sources.get(name, '')}")
    return value
