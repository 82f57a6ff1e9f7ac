"""What an objective is given: the vectors of a batch, and what is known of their texts."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sparse_losses._core.token_ids import as_mask

__all__ = ["SpladeBatch", "Texts", "cat_padded", "token_counts"]

SIDES = ("anchor", "positive", "negative")


class Texts(NamedTuple):
    """Some texts: their sparse vectors, and whatever of the rest is at hand.

    Attributes:
        activations: ``[B, V]``; the negatives of ``SpladeBatch`` may be ``[B, N, V]``.
        input_ids: ``[B, S]`` token ids (``[B, N, S]`` beside ``[B, N, V]``).
        attention_mask: as ``input_ids``; 0/1.
        logits: signed pooled logits, as ``activations``. Where they are given, self-reconstruction
            and minimum activation take them, which then reach silent tokens too.

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
        """One row a text."""
        known = {name: x.flatten(0, -2) for name, x in self._asdict().items() if x is not None}
        return self._replace(**known)

    def join(self, other: "Texts") -> "Texts":
        """These texts, then the others; what only one of them has is left out.

        Ids of different lengths are padded under a mask of zeros.
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
    """All rows, those of shorter tensors with zeros on the right."""
    width = max(x.shape[-1] for x in tensors)
    return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in tensors])


class SpladeBatch(NamedTuple):
    """A batch: anchors (queries), their positives (documents), and what the terms ask for.

    Attributes:
        anchor: ``B`` texts.
        positive: ``B`` texts; the ``i``-th answers anchor ``i``.
        negative: ``N`` texts that no anchor wants, or ``[B, N]``: each anchor its own.
        positive_ids: ``[B]`` integers; equal ids are the same document, which is no negative.
        teacher_scores: a teacher's scores of the anchors' candidates, ``[B, B]``; with negatives
            ``[B, B + N]``, or ``[B, B]`` for the positives alone, or ``[B, 1 + N]`` for the
            positive and the anchor's own negatives. ``-inf``: not a candidate.
        teacher_anchor_scores: ``[B, B]``, of every anchor with every anchor.
        teacher_candidates: whose scores ``teacher_scores`` are: ``"own"``, the last of those
            shapes, or ``"batch"``, one of the others. ``None``: the shape says it; where ``B`` is
            ``1 + N`` and it does not, an error asks.

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
        """Encodes the columns of texts that a collator made.

        Args:
            encoder: maps ``input_ids`` and ``attention_mask`` ``[N, S]`` to activations ``[N, V]``,
                or to activations and logits.
            columns: by the fields of a batch: ``anchor``, ``positive`` and ``negative`` as dicts of
                ``input_ids`` and ``attention_mask`` ``[B, S]`` (negatives also ``[B, N, S]``);
                other fields as they are.
            **options: for the encoder, such as ``return_logits=True``.

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
    """Attended tokens of each text, the special ones not counted where ids are known."""
    if mask is None:
        return None
    attended = as_mask("attention_mask", mask)
    if ids is not None and len(special_ids):
        attended = attended & ~torch.isin(ids, special_ids)
    return attended.sum(-1)
