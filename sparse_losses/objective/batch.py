"""The input of an objective: the vectors of a batch and the tokens of its texts."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sparse_losses._core.token_ids import as_mask

__all__ = ["SpladeBatch", "Texts", "cat_padded", "token_counts"]

SIDES = ("anchor", "positive", "negative")


class Texts(NamedTuple):
    """Texts: their sparse vectors and, where known, their tokens and logits.

    Attributes:
        activations: ``[B, V]``; the negatives of ``SpladeBatch`` may be ``[B, N, V]``.
        input_ids: token ids ``[B, S]`` (``[B, N, S]`` with activations ``[B, N, V]``).
        attention_mask: 0/1, in the shape of ``input_ids``.
        logits: signed pooled logits, in the shape of ``activations``. Self-reconstruction and
            minimum activation use them where they are given, and then reach inactive tokens too.

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
        activations = torch.cat([self.activations, other.activations])
        logits, ids, mask = None, None, None
        if self.logits is not None and other.logits is not None:
            logits = torch.cat([self.logits, other.logits])
        if self.input_ids is not None and other.input_ids is not None:
            ids = cat_padded(self.input_ids, other.input_ids)
        if self.attention_mask is not None and other.attention_mask is not None:
            mask = cat_padded(self.attention_mask, other.attention_mask)
        return Texts(activations, ids, mask, logits)


def cat_padded(*tensors: Tensor) -> Tensor:
    """Concatenate the rows; pad those of shorter tensors with zeros on the right."""
    width = max(x.shape[-1] for x in tensors)
    return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in tensors])


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

    @classmethod
    def from_columns(
        cls, encoder: Callable[..., Any], columns: Mapping[str, Any], **options: Any
    ) -> "SpladeBatch":
        """Encode the columns of texts that a collator made.

        Args:
            encoder: maps ``input_ids`` and ``attention_mask`` ``[N, S]`` to activations ``[N, V]``,
                or to activations and logits.
            columns: the fields of a batch by name: ``anchor``, ``positive`` and ``negative`` as
                dicts of ``input_ids`` and ``attention_mask`` ``[B, S]`` (negatives also
                ``[B, N, S]``); other fields are passed on unchanged.
            **options: arguments of the encoder, such as ``return_logits=True``.

        Examples:
            >>> import torch
            >>> from sparse_losses import SpladeBatch
            >>> def encoder(input_ids, attention_mask):
            ...     return torch.nn.functional.one_hot(input_ids, 9).amax(-2).float()
            >>> ids = torch.tensor([[3, 4], [5, 6]])
            >>> column = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            >>> scores = torch.eye(2)
            >>> columns = {"anchor": column, "positive": column, "teacher_scores": scores}
            >>> SpladeBatch.from_columns(encoder, columns).positive.activations.shape
            torch.Size([2, 9])
        """
        fields = dict(columns)
        for side in SIDES:
            if fields.get(side) is not None:
                fields[side] = _encoded(encoder, fields[side], options)
        return cls(**fields)


def _encoded(
    encoder: Callable[..., Any], column: Mapping[str, Tensor], options: Mapping[str, Any]
) -> Texts:
    rows = column["input_ids"].shape[:-1]
    flat = {name: tensor.flatten(0, -2) for name, tensor in column.items()}
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
