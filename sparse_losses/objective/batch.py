"""The input of an objective: the vectors of a batch and the tokens of its texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from sparse_losses._core.checks import check_flag, check_integer
from sparse_losses._core.token_ids import as_mask
from sparse_losses.objective.teacher import Teacher, score_candidates

SIDES = ("anchor", "positive", "negative")
SCORES = ("teacher_scores", "teacher_anchor_scores")


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
        >>> from sparse_losses import Texts, splade_pool
        >>> ids, mask = torch.tensor([[3, 1, 0]]), torch.tensor([[1, 1, 0]])
        >>> activations, logits = splade_pool(torch.randn(1, 3, 5), mask, return_logits=True)
        >>> Texts(activations, ids, mask, logits).activations.shape
        torch.Size([1, 5])
    """

    activations: Tensor
    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    logits: Tensor | None = None

    def flatten(self) -> "Texts":
        """Return the texts with one row per text."""
        # Not by `_replace`, which PyTorch 2.6 cannot compile.
        activations, *others = [None if x is None else x.flatten(0, -2) for x in self]
        assert activations is not None
        return Texts(activations, *others)

    def join(self, other: "Texts") -> "Texts":
        """Return these texts followed by the others; a field that only one has becomes ``None``.

        Shorter ids and masks are padded with zeros.
        """
        pairs = zip(Texts._fields, self, other, strict=True)
        fields: dict[str, Any] = {
            name: _joined(one, two, pads=name in ("input_ids", "attention_mask"))
            for name, one, two in pairs
        }
        return Texts(**fields)


def _joined(one: Tensor | None, two: Tensor | None, *, pads: bool) -> Tensor | None:
    if one is None or two is None:
        return None
    missing = one.shape[-1] - two.shape[-1]
    if missing and pads:
        one, two = nnf.pad(one, (0, max(0, -missing))), nnf.pad(two, (0, max(0, missing)))
    return torch.cat([one, two])


class SpladeBatch(NamedTuple):
    """A batch: anchors (queries), their positives (documents), and what some terms need besides.

    Attributes:
        anchor: ``B`` texts.
        positive: ``B`` texts; the ``i``-th is relevant to anchor ``i``.
        negative: ``N`` texts, negatives of all anchors, or ``[B, N]`` texts, N for each anchor.
        positive_ids: ``[B]`` integers; positives with equal ids are the same document and are not
            each other's negatives.
        teacher_scores: a teacher's scores of the anchors' candidates: ``[B, B]``; with negatives
            ``[B, B + N]``, or ``[B, B]`` for the positives alone, or ``[B, 1 + N]`` for the
            positive and the anchor's own negatives. A score of ``-inf`` excludes a candidate.
        teacher_anchor_scores: a teacher's scores of every anchor with every anchor, ``[B, B]``.
        teacher_candidates: which candidates ``teacher_scores`` holds: ``"own"`` for ``[B, 1 + N]``,
            ``"batch"`` for the other shapes, ``None`` to tell by the shape (an error where ``B``
            is ``1 + N`` and both fit).
        candidate_mask: ``[B, B]``, with negatives ``[B, B + N]``, bool, int or float 0/1: 0 leaves
            a candidate out of the row in the terms on scores, for example where a row has fewer
            negatives than others. The other terms still use its vector, which must be finite.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeBatch, Texts
        >>> batch = SpladeBatch(Texts(torch.rand(4, 50)), Texts(torch.rand(4, 50)))
        >>> batch = batch._replace(teacher_scores=torch.randn(4, 4))
    """

    anchor: Texts
    positive: Texts
    negative: Texts | None = None
    positive_ids: Tensor | None = None
    teacher_scores: Tensor | None = None
    teacher_anchor_scores: Tensor | None = None
    teacher_candidates: Literal["own", "batch"] | None = None
    candidate_mask: Tensor | None = None

    @classmethod
    def from_columns(
        cls,
        encoder: Callable[..., Any],
        columns: Mapping[str, Any],
        *,
        tokenizer: Any = None,
        max_length: int | None = None,
        teacher: Teacher | None = None,
        score_anchors: bool = False,
        **options: Any,
    ) -> "SpladeBatch":
        """Encode columns of texts, tokenized or not.

        Args:
            encoder: maps ``input_ids`` and ``attention_mask`` ``[N, S]`` to activations ``[N, V]``,
                or to activations and logits.
            columns: the fields of a batch by name. ``anchor``, ``positive`` and ``negative`` are
                lists of texts (negatives also one list per row, all of the same length), or dicts
                of ``input_ids`` and ``attention_mask`` ``[B, S]`` (negatives also ``[B, N, S]``).
                ``positive_ids``, a mask and scores may be lists.
            tokenizer: the tokenizer of the texts; default: ``encoder.tokenizer``.
            max_length: the largest number of tokens per text; default: ``encoder.max_length``, or
                the tokenizer's limit.
            teacher: a ``BM25Teacher``, or another function of queries and documents that returns
                their scores ``[Q, D]``. Both are dicts of ``input_ids``, ``attention_mask`` and,
                where they were not tokenized, ``texts``. It scores all candidates of the batch.
            score_anchors: whether the teacher also scores every anchor with every anchor, for the
                term ``context_distillation``.
            **options: arguments of the encoder, such as ``return_logits=True``.

        Raises:
            ValueError: for columns of other contents, a ``max_length`` without room for a token, or
                scores beside a ``teacher``.
            TypeError: for texts without a tokenizer, an unknown field, or a teacher that returns no
                scores.

        Examples:
            >>> import torch
            >>> from sparse_losses import SpladeBatch
            >>> def encoder(input_ids, attention_mask):
            ...     return torch.nn.functional.one_hot(input_ids, 9).amax(-2).float()
            >>> ids = torch.tensor([[3, 4], [5, 6]])
            >>> column = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            >>> columns = {"anchor": column, "positive": column, "positive_ids": [7, 8]}
            >>> SpladeBatch.from_columns(encoder, columns).positive.activations.shape
            torch.Size([2, 9])
        """
        check_flag(score_anchors=score_anchors)
        fields = dict(columns)
        tokenizer = getattr(encoder, "tokenizer", None) if tokenizer is None else tokenizer
        max_length = getattr(encoder, "max_length", None) if max_length is None else max_length
        for side in SIDES:
            column = fields.get(side)
            if column is not None and not isinstance(column, Mapping):
                fields[side] = _tokenize(side, column, tokenizer, max_length, _device(encoder))
        for name in ("positive_ids", "candidate_mask", *SCORES):
            column = fields.get(name)
            if column is not None and not isinstance(column, Tensor):
                fields[name] = _as_tensor(name, column, _device(encoder))
        if teacher is not None:
            fields |= _taught(teacher, fields, score_anchors)
        for side in SIDES:
            if fields.get(side) is not None:
                fields[side] = _encode(encoder, fields[side], options)
        return cls(**fields)


def _device(encoder: Callable[..., Any]) -> torch.device:
    """Return the device of a module's parameters; the CPU for another function."""
    parameters = encoder.parameters() if isinstance(encoder, nn.Module) else iter(())
    parameter = next(parameters, None)
    return torch.device("cpu") if parameter is None else parameter.device


def _tokenize(
    side: str, column: Sequence[Any], tokenizer: Any, max_length: int | None, device: torch.device
) -> dict[str, Any]:
    """Return ids and mask of texts ``[B, S]``, or of a list of texts per row ``[B, N, S]``."""
    if tokenizer is None:
        raise TypeError(f"expected `tokenizer` for the texts of {side!r}, got None")
    if max_length is not None:
        least = tokenizer.num_special_tokens_to_add(pair=False) + 1
        check_integer("max_length", max_length, minimum=least)
    rows = list(column)
    is_nested = side == "negative" and any(isinstance(row, (list, tuple)) for row in rows)
    lists = [list(row) if isinstance(row, (list, tuple)) else [row] for row in rows]
    texts = [text for texts in lists for text in texts] if is_nested else rows
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong or not texts:
        got = repr(wrong[0]) if wrong else "none"
        raise ValueError(f"expected {side!r} to be texts, got {got}")
    counts = [len(own) for own in lists]
    if len({*counts}) > 1:
        raise ValueError(f"expected as many texts of {side!r} in every row, got {counts}")
    options = {"padding_side": "right", "truncation": True, "max_length": max_length}
    batch = tokenizer(texts, padding=True, return_tensors="pt", **options)  # as SpladeEncoder does
    tensors = {key: batch[key].to(device) for key in ("input_ids", "attention_mask")}
    if is_nested:
        tensors = {key: tensor.unflatten(0, (len(rows), -1)) for key, tensor in tensors.items()}
    return {**tensors, "texts": texts}


def _as_tensor(name: str, column: Any, device: torch.device) -> Tensor:
    try:
        if name == "positive_ids":
            return torch.as_tensor(column, device=device)
        rows = [torch.as_tensor(row, dtype=torch.float32) for row in column]
        return torch.stack(rows).detach().to(device)
    except (TypeError, ValueError, RuntimeError) as error:  # PyTorch's do not name the column
        raise ValueError(f"expected {name!r} to be numbers, in rows of one length") from error


def _taught(teacher: Teacher, fields: Mapping[str, Any], score_anchors: bool) -> dict[str, Any]:
    if present := [name for name in SCORES if fields.get(name) is not None]:
        raise ValueError(f"expected columns without scores beside `teacher`, got {present}")
    anchor = fields["anchor"]
    scores = score_candidates(teacher, anchor, fields["positive"], fields.get("negative"))
    taught: dict[str, Any] = {"teacher_scores": scores, "teacher_candidates": "batch"}
    if score_anchors:
        taught["teacher_anchor_scores"] = score_candidates(teacher, anchor, anchor)
    return taught


def _encode(
    encoder: Callable[..., Any], column: Mapping[str, Any], options: Mapping[str, Any]
) -> Texts:
    rows = column["input_ids"].shape[:-1]
    tensors = {name: value for name, value in column.items() if isinstance(value, Tensor)}
    flat = {name: tensor.flatten(0, -2) for name, tensor in tensors.items()}
    output = encoder(**flat, **options)
    activations, logits = output if isinstance(output, tuple) else (output, None)
    return Texts(
        activations.unflatten(0, rows),
        column["input_ids"],
        column["attention_mask"],
        None if logits is None else logits.unflatten(0, rows),
    )


def token_counts(ids: Tensor | None, mask: Tensor | None, special_ids: Tensor) -> Tensor | None:
    """Count the attended tokens of each text, without special tokens where ids are known."""
    if mask is None:
        return None
    attended = as_mask("attention_mask", mask)
    if ids is not None and len(special_ids):
        attended = attended & ~torch.isin(ids, special_ids)
    return attended.sum(-1)
