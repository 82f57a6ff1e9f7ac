"""NWS: multi-label contrastive learning with keys, a queue and label prototypes."""

import functools
import math
from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.reduction import Reduction, reduce
from sparse_losses._core.similarity import normalize
from sparse_losses._core.softmax import negative_log_softmax
from sparse_losses.distributed import gather_rows

Aggregation = Literal["mean", "max"]

# Powers of four with exponents from minus this number to it are normal numbers, as are their sums.
TOP_POWER = {torch.float32: 63, torch.float64: 511}


@loss(
    query="B F",
    query_labels="B L, labels, detached",
    prototype="L F",
    label_similarity="L L, optional, constant, detached, 0 to 1",
    key="K F, optional, detached",
    key_labels="K L, optional, labels, detached",
    queue="Q F, optional, detached",
    queue_labels="Q L, optional, labels at queue_mask, detached",
    queue_mask="Q, mask, optional",
    alpha=">= 0",
    beta=">= 0",
    temperature="> 0, learnable",
    eps=">= 0",
)
def nws_loss(
    query: Tensor,
    query_labels: Tensor,
    prototype: Tensor,
    label_similarity: Tensor | None,
    *,
    key: Tensor | None = None,
    key_labels: Tensor | None = None,
    queue: Tensor | None = None,
    queue_labels: Tensor | None = None,
    queue_mask: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    temperature: float | Tensor = 0.07,
    aggregation: Aggregation = "mean",
    decoupled: bool = True,
    eps: float = 1e-8,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Multi-label contrastive loss; a negative weighs more the less similar its labels are.

    $$\ell_i = -\frac{1}{|y_i| + \varepsilon} \sum_{r} w_{ir} \log \frac{\exp(s_{ir} / t)}
    {\sum_{u \in N_i} \beta_u a_{iu} \exp(s_{iu} / t) + \varepsilon e^{M_i}}$$

    $s_{ir}$ is the cosine of query $i$ and reference $r$ (keys, queue, prototypes), $t$ the
    temperature, $M_i = \max_r s_{ir} / t$. $y$ are multi-hot labels, $|y|$ is their number. $N_i$
    are the references that share no label with query $i$; prototype $l$ has label $l$ only. For
    keys and queue $\beta_u = \beta$ and $a_{iu} = 1 - \mathrm{sim}(y_i, y_u)$, for prototypes both
    are 1, where sim aggregates the ``label_similarity`` $S$:

    $$\mathrm{sim} = \frac{y_i^\top S y_u}{|y_i| |y_u| + \varepsilon} \;(\text{mean})
    \qquad \max_{c \in y_i,\, d \in y_u} S_{cd} \;(\text{max})$$

    The weight of a positive is its label overlap, normalised per label:

    $$w_{ir} = \frac{\alpha}{|y_i \lor y_r|} \sum_c \frac{y_{ic} y_{rc}}{D_{ic} + \varepsilon}
    \qquad w_{il} = \frac{y_{il}}{D_{il} + \varepsilon} \;(\text{prototype})$$

    $$D_{ic} = y_{ic} \Bigl(\sum_{r} \frac{\alpha \, y_{rc}}{|y_i \lor y_r|} + 1
    - \frac{\alpha}{|y_i|}\Bigr)$$

    with sums over keys and queue; $D_{ic} \le 10^{-6}$ is replaced by 1 (at $\alpha = 1$, if only
    the prototype has that label). Memory is $O(B R)$ for $R$ references.

    Without positives in the denominator the loss may be negative. ``decoupled=False`` adds them
    with weight 1; then $\ell_i \ge 0$ if all weights $w \ge 0$.

    Args:
        query: ``[B, F]`` floating; normalised here, as are all references.
        query_labels: ``[B, L]`` multi-hot, bool, int or float 0/1.
        prototype: ``[L, F]``, one learnable row per label.
        label_similarity: ``[L, L]``, ``S`` in [0, 1]; needed with ``key`` or ``queue``.
        key: ``[K, F]``, detached; needs ``key_labels``.
        key_labels: ``[K, L]`` multi-hot. A key without labels is a negative with ``a = 1``.
        queue: ``[Q, F]``, detached; needs ``queue_labels`` (see ``LabelQueue``).
        queue_labels: ``[Q, L]`` multi-hot.
        queue_mask: ``[Q]`` bool, int or float 0/1; marks the filled slots. Without it, slots whose
            features and labels are all zero are empty, as in a new ``LabelQueue``.
        alpha: weight of keys and queue among the positives, >= 0.
        beta: the same among the negatives, >= 0; 0 removes them.
        temperature: ``t``, finite and > 0; a 0-d tensor or ``nn.Parameter`` is learned.
        aggregation: ``"mean"`` or ``"max"``.
        decoupled: whether the positives stay out of the denominator.
        eps: $\varepsilon$ >= 0. If above 0, the gradient of a negative fades once the score of the
            best positive exceeds its own by ``-log(eps)`` temperatures.
        gather: whether all ranks' keys are references, and ``"mean"`` and ``"sum"`` are over all
            ranks' queries. Sizes, prototypes and queue must be the same on every rank
            (``LabelQueue(gather=True)``).
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 features), 0-d or ``[B]``. A row without labels is not valid, nor is a
        row without negatives if ``decoupled`` and ``eps=0``.

    Raises:
        ValueError: for wrong shapes, devices, values or hyperparameters, or missing labels.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import nws_loss
        >>> query, labels = torch.eye(2), torch.eye(2)
        >>> nws_loss(query, labels, torch.eye(2), None, temperature=1.0)  # log(exp(0) / exp(1))
        tensor(-1.)

    References:
        Decoupled Contrastive Learning. Multi-Label Contrastive Learning: A Comprehensive Study (the
        weights). Momentum Contrast (the queue). An unpublished definition of NWS (the negatives).
    """
    if query_labels.shape[1] == 0:
        raise ValueError("expected `prototype` of at least one label, got L = 0")
    for name, vectors, its_labels in (("key", key, key_labels), ("queue", queue, queue_labels)):
        if (vectors is None) != (its_labels is None):
            names = (f"`{name}`", f"`{name}_labels`")
            absent, present = names if vectors is None else names[::-1]
            raise ValueError(f"expected {absent} with {present}, got None")
    if queue_mask is not None and queue is None:
        raise ValueError("expected `queue` with `queue_mask`, got None")
    if label_similarity is None and (key is not None or queue is not None):
        raise ValueError("expected `label_similarity` with `key` or `queue`, got None")
    # References are in the order prototypes, keys, queue; instances are keys and queue.
    y, is_empty = query_labels.to(query.dtype), None
    features, labels = [prototype[:0].detach()], [y[:0]]
    if key is not None and key_labels is not None:
        features.append(gather_rows(key, gather))
        labels.append(gather_rows(key_labels != 0) if gather else key_labels)
    if queue is not None and queue_labels is not None:
        is_filled = queue_mask
        if is_filled is None:  # uint8 alone has an `any` of its own dtype
            is_filled = queue.any(-1) | queue_labels.any(-1).bool()
        is_empty = ~is_filled[:, None]
        features.append(queue.masked_fill(is_empty, 0))
        labels.append(queue_labels.masked_fill(is_empty, 0))
    y_r = torch.cat(labels).to(y)
    shared, count, count_r = y @ y_r.T, y.sum(-1, keepdim=True), y_r.sum(-1)
    is_void, count = count == 0, count.clamp(min=1)

    overlap = alpha / (count - shared + count_r)  # alpha / |y_i or y_r|
    D = torch.addmm(1 - alpha / count, overlap, y_r)
    per_label = y / (nnf.threshold(D, 1e-6, 1.0) + eps)
    w = torch.cat([per_label, overlap * (per_label @ y_r.T)], dim=1)
    if label_similarity is None:  # then there are no keys and no queue
        similar = shared
    elif aggregation == "mean":
        similar = (y @ label_similarity) @ y_r.T / (count * count_r.clamp(min=1) + eps)
    else:  # the maximum over the query's labels, then over the reference's
        similar = _largest_of_labels(_largest_of_labels(label_similarity.T, y).T, y_r)
    a = nnf.pad(beta * (1 - similar).clamp(0, 1), (y.shape[1], 0), value=1.0)  # beta_u a
    is_positive = torch.cat([y, shared], dim=1) > 0
    a = a.masked_fill(is_positive, 0.0 if decoupled else 1.0)  # in the denominator: u in N_i
    if is_empty is not None:
        is_empty = nnf.pad(is_empty[:, 0], (a.shape[1] - len(is_empty), 0))
    if decoupled and eps == 0:
        a = a if is_empty is None else a.masked_fill(is_empty, 0.0)
        is_void = is_void | ~a.any(-1, keepdim=True)

    # What no valid row uses is zeroed, or a NaN reaches gradients.
    is_unused, unit = is_void.all(), normalize(query.masked_fill(is_void, 0.0))
    units = [normalize(x.masked_fill(is_unused, 0.0)) for x in (prototype, torch.cat(features))]
    s = torch.cat([unit @ x.T for x in units], dim=1) / temperature
    terms = _terms(s, a, is_empty, eps, decoupled)
    values, is_void = (w * terms).sum(-1) / (count[:, 0] + eps), is_void[:, 0]
    return reduce(values.masked_fill(is_void, 0.0), reduction, ~is_void, gather, zeroed=True)


def _terms(s: Tensor, a: Tensor, is_empty: Tensor | None, eps: float, decoupled: bool) -> Tensor:
    """Return minus the logarithm of every reference's share of the denominator ``[B, R]``."""
    # What is absent from a sum gets a score far below: finite, and a NaN of weight 0 stays a NaN.
    far = torch.finfo(s.dtype).max / 8
    s = s if is_empty is None else s.add(is_empty, alpha=-far)
    weighted = s + a.log().clamp(min=-far)
    if eps > 0:
        M = s.max(-1, keepdim=True).values  # of ties, the first
        is_traced = torch.compiler.is_compiling()  # by which eps is symbolic
        log_eps = (torch.zeros_like(M) + eps).log() if is_traced else math.log(eps)
        weighted = torch.cat([weighted, M + log_eps], dim=1)
    if decoupled:
        largest = weighted.detach().amax(-1, keepdim=True)
        return (weighted - largest).exp().sum(-1, keepdim=True).log() + largest - s
    terms = negative_log_softmax(weighted, torch.zeros_like(weighted, dtype=torch.bool))
    return terms[:, : s.shape[1]]


def _largest_of_labels(values: Tensor, labels: Tensor) -> Tensor:
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


class NWSLoss(LossModule):
    """Module of ``nws_loss``; ``label_similarity`` is a buffer.

    Examples:
        >>> import torch
        >>> from sparse_losses import NWSLoss
        >>> similarity = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
        >>> loss = NWSLoss(similarity, temperature=0.1)
        >>> prototype = torch.nn.Parameter(torch.randn(2, 4))
        >>> labels = torch.tensor([[1, 0], [0, 1], [1, 1]])
        >>> query, key = torch.randn(2, 3, 4)
        >>> loss(query, labels, prototype, key=key, key_labels=labels).backward()
        >>> prototype.grad.shape
        torch.Size([2, 4])
    """

    label_similarity: Tensor | None

    def __init__(
        self,
        label_similarity: Tensor | None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        temperature: float | Tensor = 0.07,
        aggregation: Aggregation = "mean",
        decoupled: bool = True,
        eps: float = 1e-8,
        gather: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(nws_loss, locals())
        self.register_constant("label_similarity", label_similarity)

    def forward(
        self,
        query: Tensor,
        query_labels: Tensor,
        prototype: Tensor,
        *,
        key: Tensor | None = None,
        key_labels: Tensor | None = None,
        queue: Tensor | None = None,
        queue_labels: Tensor | None = None,
        queue_mask: Tensor | None = None,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        keys = {"key": key, "key_labels": key_labels}
        slots = {"queue": queue, "queue_labels": queue_labels, "queue_mask": queue_mask}
        options = self.hyperparameters(gather=gather, **keys, **slots)
        return nws_loss(query, query_labels, prototype, self.label_similarity, **options)
