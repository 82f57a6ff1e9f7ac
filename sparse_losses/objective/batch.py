"""The input of an objective: the vectors of a batch and the tokens of its texts."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.checks import check_choice, check_shapes
from sparse_losses._core.entries import concatenated
from sparse_losses._core.precision import compute_dtype
from sparse_losses._core.similarity import normalize
from sparse_losses.fast.sparse_scores import sparse_scores
from sparse_losses.objective.teacher import Teacher, score_batch

Similarity = Literal["cosine", "dot"]
BESIDES = {
    "positive_ids": "B, optional",
    "candidate_mask": "B K, optional",
    "teacher_scores": "B C, optional",
    "teacher_anchor_scores": "B A, optional",
}


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
        have_more = [x is not None and x.ndim > 2 and x.layout == torch.strided for x in self]
        pairs: Any = zip(self, have_more, strict=True)
        # Not by `_replace`, which PyTorch 2.6 cannot compile.
        return Texts(*(x.flatten(0, -2) if more else x for x, more in pairs))

    def join(self, other: "Texts") -> "Texts":
        """Return these texts, then the others; shorter ids and masks are padded with zeros."""
        fields: list[Any] = []
        for name, *pair in zip(Texts._fields, self, other, strict=True):
            present = [x for x in pair if x is not None]
            if len(present) == 1:
                raise ValueError(f"expected `{name}` of both texts that are joined, or of neither")
            if len(layouts := {x.layout for x in present}) > 1:
                raise ValueError(f"expected `{name}` of both texts in one layout, got {layouts}")
            longest = max([0, *(x.shape[-1] for x in present)])
            pads = [(x, (0, longest - x.shape[-1])) for x in present]
            padded = [nnf.pad(x, pad) if any(pad) else x for x, pad in pads]  # not CSR
            fields.append(concatenated(padded) if padded else None)
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

    def sides(self) -> tuple[Texts, Texts, Texts | None]:
        """Return anchors, positives and negatives."""
        return self.anchor, self.positive, self.negative  # PyTorch 2.6 compiles no slice of it

    def texts(self, side: str) -> Texts:
        """Return the anchors for ``"query"``, positives and then negatives for ``"document"``."""
        if side == "query" or (negative := self.negative) is None:
            return self.anchor if side == "query" else self.positive
        joined: Texts = self._once("documents", lambda: self.positive.join(negative.flatten()))
        return joined

    def scores(self, similarity: Similarity = "cosine") -> Tensor:
        """Return each anchor's scores with all positives, then the negatives: ``[B, B + N]``.

        They are those of this rank. The terms of one call compute them once.
        """
        vectors = [texts.activations for texts in self.sides() if texts is not None]
        scores: Tensor = self._once(similarity, lambda: score(*vectors, similarity=similarity))
        return scores

    def _once(self, key: str, make: Callable[[], Any]) -> Any:
        memory = {} if self.memory is None else self.memory
        if key not in memory:
            memory[key] = make()
        return memory[key]

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
                ``[B, S]``; negatives are also lists of lists, or ``[B, N, S]``. Ids, scores and a
                mask are tensors or lists.
            teacher: a ``BM25Teacher``, or another function of queries and documents, such dicts
                (with ``texts``, if they were texts), to scores ``[Q, D]``, here of all candidates.
            score_anchors: whether the teacher also scores every anchor with every anchor.
            **options: arguments of the encoder, such as ``return_logits=True``.
        """
        fields = {name: column for name, column in columns.items() if column is not None}
        for name in fields:
            check_choice("column", name, cls._fields[:-2])
        tokens = {s: _tokens(encoder, s, fields[s]) for s in cls._fields[:3] if s in fields}
        if teacher is not None:
            if "teacher_scores" in fields:
                raise ValueError("expected no `teacher` beside `teacher_scores`, got both")
            fields |= score_batch(teacher, *tokens.values(), score_anchors=score_anchors)
        for side, column in tokens.items():
            ids, mask = column["input_ids"], column["attention_mask"]
            flat = {"input_ids": ids.flatten(0, -2), "attention_mask": mask.flatten(0, -2)}
            output = encoder(**flat, **options)
            vectors = output if isinstance(output, tuple) else (output,)
            if ids.ndim == 3:
                if vectors[0].layout != torch.strided:
                    raise ValueError(f"expected negatives [N, S] with CSR, got {list(ids.shape)}")
                vectors = tuple(x.unflatten(0, ids.shape[:-1]) for x in vectors)
            fields[side] = Texts(vectors[0], ids, mask, *vectors[1:])
        for name in fields.keys() & BESIDES:
            fields[name] = torch.as_tensor(fields[name], device=fields["anchor"].activations.device)
        return cls(**fields)


def _tokens(encoder: Any, side: str, column: Any) -> Mapping[str, Any]:
    """Return ids, mask and texts of a column of texts; a column of tokens as it is."""
    if isinstance(column, Mapping):
        return column
    rows = [row if isinstance(row, (list, tuple)) else [row] for row in column]
    texts = [text for row in rows for text in row]
    if len({*map(len, rows)}) != 1 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected {side!r} to be texts, as many in every row, got {column!r}")
    tokens = encoder.tokenize(texts)
    shape = (len(rows), -1) if isinstance(column[0], (list, tuple)) else (len(rows),)
    names = ("input_ids", "attention_mask")
    return {"texts": texts, **{name: tokens[name].unflatten(0, shape) for name in names}}


def score(query: Tensor, *keys: Tensor, similarity: Similarity) -> Tensor:
    """Return scores ``[B, C]`` of queries with keys ``[K, V]``, or their own ``[B, N, V]``.

    Without keys they are those of the queries with one another.
    """
    check_choice("similarity", similarity, ("cosine", "dot"))
    dtype = compute_dtype(query=query, **{f"key {i}": key for i, key in enumerate(keys)})
    rows = [x.to(dtype) for x in (query, *keys)]
    if len(layouts := {x.layout for x in rows}) > 1:
        raise ValueError(f"expected activations to score in one layout, got {layouts}")
    if query.layout == torch.sparse_csr:
        return sparse_scores(rows[0], *(rows[1:] or rows), cosine=similarity == "cosine")
    query, *others = [normalize(x) for x in rows] if similarity == "cosine" else rows
    parts = [
        query @ key.T if key.ndim == 2 else torch.einsum("bv,bnv->bn", query, key)
        for key in others or [query]
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def check_batch(batch: object) -> None:
    """Raise unless a batch is one, and its tensors belong together."""
    if not isinstance(batch, SpladeBatch):
        expected = "SpladeBatch(Texts(activations, ...), Texts(activations, ...))"
        raise TypeError(f"expected `batch` to be a {expected}, got {type(batch).__name__}")
    shapes: dict[str, tuple[Tensor | None, str]] = {}
    for side, rows, length in zip(SpladeBatch._fields[:3], ("B", "B", "N"), "STU", strict=True):
        if (texts := getattr(batch, side)) is None and side == "negative":
            continue
        if not isinstance(texts, Texts):
            kind = type(texts).__name__
            raise TypeError(f"expected `batch.{side}` to be Texts(activations, ...), got {kind}")
        rows = "B N" if side == "negative" and getattr(texts[0], "ndim", 2) == 3 else rows
        columns = "V, csr", f"{length}, optional", f"{length}, optional", "V, optional"
        for name, x, shape in zip(Texts._fields, texts, columns, strict=True):
            shapes[f"{side}.{name}"] = x, f"{rows} {shape}"
    besides = {name: (getattr(batch, name), shape) for name, shape in BESIDES.items()}
    check_shapes(**shapes, **besides)
