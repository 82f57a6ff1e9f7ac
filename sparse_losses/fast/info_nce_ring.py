"""In-batch InfoNCE over several ranks that holds the keys of one other rank at a time.

(And receives those of the next meanwhile.) The keys of all ranks are passed round the ring twice.
In the first round each rank sums its rows' denominators. In the second it computes probabilities
and adds to the gradient of the keys, which travels with the keys back to their rank.
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
    """Return why the ring does not support the call, or ``None``."""
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
    in_batch: bool,
    positive_mask: None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return InfoNCE over all ranks' rows, and this rank's four gradients, scaled for DDP."""
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
                # DDP divides gradients by the number of ranks.
                gradient = gradient.mul_(ranks)
                before = found[place]
                found[place] = gradient if before is None else before.add_(gradient)
    if needs[3]:
        found[3] = grad_temperature * ranks
    return sum_over_ranks(value), found


class _Direction:
    """One direction of the loss: this rank's queries against the keys of all ranks."""

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
        keys = answers
        if negative is not None and negative.ndim == 2:
            keys = torch.cat([answers, negative])
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
        """Return scores with the keys of one rank; keys that are not negatives get the lowest."""
        scores = self.queries[rows] @ keys.T  # a NaN of a key stays in its column
        lowest = torch.finfo(scores.dtype).min
        if ids is not None and self.ids is not None:
            in_batch = scores[:, : self.batch]
            in_batch.masked_fill_(self.ids[rows, None] == ids, lowest)
        if is_own:
            scores[:, rows].diagonal().fill_(lowest)
        return scores

    def _scores_of_each(self, rows: slice) -> Tensor:
        """Return scores with each query's own negatives."""
        assert self.each is not None
        return torch.einsum("bd,bnd->bn", self.queries[rows], self.each[rows])

    def value(self, decoupled: bool, share: float) -> Tensor:
        """Return the loss of this rank's rows; store what ``gradients`` needs."""
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
        """Return the gradients of queries, keys and negatives (shared ones end the keys)."""
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
        # Every score is linear in a query divided by the temperature.
        self.grad_temperature = -(grad_queries * self.queries).sum() / self.temperature
        grad_queries = grad_queries.div_(self.temperature)
        grad_queries = self.query_side.gradient(grad_queries)
        grad_keys = self.key_side.gradient(grad_keys)
        if grad_each is not None:
            grad_each = self.each_side.gradient(grad_each)
        grad_negative = grad_keys[self.batch :] if self.num_shared else grad_each
        return grad_queries, grad_keys[: self.batch], grad_negative

    def _slopes(self, rows: slice, scores: Tensor) -> Tensor:
        """Overwrite the negatives' scores with the derivative of the loss in them."""
        return scores.sub_(self.total[rows, None]).exp_().mul_(self.slope[rows, None])


def _without_nan(keys: Tensor, ids: Tensor | None) -> Tensor:
    """Zero keys with a NaN if ids may exclude keys: 0 * NaN is NaN."""
    return keys if ids is None else torch.where(keys.isnan().any(1, keepdim=True), 0.0, keys)


class _Coming:
    """The keys and ids being received from the previous rank."""

    def __init__(self, works: list[Any], keys: Tensor, ids: Tensor | None) -> None:
        self.works, self.keys, self.ids = works, keys, ids

    def wait(self) -> tuple[Tensor, Tensor | None]:
        for work in self.works:
            work.wait()
        return self.keys, self.ids


def _ring_exchange(keys: Tensor, ids: Tensor | None) -> _Coming:
    """Start to send to the next rank of the ring and to receive from the previous one."""
    to, source = (rank() + 1) % num_ranks(), (rank() - 1) % num_ranks()
    # Backends send contiguous tensors only; the layout of keys may differ between ranks.
    going = [x.contiguous() for x in (keys, ids) if x is not None]
    coming = [torch.empty_like(x) for x in going]
    operations = []
    for sent, received in zip(going, coming, strict=True):
        operations.append(dist.P2POp(dist.isend, sent, to))
        operations.append(dist.P2POp(dist.irecv, received, source))
    works = dist.batch_isend_irecv(operations)
    return _Coming(works, coming[0], coming[1] if ids is not None else None)
