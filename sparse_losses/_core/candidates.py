"""The candidates of InfoNCE and N-pair, and which of them are no negatives."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_losses.distributed import gather_rows, num_ranks, rank


class Call(NamedTuple):
    """The arguments of ``info_nce_loss``, checked and cast; the defaults are N-pair's."""

    anchor: Tensor
    positive: Tensor
    negative: Tensor | None = None
    temperature: float | Tensor = 1.0
    similarity: str = "dot"
    symmetric: bool = False
    in_batch: bool = True
    negatives_from: tuple[str, ...] = ("document",)
    positive_ids: Tensor | None = None
    positive_mask: Tensor | None = None
    candidate_mask: Tensor | None = None
    false_negative_margin: float | None = None
    false_negative_ratio: float | None = None
    decoupled: bool = False
    gather: bool = False
    reduction: Any = "mean"

    def ranks(self) -> int:
        """The number of ranks whose rows are candidates."""
        return num_ranks() if self.gather else 1

    def num_keys(self) -> int:
        """The number of keys of a query: the positives of the batch, or its own."""
        return len(self.anchor) * self.ranks() if self.in_batch else 1

    def num_negatives(self) -> int:
        """The number of negatives of a query on this rank."""
        return 0 if self.negative is None else self.negative.shape[-2]

    def first(self) -> int:
        """The key that is the positive of this rank's first query."""
        return rank() * len(self.anchor) if self.gather else 0


class Direction(NamedTuple):
    """Queries, their keys, and which of these and of the negatives are no candidates."""

    call: Call
    query: str
    key: str
    positives: Tensor | None  # several, [B, K]
    ids: Tensor | None  # of the keys [K]
    left_out: Tensor | None  # [B, K + N]

    def own(self, scores: Tensor, start: int = 0) -> Tensor:
        """Return a view of the scores of the own positives of some rows from ``start`` on."""
        return scores.diagonal(start + self.call.first()) if self.call.in_batch else scores[:, 0]

    def excluded(self, scores: Tensor, limit: Tensor | None, rows: slice) -> Tensor | None:
        """Mask ``[c, K]`` of the keys that a limit of scores, ids or ``candidate_mask`` exclude."""
        num_keys, first = self.call.num_keys(), self.call.first()
        masks = [] if limit is None else [scores.detach()[:, :num_keys] > limit]
        if self.ids is not None:
            masks.append(self.ids[first + rows.start : first + rows.stop, None] == self.ids)
        if self.left_out is not None:
            masks.append(self.left_out[rows, :num_keys])
        return functools.reduce(torch.logical_or, masks) if masks else None


def directions(call: Call) -> list[Direction]:
    """Return the directions of the loss: anchors to positives and, ``symmetric``, back."""
    ids = call.positive_ids if call.in_batch else None
    ids = None if ids is None else gather_rows(ids, call.gather)
    left_out = None if call.candidate_mask is None else ~call.candidate_mask
    positives = call.positive_mask
    found = [Direction(call, "anchor", "positive", positives, ids, left_out)]
    if call.symmetric:
        if positives is not None:
            positives = _reversed(positives, call)
        if left_out is not None and call.in_batch:
            pairs, rest = left_out.tensor_split([call.num_keys()], dim=1)
            left_out = torch.cat([_reversed(pairs, call), rest], dim=1)
        found.append(Direction(call, "positive", "anchor", positives, ids, left_out))
    return found


def _reversed(mask: Tensor, call: Call) -> Tensor:
    """Return the mask of pairs ``[B, K]`` of the other direction: transposed."""
    return gather_rows(mask, call.gather)[:, call.first() : call.first() + len(mask)].T
