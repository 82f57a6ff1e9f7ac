"""NWS: multi-label contrastive learning with keys, a queue and label prototypes."""

from typing import Any, Literal

import torch
from torch import Tensor

from sparse_losses._core.implementations import (
    Arguments,
    Implementation,
    always,
    as_dict,
    compute,
)
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.own_gradient import temperature_reason
from sparse_losses._core.products import as_single
from sparse_losses._core.reduction import Reduction, reduce
from sparse_losses._core.similarity import normalize
from sparse_losses._core.softmax import masked_logsumexp, negative_log_softmax, softplus
from sparse_losses.distributed import gather_rows
from sparse_losses.fast.nws import Call, direct_nws, largest_of_labels

Aggregation = Literal["mean", "max"]
Impl = Literal["auto", "definition", "direct"]


@loss(
    query="B F, halves",
    query_labels="B L, labels, detached",
    prototype="L F, halves",
    label_similarity="L L, optional, constant, detached, 0 to 1",
    key="K F, optional, detached, halves",
    key_labels="K L, optional, labels, detached",
    queue="Q F, optional, detached, halves",
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
    impl: Impl = "auto",
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
        impl: ``"definition"``, the formula itself; ``"direct"``, value and gradient together, some
            queries at a time (not for ``reduction="none"``); ``"auto"``: direct if supported.
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
    for name, features, labels in (("key", key, key_labels), ("queue", queue, queue_labels)):
        if (features is None) != (labels is None):
            names = (f"`{name}`", f"`{name}_labels`")
            absent, present = names if features is None else names[::-1]
            raise ValueError(f"expected {absent} with {present}, got None")
    if queue_mask is not None and queue is None:
        raise ValueError("expected `queue` with `queue_mask`, got None")
    if label_similarity is None and (key is not None or queue is not None):
        raise ValueError("expected `label_similarity` with `key` or `queue`, got None")
    if queue is not None and queue_labels is not None and queue_mask is None:
        queue_mask = queue.any(-1) | (queue_labels.amax(-1) != 0)
    if key is not None and key_labels is not None and gather:
        key, key_labels = gather_rows(key), gather_rows(key_labels != 0)
    call = Call(
        query=query,
        prototype=prototype,
        temperature=temperature,
        query_labels=query_labels,
        label_similarity=label_similarity,
        key=key,
        key_labels=key_labels,
        queue=queue,
        queue_labels=queue_labels,
        queue_mask=queue_mask,
        alpha=alpha,
        beta=beta,
        aggregation=aggregation,
        decoupled=decoupled,
        eps=eps,
        gather=gather,
        reduction=reduction,
    )
    return compute(_definition, IMPLEMENTATIONS, impl, as_dict(call))


def _definition(**arguments: Any) -> Tensor:
    """The formula, with references in the order prototypes, keys, queue."""
    call = Call(**arguments)
    alpha, beta, eps, decoupled = call.alpha, call.beta, call.eps, call.decoupled
    features, y_r, is_empty = call.instances()
    features = as_single(features)
    filled = y_r.new_ones(len(y_r), dtype=torch.bool)
    if is_empty is not None:
        filled = torch.cat([filled[len(is_empty) :], ~is_empty])
    y = call.query_labels.to(y_r.dtype)
    count = y.sum(-1, keepdim=True).clamp(min=1)  # rows without labels are not valid
    shared = y @ y_r.T
    overlap = alpha / (count + y_r.sum(-1) - shared).clamp(min=1)  # alpha / |y_i or y_r|
    D = y * (overlap @ y_r + 1 - alpha / count)
    per_label = y / (torch.where(D <= 1e-6, 1.0, D) + eps)
    w = torch.cat([per_label, overlap * (per_label @ y_r.T)], dim=1)
    unlike = (1 - _similarity(y, y_r, call)).clamp(0, 1)
    a = torch.cat([torch.ones_like(y), torch.where(filled, beta * unlike, 0.0)], dim=1)  # beta_u a
    is_positive = torch.cat([y, shared], dim=1) > 0
    a = torch.where(is_positive, 0.0 if decoupled else 1.0, a)  # in the denominator: u in N_i

    valid = y.any(-1)
    if decoupled and eps == 0:
        valid = valid & (a > 0).any(-1)
    s = _cosines(call.query, features, call.prototype, valid) / call.temperature
    weighted = s + a.log()
    absent = ~((a > 0) | s.isnan())  # keeps a NaN of weight 0
    if eps > 0:
        is_member = torch.cat([filled.new_ones(y.shape[1]), filled])
        M = torch.where(is_member, s, -torch.inf).max(-1, keepdim=True).values  # of ties, the first
        floor = M + (torch.zeros_like(M) + eps).log()  # log(eps e^M); compiled, eps is symbolic
    if decoupled:
        log_denominator = masked_logsumexp(weighted, absent).unsqueeze(-1)
        if eps > 0:
            log_denominator = floor + softplus(log_denominator - floor)
        terms = log_denominator - s
    else:
        if eps > 0:
            weighted = torch.cat([weighted, floor], dim=1)
            absent = torch.cat([absent, torch.zeros_like(valid)[:, None]], dim=1)
        terms = negative_log_softmax(weighted, absent)[:, : s.shape[1]]
    values = (w * torch.where(is_positive, terms, 0.0)).sum(-1) / (count[:, 0] + eps)
    return reduce(values, call.reduction, valid, call.gather)


def _cosines(query: Tensor, features: Tensor, prototype: Tensor, valid: Tensor) -> Tensor:
    """Cosines ``[B, R]``; inputs that no valid row uses are zeroed, or a NaN reaches gradients."""
    some, dtype = valid.any(), features.dtype
    query = normalize(torch.where(valid[:, None], query.to(dtype), 0.0))
    # Two products, as only the prototypes have a gradient.
    parts = [torch.where(some, x.to(dtype), 0.0) for x in (prototype, features) if len(x)]
    return torch.cat([query @ normalize(x).T for x in parts], dim=1)


def _similarity(y: Tensor, y_r: Tensor, call: Call) -> Tensor:
    """``sim(y_i, y_r)`` as ``[B, R]``; 0 for an unlabelled reference."""
    if call.label_similarity is None:  # then there are no keys and no queue
        return y @ y_r.T
    if call.aggregation == "mean":
        # The numerator is 0 where a count is clamped to 1. A query without labels is not valid.
        pairs = y.sum(-1, keepdim=True) * y_r.sum(-1).clamp(min=1)
        return (y @ call.label_similarity) @ y_r.T / (pairs + call.eps)
    # The maximum over the query's labels, then over the reference's.
    by_label = largest_of_labels(call.label_similarity.T, y).T
    return largest_of_labels(by_label, y_r)


def _unsupported_reason(arguments: Arguments) -> str | None:
    if arguments["reduction"] == "none":
        return 'reduction="mean" or "sum"'
    return temperature_reason(arguments["temperature"], arguments["query"])


IMPLEMENTATIONS = (Implementation("direct", _unsupported_reason, always, direct_nws),)


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
        impl: Impl = "auto",
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
        impl: Impl | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        keys = {"key": key, "key_labels": key_labels}
        slots = {"queue": queue, "queue_labels": queue_labels, "queue_mask": queue_mask}
        options = self.hyperparameters(gather=gather, impl=impl, **keys, **slots)
        return nws_loss(query, query_labels, prototype, self.label_similarity, **options)
