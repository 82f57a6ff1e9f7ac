"""NWS on the CPU, value and gradient together, some queries at a time.

Matrices of a tile are ``[R, rows of the tile]``: sums over lists of labels add up rows of them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_losses._core.reduction import reduce
from sparse_losses._core.similarity import through_unit_rows_, unit_rows
from sparse_losses.distributed import num_ranks, sum_over_ranks
from sparse_losses.fast.label_lists import LabelLists

__all__ = ["tiled_nws"]

TILE_QUERIES = 96  # worked on at once
TILE_REFERENCES = 1024  # normalised at once

Part = tuple[Tensor, Tensor, Tensor | None]  # features, labels, mask


def tiled_nws(
    needs: Sequence[bool],
    query: Tensor,
    prototype: Tensor,
    temperature: float | Tensor,
    query_labels: Tensor,
    label_similarity: Tensor | None,
    key: Tensor | None,
    key_labels: Tensor | None,
    queue: Tensor | None,
    queue_labels: Tensor | None,
    queue_mask: Tensor | None,
    *,
    alpha: float,
    beta: float,
    aggregation: str,
    decoupled: bool,
    eps: float,
    gather: bool,
    reduction: str,
) -> tuple[Tensor, list[Tensor | None]]:
    """Value and gradients of NWS by query, prototype and temperature."""
    labels = query_labels.to(query.dtype)
    count = labels.sum(-1)
    valid = count > 0
    unit_query, query_inverse = unit_rows(torch.where(valid[:, None], query, 0.0))
    unit_prototype, prototype_inverse = unit_rows(prototype)
    candidates = (key, key_labels, None), (queue, queue_labels, queue_mask)
    parts = [(x, y, mask) for x, y, mask in candidates if x is not None and y is not None]
    weights = _Weights(
        [part for part in parts if len(part[0])],
        labels,
        label_similarity,
        alpha=alpha,
        beta=beta,
        aggregation=aggregation,
        decoupled=decoupled,
        eps=eps,
    )
    references = _unit_references(parts, unit_prototype)
    prototypes = slice(weights.num_instances, None)

    values = torch.empty_like(count)
    d_query = torch.empty_like(query) if needs[0] else None
    d_prototype = torch.zeros_like(prototype) if needs[1] else None
    d_temperature = labels.new_zeros(()) if needs[2] else None
    buffer = references.new_empty(4 * len(references) * min(TILE_QUERIES, len(query)))
    for start in range(0, len(query), TILE_QUERIES):
        rows = slice(start, min(start + TILE_QUERIES, len(query)))
        shape = (4, len(references), rows.stop - start)
        scores, weight, by_score, spare = buffer[: math.prod(shape)].view(shape)
        is_valid = weights.fill_(rows, weight, by_score, spare)
        valid[rows] = is_valid

        anchor = torch.where(is_valid[:, None], unit_query[rows] / temperature, 0.0)
        torch.mm(references, anchor.T, out=scores)
        absent = weights.absent if eps > 0 else None
        values[rows] = _losses_(scores, weight, by_score, spare, is_valid, absent, eps)
        if d_query is not None:
            torch.mm(by_score.T, references, out=d_query[rows])
        if d_prototype is not None:
            d_prototype.addmm_(by_score[prototypes], anchor)
        if d_temperature is not None:
            # A shift of all scores changes nothing, so shifted ones do.
            by_row = torch.linalg.vecdot(by_score, scores, dim=0)
            d_temperature -= torch.where(is_valid, by_row, 0.0).sum() / temperature

    divisor = values.new_ones(())
    if reduction == "mean":
        num_valid = sum_over_ranks(valid.sum()) if gather else valid.sum()
        divisor = num_valid.clamp(min=1).to(values.dtype)
    if gather:  # DDP divides by the number of ranks what they all contributed to
        divisor = divisor / num_ranks()
    if d_query is not None:
        through_unit_rows_(d_query, unit_query, query_inverse).div_(temperature * divisor)
        d_query = torch.where(valid[:, None], d_query, 0.0)
    if d_prototype is not None:
        through_unit_rows_(d_prototype, unit_prototype, prototype_inverse).div_(divisor)
        d_prototype = torch.where(valid.any(), d_prototype, 0.0)
    if d_temperature is not None:
        d_temperature = d_temperature / divisor
    return reduce(values, reduction, valid, gather), [d_query, d_prototype, d_temperature]


def _unit_references(parts: Sequence[Part], unit_prototype: Tensor) -> Tensor:
    """Unit rows of keys, queue and prototypes; an empty slot is 0."""
    size = sum(len(x) for x, _, _ in parts) + len(unit_prototype)
    references = unit_prototype.new_empty(size, unit_prototype.shape[1])
    start = 0
    for x, _, mask in parts:
        for piece in range(0, len(x), TILE_REFERENCES):
            some = x[piece : piece + TILE_REFERENCES]
            if mask is not None:
                some = torch.where(mask[piece : piece + TILE_REFERENCES, None], some, 0.0)
            references[start : start + len(some)] = unit_rows(some)[0]
            start += len(some)
    references[start:] = unit_prototype
    return references


class _Weights:
    """What the labels say: how much a reference counts as a positive, and as a negative."""

    def __init__(
        self,
        parts: Sequence[Part],
        labels: Tensor,
        label_similarity: Tensor | None,
        *,
        alpha: float,
        beta: float,
        aggregation: str,
        decoupled: bool,
        eps: float,
    ) -> None:
        self.labels, self.count = labels, labels.sum(-1)
        self.alpha, self.aggregation, self.decoupled, self.eps = alpha, aggregation, decoupled, eps
        self.num_instances = sum(len(x) for x, _, _ in parts)
        filled = [
            torch.ones(len(x), dtype=torch.bool) if mask is None else mask for x, _, mask in parts
        ]
        everyone = torch.cat([*filled, torch.ones(labels.shape[1], dtype=torch.bool)])[:, None]
        # Added to the scores, it takes empty slots out of their maximum.
        self.absent = torch.where(everyone, 0.0, -torch.inf).to(labels.dtype)
        if not parts:
            return
        assert label_similarity is not None  # checked by the caller
        self.lists = LabelLists(
            *((y != 0) & mask[:, None] for (_, y, _), mask in zip(parts, filled, strict=True))
        )
        self.instance_count = self.lists.count.clamp(min=1).to(labels.dtype)[:, None]
        self.beta = everyone[: self.num_instances].to(labels.dtype) * beta
        if aggregation == "mean":
            self.alike = labels @ label_similarity
        else:
            self.alike = LabelLists(labels).largest(label_similarity)

    def fill_(self, rows: slice, weight: Tensor, negative_weight: Tensor, spare: Tensor) -> Tensor:
        """Fills in both weights of some queries; returns which of these are valid."""
        instances, prototypes = slice(self.num_instances), slice(self.num_instances, None)
        y, count = self.labels[rows].T, self.count[rows]
        one_or_more = count.clamp(min=1)
        share = 1 - self.alpha / one_or_more
        negative_weight[prototypes] = 1 - y if self.decoupled else 1.0
        if self.num_instances:
            shared = self.lists.sums(y)
            self._fill_instances_(
                negative_weight[instances], rows, one_or_more, shared, spare[instances]
            )
            union = shared.neg_().add_(self.instance_count).add_(one_or_more)
            overlap = torch.div(self.alpha, union, out=union)
            share = share + self.lists.sums_by_label(overlap)
        is_valid = count > 0
        if self.decoupled and self.eps == 0:
            is_valid = is_valid & (negative_weight.amax(0) > 0)
        share = y * share
        per_label = y / (torch.where(share <= 1e-6, 1.0, share) + self.eps)
        per_label = torch.where(is_valid, per_label / (one_or_more + self.eps), 0.0)
        weight[prototypes] = per_label
        if self.num_instances:
            torch.mul(overlap, self.lists.sums(per_label), out=weight[instances])
        return is_valid

    def _fill_instances_(
        self, unlike: Tensor, rows: slice, count: Tensor, shared: Tensor, spare: Tensor
    ) -> None:
        """Writes the weights of keys and queue as negatives to ``unlike``."""
        if self.aggregation == "mean":
            pairs = torch.mul(self.instance_count, count, out=spare).add_(self.eps)
            torch.div(self.lists.sums(self.alike[rows].T), pairs, out=unlike)
        else:
            unlike.copy_(self.lists.largest(self.alike[rows].T))
        unlike.neg_().add_(1.0).clamp_(0.0, 1.0).mul_(self.beta)
        # 1 where no label is shared, else 0: arithmetic is many times as fast as `where`.
        is_negative = torch.sub(1.0, shared, out=spare).clamp_(min=0.0)
        unlike.mul_(is_negative)
        if not self.decoupled:
            unlike.sub_(is_negative.sub_(1.0))


def _losses_(
    scores: Tensor,
    weight: Tensor,
    terms: Tensor,
    spare: Tensor,
    is_valid: Tensor,
    absent: Tensor | None,
    eps: float,
) -> Tensor:
    """Losses of the queries of a tile; ``terms`` come as the weights of negatives.

    They become the gradient by the scores: the share of the denominator times the weight of all
    positives, minus the weight. ``scores`` are shifted, ``weight`` and ``spare`` are used up.
    With ``eps``, ``absent`` takes empty slots out of the maximum.
    """
    at_floor = scores.new_zeros(scores.shape[1])
    if absent is not None:
        highest, at_highest = _max(torch.add(scores, absent, out=spare))
    # The largest score among those that count; an infinity would make 0 * inf.
    torch.sign(terms, out=spare).sub_(1.0).mul_(torch.finfo(scores.dtype).max / 4).add_(scores)
    shift = spare.amax(0)
    if absent is not None:
        floor = highest + math.log(eps)
        shift = torch.maximum(shift, floor)
        at_floor = (floor - shift).exp()
    scores.sub_(torch.where(is_valid, shift, 0.0))
    terms.mul_(torch.clamp(scores, max=0.0, out=spare).exp_())

    # As in `negative_log_softmax`: of the denominator, the largest term is taken out, with its
    # weight as a positive. It may be the floor.
    top, at_top = _max(terms)
    is_top = top >= at_floor
    top_weight = torch.where(is_top, weight.gather(0, at_top[None])[0], 0.0)
    weight.scatter_add_(0, at_top[None], -top_weight[None])
    terms.scatter_add_(0, at_top[None], -torch.where(is_top, top, 0.0)[None])
    peak = torch.where(is_valid, torch.maximum(top, at_floor), 1.0)
    rest = (terms.sum(0) + torch.where(is_top, at_floor, 0.0)) / peak
    # Of a positive, the score itself: its own term is then `rest` alone.
    level = torch.where(top_weight > 0, scores.gather(0, at_top[None])[0], peak.log())
    others = weight.sum(0)
    total = others + top_weight
    near = others * level - torch.linalg.vecdot(weight, scores, dim=0)
    losses: Tensor = near + total * rest.log1p()

    probability = total / (1 + rest)
    terms.mul_(probability / peak).sub_(weight)
    by_top = torch.where(is_top, (others - top_weight * rest) / (1 + rest), 0.0)
    terms.scatter_add_(0, at_top[None], by_top[None])
    if absent is not None:
        terms.scatter_add_(0, at_highest[None], (probability * at_floor / peak)[None])
    return losses


def _max(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x.max(0)``; looking for indices in one block of rows only is ten times as fast."""
    size = 64
    if len(x) < 2 * size:
        return x.max(0)
    whole = len(x) // size
    blocks = x[: whole * size].view(whole, size, -1).amax(1)
    # The last block may overlap the one before it.
    blocks = torch.cat([blocks, x[-size:].amax(0, keepdim=True)])
    start = (blocks.max(0).indices * size).clamp(max=len(x) - size)
    value, index = x.gather(0, start + torch.arange(size)[:, None]).max(0)
    return value, start + index
