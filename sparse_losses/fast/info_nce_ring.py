"""In-batch contrast over several ranks that holds the keys of one other rank at a time.

(And those of the next, as they come in.) Every rank's keys go round the ring of ranks twice: first
each rank adds up its rows' denominators, then it knows every probability, and the gradient by the
keys travels with them until both are home.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_losses._core.products import as_single
from sparse_losses._core.ways import Arguments, Options
from sparse_losses.distributed import num_ranks, rank, sum_over_ranks
from sparse_losses.fast.info_nce import (
    blockwise_info_nce,
    losses,
    rows_of_a_block,
    softmax,
    why_not_dense,
)
from sparse_losses.fast.scores import sides

__all__ = ["ring_info_nce", "why_not_ring"]


def why_not_ring(arguments: Arguments, options: Options) -> str | None:
    """Why the ring does not take the call."""
    return why_not_dense(arguments, options) if options["gather"] else "gather=True"


def ring_info_nce(
    needs: Sequence[bool],
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: float | Tensor,
    *,
    similarity: str,
    symmetric: bool,
    positive_ids: Tensor | None,
    decoupled: bool,
    gather: bool,
    reduction: str,
    in_batch: bool = True,
    positive_mask: None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """InfoNCE over all ranks' rows, and its gradient by this rank's four tensors, for DDP."""
    batch, ranks = anchor.shape[0], num_ranks()
    if ranks == 1:
        options = {"similarity": similarity, "symmetric": symmetric, "reduction": reduction}
        more = {"positive_ids": positive_ids, "decoupled": decoupled, "gather": gather}
        return blockwise_info_nce(needs, anchor, positive, negative, temperature, **options, **more)
    anchor, positive = as_single(anchor), as_single(positive)
    negative = None if negative is None else as_single(negative)
    share = 1.0 / (batch * ranks if reduction == "mean" else 1) / (2 if symmetric else 1)
    value, grad_temperature = anchor.new_zeros(2)
    found: list[Tensor | None] = [None, None, None, None]
    for asks, answers in ((0, 1), (1, 0)) if symmetric else ((0, 1),):
        sides = anchor, positive
        direction = _Direction(
            sides[asks], sides[answers], negative, temperature, similarity == "cosine", positive_ids
        )
        value += direction.value(decoupled, share)
        if not any(needs):
            continue
        grad_asks, grad_answers, grad_negative = direction.gradients(needs[2])
        grad_temperature += direction.grad_temperature
        for place, gradient in ((asks, grad_asks), (answers, grad_answers), (2, grad_negative)):
            if gradient is not None and needs[place]:
                # DDP divides by the number of ranks what they all contributed to.
                gradient = gradient.mul_(ranks)
                before = found[place]
                found[place] = gradient if before is None else before.add_(gradient)
    if needs[3]:
        found[3] = grad_temperature * ranks
    return sum_over_ranks(value), found


class _Direction:
    """One side asks, the other answers: the keys of all ranks, and this rank's queries."""

    def __init__(
        self,
        asks: Tensor,
        answers: Tensor,
        negative: Tensor | None,
        temperature: float | Tensor,
        cosine: bool,
        positive_ids: Tensor | None,
    ) -> None:
        self.temperature, self.ids = temperature, positive_ids
        shared = [answers]
        if negative is not None and negative.ndim == 2:
            shared.append(negative)
        keys = torch.cat(shared) if len(shared) > 1 else answers
        self.query_side, self.key_side = sides(cosine, asks, keys)
        self.queries, self.keys = self.query_side.values / temperature, self.key_side.values
        self.each: Tensor | None = None
        if negative is not None and negative.ndim == 3 and negative.shape[1]:
            (self.each_side,) = sides(cosine, negative)
            self.each = self.each_side.values
        self.batch, self.num_shared = len(answers), len(self.keys) - len(answers)
        step = rows_of_a_block(asks, self.keys)
        self.chunks = [slice(i, i + step) for i in range(0, self.batch, step)]

    def _scores(self, rows: slice, keys: Tensor, ids: Tensor | None, is_own: bool) -> Tensor:
        """Scores against the keys of one rank; what is no negative has the lowest."""
        scores = self.queries[rows] @ keys.T  # a NaN of a key stays in the key's own column
        lowest = torch.finfo(scores.dtype).min
        if ids is not None and self.ids is not None:
            in_batch = scores[:, : self.batch]
            in_batch.masked_fill_(self.ids[rows, None] == ids, lowest)
        if is_own:
            scores[:, rows].diagonal().fill_(lowest)
        return scores

    def _scores_of_each(self, rows: slice) -> Tensor:
        """Scores against each query's own negatives."""
        assert self.each is not None
        return torch.einsum("bd,bnd->bn", self.queries[rows], self.each[rows])

    def value(self, decoupled: bool, share: float) -> Tensor:
        """The loss of this rank's rows; keeps what the gradients need."""
        positive = (self.queries * self.keys[: self.batch]).sum(-1)
        self.total = torch.full_like(positive, torch.finfo(positive.dtype).min)  # log-sum-exp

        def add(rows: slice, scores: Tensor) -> None:
            self.total[rows] = torch.logaddexp(self.total[rows], softmax(scores, 1)[1])

        keys, ids = self.keys, self.ids
        for turn in range(num_ranks()):
            coming = _ring_exchange(keys, ids) if turn + 1 < num_ranks() else None
            for rows in self.chunks:
                add(rows, self._scores(rows, keys, ids, is_own=turn == 0))
            if coming is not None:
                keys, ids = coming.wait()
        for rows in self.chunks if self.each is not None else ():
            add(rows, self._scores_of_each(rows))
        row_losses, slope = losses(self.total, positive, decoupled)
        self.slope = slope.mul_(share)
        return row_losses.sum() * share

    def gradients(self, needs_each: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """By queries, keys and negatives, shared (as the keys' last rows) or each query's own."""
        grad_queries = torch.zeros_like(self.queries)
        grad_each = None
        keys, ids, grad_keys = self.keys, self.ids, torch.zeros_like(self.keys)
        for turn in range(num_ranks()):
            coming = _ring_exchange(keys, ids) if turn + 1 < num_ranks() else None
            for rows in self.chunks:
                scores = self._scores(rows, keys, ids, is_own=turn == 0)
                slopes = self._slopes(rows, scores)
                if turn == 0:
                    slopes[:, rows].diagonal().sub_(self.slope[rows])
                grad_queries[rows].addmm_(slopes, _without_nan(keys, ids))
                grad_keys.addmm_(slopes.T, self.queries[rows])
            if coming is not None:
                keys, ids = coming.wait()
            grad_keys, _ = _ring_exchange(grad_keys, None).wait()
        if self.each is not None:
            grad_each = torch.empty_like(self.each) if needs_each else None
            for rows in self.chunks:
                slopes = self._slopes(rows, self._scores_of_each(rows))
                grad_queries[rows] += torch.einsum("bn,bnd->bd", slopes, self.each[rows])
                if grad_each is not None:
                    torch.mul(slopes[:, :, None], self.queries[rows, None], out=grad_each[rows])
        # Every score is a query over the temperature times a key.
        self.grad_temperature = -(grad_queries * self.queries).sum() / self.temperature
        grad_queries = grad_queries.div_(self.temperature)
        grad_queries = self.query_side.gradient(grad_queries)
        grad_keys = self.key_side.gradient(grad_keys)
        if grad_each is not None:
            grad_each = self.each_side.gradient(grad_each)
        grad_negative = grad_keys[self.batch :] if self.num_shared else grad_each
        return grad_queries, grad_keys[: self.batch], grad_negative

    def _slopes(self, rows: slice, scores: Tensor) -> Tensor:
        """The derivative of the loss by the scores of negatives, in place."""
        return scores.sub_(self.total[rows, None]).exp_().mul_(self.slope[rows, None])


def _without_nan(keys: Tensor, ids: Tensor | None) -> Tensor:
    """Where ids may hide a key, its NaN must not reach a product: 0 * NaN is NaN."""
    return keys if ids is None else torch.where(keys.isnan().any(1, keepdim=True), 0.0, keys)


class _Coming:
    """What the neighbour is sending."""

    def __init__(self, works: list[Any], keys: Tensor, ids: Tensor | None) -> None:
        self.works, self.keys, self.ids = works, keys, ids

    def wait(self) -> tuple[Tensor, Tensor | None]:
        for work in self.works:
            work.wait()
        return self.keys, self.ids


def _ring_exchange(keys: Tensor, ids: Tensor | None) -> _Coming:
    """Sends to the next rank of the ring, and receives from the one before, meanwhile."""
    to, source = (rank() + 1) % num_ranks(), (rank() - 1) % num_ranks()
    # Backends send contiguous tensors only; keys may be stored by columns, and not on every rank.
    going = [x.contiguous() for x in (keys, ids) if x is not None]
    coming = [torch.empty_like(x) for x in going]
    operations = []
    for sent, received in zip(going, coming, strict=True):
        operations.append(dist.P2POp(dist.isend, sent, to))
        operations.append(dist.P2POp(dist.irecv, received, source))
    works = dist.batch_isend_irecv(operations)
    return _Coming(works, coming[0], coming[1] if ids is not None else None)
