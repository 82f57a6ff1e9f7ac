"""NWS, value and gradient together, some queries at a time.

The weights come from the labels, which have no gradient. With respect to the scores divided by the
temperature, the gradient of a row is ``W q - w``: ``w`` are the weights of its positives, ``W`` is
their sum, and ``q`` the shares of the denominator. References are in the order prototypes, keys,
queue.

What is excluded from a sum gets ``-far`` added to its score: finite, as is then the softmax of a
row, and on a CPU an addition is many times as fast as a masked fill.
"""

import functools
import math
from collections.abc import Set
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.softmax import softmax_and_logsumexp, softplus
from sparse_losses.distributed import num_ranks, sum_over_ranks
from sparse_losses.fast.info_nce import most_scores
from sparse_losses.fast.scores import Scores

MATRICES = 4  # number of matrices as large as the scores that are held at once
# Powers of four with exponents from minus this number to it are normal numbers, as are their sums.
TOP_POWER = {torch.float32: 63, torch.float64: 511}


class Call(NamedTuple):
    """The arguments of a call of ``nws_loss``."""

    query: Tensor
    prototype: Tensor
    temperature: float | Tensor
    query_labels: Tensor
    label_similarity: Tensor | None
    key: Tensor | None
    key_labels: Tensor | None
    queue: Tensor | None
    queue_labels: Tensor | None
    queue_mask: Tensor | None
    alpha: float
    beta: float
    aggregation: str
    decoupled: bool
    eps: float
    gather: bool
    reduction: str

    def instances(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return features and labels of keys, then queue, and the queue's empty slots, now 0."""
        features, labels, is_empty = [self.prototype.detach()[:0]], [self.query_labels[:0]], None
        if self.key is not None and self.key_labels is not None:
            features, labels = [*features, self.key], [*labels, self.key_labels]
        if self.queue is not None and self.queue_labels is not None and self.queue_mask is not None:
            is_empty = ~self.queue_mask
            features.append(self.queue.masked_fill(is_empty[:, None], 0))
            labels.append(self.queue_labels.masked_fill(is_empty[:, None], 0))
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        return torch.cat(features), torch.cat(labels).to(dtype), is_empty


def direct_nws(needs: Set[str], **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the value of NWS and the gradients of query, prototype and temperature."""
    call = Call(**arguments)
    gather, temperature = call.gather, call.temperature
    features, labels, is_empty = call.instances()
    y = call.query_labels.to(labels.dtype)
    is_absent = None if is_empty is None or not len(is_empty) else is_empty.to(y.dtype)
    weights = _Weights(y, labels if len(labels) else None, call)
    num_references = len(call.prototype) + len(features)
    num_blocks = max(-(-len(y) * num_references * MATRICES // most_scores(y.device)), 1)
    step = max(-(-len(y) // num_blocks), 1)
    blocks = [slice(i, min(i + step, len(y))) for i in range(0, max(len(y), 1), step)]

    is_void = weights.is_void
    if call.decoupled and call.eps == 0:  # rows without negatives
        is_void |= torch.cat([weights.without_negatives(rows, is_absent) for rows in blocks])
    inputs = {"query": call.query.masked_fill(is_void, 0.0), "prototype": call.prototype}
    if len(features):
        inputs["instances"] = features
    scores = Scores(needs, inputs, temperature=temperature, cosine=True)
    del features, inputs
    values = []
    for rows in blocks:
        value, grad_scores = _rows(scores.block(rows), weights, rows, is_absent)
        values.append(value)
        if needs:
            scores.backward(rows, grad_scores)
    gradients = scores.gradients()

    # A NaN that no valid row uses must not reach a gradient.
    none_valid = is_void.all()
    hidden = {"query": is_void, "prototype": none_valid, "temperature": none_valid}
    value = (torch.cat(values) if len(values) > 1 else values[0]).masked_fill_(is_void[:, 0], 0.0)
    value, divisor = sum_over_ranks(value.sum()) if gather else value.sum(), temperature
    if call.reduction == "mean":
        num_valid = is_void.logical_not().sum(dtype=y.dtype)
        num_valid = (sum_over_ranks(num_valid) if gather else num_valid).clamp_(min=1)
        value = value / num_valid
        divisor = num_valid * temperature
    if gather:  # DDP divides gradients by the number of ranks
        divisor = divisor / num_ranks()
    for name, is_hidden in hidden.items():
        if (gradient := gradients.get(name)) is not None:
            gradient.div_(divisor).masked_fill_(is_hidden, 0.0)
    return value, gradients


class _Weights:
    """The weights of references as positives and as negatives, computed from the labels."""

    def __init__(self, y: Tensor, labels: Tensor | None, call: Call) -> None:
        self.y, self.labels, self.call, self.num_labels = y, labels, call, y.shape[1]
        self.decoupled, self.eps = call.decoupled, call.eps
        self.far = torch.finfo(y.dtype).max / 8  # twice it is finite, and so are differences
        self.count = y.sum(-1, keepdim=True)
        self.is_void = self.count == 0
        self.count.clamp_(min=1)
        if labels is None or call.label_similarity is None:  # the latter is with the former
            return
        self.label_count = labels.sum(-1)
        self.one_or_more = self.label_count.clamp(min=1)
        if call.aggregation == "mean":
            self.alike = y @ call.label_similarity
        else:
            self.alike = largest_of_labels(call.label_similarity.T, y).T

    def shared(self, rows: slice) -> Tensor | None:
        """Return the number of labels that some queries share with keys and queue ``[c, I]``."""
        return None if self.labels is None else self.y[rows] @ self.labels.T

    def positives(self, rows: slice, shared: Tensor | None) -> Tensor:
        """Return ``w / (|y| + eps)`` of prototypes, keys and queue ``[c, L + I]``."""
        y, count, labels = self.y[rows], self.count[rows], self.labels
        share = torch.rsub(count.reciprocal(), 1, alpha=self.call.alpha)  # 1 - alpha / |y|
        if labels is None:
            return y / self._normaliser_(share, count)
        assert shared is not None
        overlap = torch.sub(count, shared).add_(self.label_count).reciprocal_()
        if self.call.alpha != 1:
            overlap.mul_(self.call.alpha)
        share = (overlap @ labels).add_(share)
        w = y.new_empty(len(y), self.num_labels + len(labels))
        per_label = w[:, : self.num_labels]
        torch.div(y, self._normaliser_(share, count), out=per_label)
        torch.mul(per_label @ labels.T, overlap, out=w[:, self.num_labels :])
        return w

    def _normaliser_(self, share: Tensor, count: Tensor) -> Tensor:
        return torch.threshold_(share, 1e-6, 1.0).add_(self.eps).mul_(count + self.eps)

    def negatives(self, rows: slice, shared: Tensor) -> Tensor:
        """Return the logarithm of ``beta a`` of keys and queue ``[c, I]``."""
        assert self.labels is not None
        if self.call.aggregation == "mean":
            similar = self.alike[rows] @ self.labels.T
            similar.div_((self.count[rows] * self.one_or_more).add_(self.eps))
        else:
            similar = largest_of_labels(self.alike[rows], self.labels)
        unlike = similar.sub_(1.0).clamp_(-1.0, 0.0).mul_(-self.call.beta)
        if self.decoupled:
            return unlike.log_().add_(shared, alpha=-self.far)
        return unlike.masked_fill_(shared > 0, 1.0).log_().clamp_(min=-self.far)

    def without_negatives(self, rows: slice, is_absent: Tensor | None) -> Tensor:
        """Return a mask of the rows without negatives in the denominator ``[c, 1]``."""
        has_all_labels, shared = self.y[rows].amin(1, keepdim=True) > 0, self.shared(rows)
        if shared is None:
            return has_all_labels
        negatives = self.negatives(rows, shared)
        if is_absent is not None:
            negatives[:, -len(is_absent) :].add_(is_absent, alpha=-self.far)
        return has_all_labels & (negatives.amax(1, keepdim=True) < -self.far / 2)


def _rows(
    s: Tensor, weights: _Weights, rows: slice, is_absent: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return values ``[c]`` of some queries and gradients of the scores; overwrites the scores."""
    far, eps, num_labels = weights.far, weights.eps, weights.num_labels
    shared = weights.shared(rows)
    w = weights.positives(rows, shared)
    if is_absent is not None:
        s[:, -len(is_absent) :].add_(is_absent, alpha=-far)
    if eps > 0:
        highest, at_highest = s.max(1, keepdim=True)
        floor = highest.add_(math.log(eps))
    if weights.decoupled:
        along = torch.mul(w, s).sum(1, keepdim=True)
        s[:, :num_labels].add_(weights.y[rows], alpha=-far)
    if shared is not None:
        s[:, num_labels:].add_(weights.negatives(rows, shared))
    if not weights.decoupled:
        # Only the likeliest reference can have nearly all of the probability. Its term is computed
        # separately to avoid cancellation, as in `negative_log_softmax`.
        top, at_top = s.max(1, keepdim=True)
        top_weight = w.gather(1, at_top)
        s.scatter_(1, at_top, -far)
        w.scatter_(1, at_top, 0.0)
        along = torch.mul(w, s).sum(1, keepdim=True)
    total_weight = w.sum(1, keepdim=True)

    gradient, log_denominator = softmax_and_logsumexp(s, 1)
    log_denominator = log_denominator.unsqueeze(1)
    if eps > 0:
        gap = log_denominator - floor
        log_denominator = floor.add_(softplus(gap))
    if weights.decoupled:
        values = (total_weight * log_denominator).sub_(along)
        pull = total_weight
    else:
        gap_to_top = log_denominator - top
        excess = softplus(gap_to_top)
        values = total_weight * (top + excess) - along + top_weight * excess
        pull = (total_weight + top_weight) * gap_to_top.sigmoid()
    slope = pull * gap.sigmoid_() if eps > 0 else pull
    gradient.mul_(slope).sub_(w)
    if eps > 0:
        gradient.scatter_add_(1, at_highest, pull - slope)
    if not weights.decoupled:
        gradient.scatter_add_(1, at_top, total_weight - pull)
    return values.squeeze(1), gradient


def largest_of_labels(values: Tensor, labels: Tensor) -> Tensor:
    """Return the largest of ``values [M, L]``, at least 0, among the labels of each row ``[N, L]``.

    A matrix product avoids ``[M, N, L]``: each label is a power of four, by the rank of its value.
    """
    # The logarithm of a sum of powers gives the largest, as all smaller ones add up to a third of
    # it. A block has as many labels as there are powers.
    top = TOP_POWER[values.dtype]
    blocks = []
    parts = torch.split(values, 2 * top, dim=-1), torch.split(labels, 2 * top, dim=-1)
    for some, hot in zip(*parts, strict=True):
        by_rank, order = some.sort(descending=True)
        none = by_rank.shape[-1]  # the rank for no label, with value 0
        exponents = top - torch.arange(none, device=values.device)
        powers = torch.exp2(2 * exponents.to(values.dtype)).expand(some.shape)
        by_label = torch.zeros_like(some).scatter(-1, order, powers)
        rank = (by_label @ hot.T).log2_().mul_(-0.5).add_(top + 0.5)
        rank = rank.nan_to_num_(none, none).clamp(0, none).long()
        blocks.append(nnf.pad(by_rank, (0, 1)).gather(-1, rank))
    return functools.reduce(torch.maximum, blocks).clamp(min=0)
