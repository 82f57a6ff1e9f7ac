"""NWS: multi-label contrastive learning against keys, a queue and label prototypes."""

import math

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import (
    check_choice,
    check_flag,
    check_number,
    check_shapes,
    check_temperature,
    check_zero_one,
    describe,
    values_can_be_checked,
)
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses._core.reduction import Reduction, check_reduction, reduce
from sparse_losses._core.similarity import normalize
from sparse_losses._core.softmax import masked_logsumexp, negative_log_softmax, softplus
from sparse_losses._core.token_ids import as_mask

__all__ = ["NWSLoss", "nws_loss"]


@full_precision
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
    aggregation: str = "mean",
    decoupled: bool = True,
    eps: float = 1e-8,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Multi-label contrastive loss whose negatives weigh by how unlike their labels are.

    $$\ell_i = -\frac{1}{|y_i| + \varepsilon} \sum_{r} w_{ir} \log \frac{\exp(s_{ir} / t)}
    {\sum_{u \in N_i} \beta_u a_{iu} \exp(s_{iu} / t) + \varepsilon e^{M_i}}$$

    $s_{ir}$ is the cosine of query $i$ and reference $r$ (keys, queue, prototypes), $t$ the
    temperature, $M_i = \max_r s_{ir} / t$. $y$ are multi-hot labels, $|y|$ counts them. $N_i$ are
    the references that share no label with query $i$; prototype $l$ carries label $l$ alone.
    $\beta_u$ is $\beta$ for keys and queue, 1 for prototypes;
    $a_{iu} = 1 - \mathrm{sim}(y_i, y_u)$, 1 for prototypes, where sim aggregates the
    ``label_similarity`` $S$:

    $$\mathrm{sim} = \frac{y_i^\top S y_u}{|y_i| |y_u| + \varepsilon} \;(\text{mean})
    \qquad \max_{c \in y_i,\, d \in y_u} S_{cd} \;(\text{max})$$

    The weight of a positive is its label overlap, shared out label by label:

    $$w_{ir} = \frac{\alpha}{|y_i \lor y_r|} \sum_c \frac{y_{ic} y_{rc}}{D_{ic} + \varepsilon}
    \qquad w_{il} = \frac{y_{il}}{D_{il} + \varepsilon} \;(\text{prototype})$$

    $$D_{ic} = y_{ic} \Bigl(\sum_{r} \frac{\alpha \, y_{rc}}{|y_i \lor y_r|} + 1
    - \frac{\alpha}{|y_i|}\Bigr)$$

    with sums over keys and queue, and $D_{ic} \le 10^{-6}$ counting as 1: its prototype is then the
    only carrier of that label. All of it is matrix products: memory is $O(B R)$, $R$ references.

    The denominator holds negatives only, so the loss may be negative. ``decoupled=False`` adds the
    positives to it with weight 1; then $\ell_i \ge 0$ wherever the weights are.

    Args:
        query: ``[B, F]`` floating; normalised here, as are all references.
        query_labels: ``[B, L]`` multi-hot, bool, int or float 0/1.
        prototype: ``[L, F]``, one learnable row a label.
        label_similarity: ``[L, L]``, ``S`` in [0, 1], such as
            :func:`~sparse_losses.functional.label_similarity`; ``None`` for prototypes alone.
        key: ``[K, F]``, detached; with ``key_labels``.
        key_labels: ``[K, L]`` multi-hot. A key without labels is a negative with ``a = 1``.
        queue: ``[Q, F]``, detached; with ``queue_labels`` (see :class:`~sparse_losses.LabelQueue`).
        queue_labels: ``[Q, L]`` multi-hot.
        queue_mask: ``[Q]`` bool, int or float 0/1: the slots that are filled.
        alpha: weight of keys and queue among the positives, >= 0.
        beta: weight of keys and queue among the negatives, >= 0; 0 drops them.
        temperature: ``t``, finite and > 0; a 0-d tensor or ``nn.Parameter`` is learned.
        aggregation: ``"mean"`` or ``"max"``.
        decoupled: whether the positives stay out of the denominator.
        eps: >= 0. With 0 the loss is exact; above it, a negative's gradient fades once the best
            positive leads it by ``-log(eps)`` temperatures.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 features), 0-d or ``[B]``. A row without labels is not valid; neither
        is, when decoupled with ``eps=0``, a row without negatives.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, labels that are not 0/1, a
            similarity outside [0, 1], or features without labels.
        TypeError: for wrong dtypes.

    Example:
        >>> import torch
        >>> from sparse_losses.functional import nws_loss
        >>> query, labels = torch.eye(2), torch.eye(2)
        >>> nws_loss(query, labels, torch.eye(2), None, temperature=1.0)  # log(exp(0) / exp(1))
        tensor(-1.)

    References:
        Decoupled Contrastive Learning. Multi-Label Contrastive Learning: A Comprehensive Study (the
        weights). Momentum Contrast for Unsupervised Visual Representation Learning (the queue). The
        negative weights come from a definition of the NWS loss written down in Japanese.
    """
    size = check_shapes(
        query=(query, "B F"),
        query_labels=(query_labels, "B L"),
        prototype=(prototype, "L F"),
        label_similarity=(label_similarity, "L L", "optional"),
        key=(key, "K F", "optional"),
        key_labels=(key_labels, "K L", "optional"),
        queue=(queue, "Q F", "optional"),
        queue_labels=(queue_labels, "Q L", "optional"),
        queue_mask=(queue_mask, "Q", "optional"),
    )
    if size["L"] == 0:
        raise ValueError("expected `prototype` of at least one label, got L = 0")
    _check_together("key", key, "key_labels", key_labels)
    _check_together("queue", queue, "queue_labels", queue_labels)
    if queue_mask is not None and queue is None:
        raise ValueError("expected `queue` with `queue_mask`, got None")
    if label_similarity is None and (key is not None or queue is not None):
        raise ValueError("expected `label_similarity` with `key` or `queue`, got None")
    _check(label_similarity, alpha, beta, temperature, aggregation, decoupled, eps)
    check_reduction(reduction)
    dtype = compute_dtype(query=query, prototype=prototype, key=key, queue=queue)

    # Keys, then queue; an empty slot has neither features nor labels.
    features, label_rows, filled = [], [], []
    if key is not None and key_labels is not None:
        features.append(key.detach().to(dtype))
        label_rows.append(_multi_hot("key_labels", key_labels, dtype))
        filled.append(key.new_ones(key.shape[0], dtype=torch.bool))
    if queue is not None and queue_labels is not None:
        mask = queue.new_ones(queue.shape[0], dtype=torch.bool)
        mask = mask if queue_mask is None else as_mask("queue_mask", queue_mask)
        features.append(torch.where(mask[:, None], queue.detach().to(dtype), 0.0))
        label_rows.append(_multi_hot("queue_labels", queue_labels, dtype, mask))
        filled.append(mask)
    labels = _multi_hot("query_labels", query_labels, dtype)

    count = labels.sum(-1, keepdim=True)
    is_labelled = count > 0
    one_or_more = count.clamp(min=1)
    share = 1 - alpha / one_or_more
    # In the order keys, queue, prototypes: who takes part, who is positive, who counts how much.
    if features:
        instance_labels, is_filled = torch.cat(label_rows), torch.cat(filled)
        shared = labels @ instance_labels.T
        union = count + instance_labels.sum(-1) - shared
        overlap = torch.where(is_filled, alpha / union.clamp(min=1), 0.0)
        share = share + overlap @ instance_labels
        similarity = _aggregate(labels, instance_labels, label_similarity, aggregation, eps)
        unlike = torch.where(is_filled, beta * (1 - similarity).clamp(0, 1), 0.0)
    share = labels * share
    per_label = labels / (torch.where(share <= 1e-6, 1.0, share) + eps)
    weight, is_positive, negative_weight = per_label, labels > 0, 1 - labels
    is_member = torch.ones_like(is_positive)
    references = prototype.to(dtype)
    if features:
        weight = torch.cat([overlap * (per_label @ instance_labels.T), weight], dim=1)
        is_positive = torch.cat([shared > 0, is_positive], dim=1)
        negative_weight = torch.cat([unlike, negative_weight], dim=1)
        is_member = torch.cat([is_filled.expand(shared.shape), is_member], dim=1)
        references = torch.cat([*features, references])
    negative_weight = torch.where(is_positive, 0.0 if decoupled else 1.0, negative_weight)

    valid = is_labelled[:, 0]
    if decoupled and eps == 0:
        valid = valid & (negative_weight > 0).any(-1)
    # What no valid row looks at must not send its NaN into a gradient: 0 * NaN is NaN.
    query = normalize(torch.where(valid[:, None], query.to(dtype), 0.0))
    references = torch.where(valid.any(), references, 0.0)
    scores = query @ normalize(references).T
    scores = scores / (temperature.to(dtype) if isinstance(temperature, Tensor) else temperature)

    weighted = scores + negative_weight.log()
    # A weight of 0 is no mask: a NaN shows.
    is_counted = (negative_weight > 0) | (is_member & scores.isnan())
    floor = None
    if eps > 0:
        highest = torch.where(is_member, scores, -torch.inf).amax(-1, keepdim=True)
        floor = highest + math.log(eps)
    if decoupled:
        log_denominator = masked_logsumexp(weighted, is_counted).unsqueeze(-1)
        if floor is not None:
            log_denominator = floor + softplus(log_denominator - floor)
        terms = log_denominator - scores
    elif floor is None:
        terms = negative_log_softmax(weighted, is_counted)
    else:
        weighted = torch.cat([weighted, floor], dim=1)
        is_counted = torch.cat([is_counted, torch.ones_like(is_labelled)], dim=1)
        terms = negative_log_softmax(weighted, is_counted)[:, :-1]
    values = (weight * torch.where(is_positive, terms, 0.0)).sum(-1) / (count[:, 0] + eps)
    return reduce(values, reduction, valid)


def _aggregate(
    labels: Tensor,
    instance_labels: Tensor,
    label_similarity: Tensor | None,
    aggregation: str,
    eps: float,
) -> Tensor:
    """``sim(y_i, y_r)`` as ``[B, R]``; 0 for an unlabelled reference."""
    assert label_similarity is not None  # checked by the caller
    similarity = label_similarity.detach().to(labels.dtype)
    if aggregation == "mean":
        pairs = labels.sum(-1, keepdim=True) * instance_labels.sum(-1)
        total = (labels @ similarity) @ instance_labels.T
        return torch.where(pairs > 0, total / torch.where(pairs > 0, pairs + eps, 1.0), 0.0)
    # Nothing larger than [B, R]: first the nearest of the row's labels to each label, then the
    # nearest of those among the reference's. S >= 0 lets a product stand for "if labelled".
    nearest = torch.zeros_like(labels)
    for c in range(labels.shape[1]):
        nearest = torch.maximum(nearest, torch.outer(labels[:, c], similarity[c]))
    largest = labels.new_zeros(labels.shape[0], instance_labels.shape[0])
    for d in range(labels.shape[1]):
        largest = torch.maximum(largest, torch.outer(nearest[:, d], instance_labels[:, d]))
    return largest


def _multi_hot(name: str, labels: Tensor, dtype: torch.dtype, mask: Tensor | None = None) -> Tensor:
    """Labels in the dtype of the computation, 0 where a slot is empty."""
    labels = labels.detach().to(dtype)
    if mask is not None:
        labels = torch.where(mask[:, None], labels, 0.0)
    check_zero_one(name, labels)
    return labels


def _check_together(
    name: str, tensor: Tensor | None, other_name: str, other: Tensor | None
) -> None:
    if (tensor is None) != (other is None):
        present, absent = (other_name, name) if tensor is None else (name, other_name)
        raise ValueError(f"expected `{absent}` with `{present}`, got None")


def _check(
    label_similarity: Tensor | None,
    alpha: float,
    beta: float,
    temperature: float | Tensor,
    aggregation: str,
    decoupled: bool,
    eps: float,
) -> None:
    check_flag(decoupled=decoupled)
    check_number("alpha", alpha, minimum=0.0)
    check_number("beta", beta, minimum=0.0)
    check_number("eps", eps, minimum=0.0)
    check_temperature(temperature)
    check_choice("aggregation", aggregation, ("mean", "max"))
    if label_similarity is not None and values_can_be_checked(label_similarity):
        _check_similarity(label_similarity)


def _check_similarity(label_similarity: Tensor) -> None:
    if label_similarity.numel() == 0:
        return
    low, high = label_similarity.aminmax()
    # A rounding error above 1 is no error; written so that a NaN is one.
    if not (low >= -1e-6 and high <= 1 + 1e-6):
        raise ValueError(
            "expected `label_similarity` finite and in [0, 1], got values from "
            f"{low.item():g} to {high.item():g}"
        )


class NWSLoss(nn.Module):
    """Module of :func:`~sparse_losses.functional.nws_loss`; ``label_similarity`` is a buffer.

    Example:
        >>> import torch
        >>> from sparse_losses import NWSLoss
        >>> similarity = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
        >>> loss = NWSLoss(similarity, temperature=0.1)
        >>> prototype = torch.nn.Parameter(torch.randn(2, 4))
        >>> features, labels = torch.randn(3, 4), torch.tensor([[1, 0], [0, 1], [1, 1]])
        >>> loss(features, labels, prototype, key=features, key_labels=labels).backward()
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
        aggregation: str = "mean",
        decoupled: bool = True,
        eps: float = 1e-8,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        check_shapes(label_similarity=(label_similarity, "L L", "optional"))
        _check(label_similarity, alpha, beta, temperature, aggregation, decoupled, eps)
        check_reduction(reduction)
        if label_similarity is not None:
            label_similarity = label_similarity.detach()
            _check_similarity(label_similarity)  # on any device: once, here, a sync is no harm
        self.register_buffer("label_similarity", label_similarity)
        self.alpha = alpha
        self.beta = beta
        self.temperature = temperature
        self.aggregation = aggregation
        self.decoupled = decoupled
        self.eps = eps
        self.reduction: Reduction = reduction

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
    ) -> Tensor:
        """The loss; tensors as in the function."""
        return nws_loss(
            query,
            query_labels,
            prototype,
            self.label_similarity,
            key=key,
            key_labels=key_labels,
            queue=queue,
            queue_labels=queue_labels,
            queue_mask=queue_mask,
            alpha=self.alpha,
            beta=self.beta,
            temperature=self.temperature,
            aggregation=self.aggregation,
            decoupled=self.decoupled,
            eps=self.eps,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        """The hyperparameters."""
        return describe(
            self,
            "alpha",
            "beta",
            "temperature",
            "aggregation",
            "decoupled",
            "eps",
            "reduction",
        )
