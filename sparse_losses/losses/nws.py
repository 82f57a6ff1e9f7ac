"""NWS: multi-label contrastive learning against keys, a queue and label prototypes."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from sparse_losses._core.checks import (
    check_choice,
    check_flag,
    check_learnable,
    check_number,
    check_shapes,
    check_zero_one,
    describe,
    values_can_be_checked,
)
from sparse_losses._core.fused import can_fuse, fuse
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses._core.reduction import Reduction, check_reduction, reduce
from sparse_losses._core.similarity import normalize, unit_rows
from sparse_losses._core.softmax import masked_logsumexp, negative_log_softmax, softplus
from sparse_losses._core.token_ids import as_mask
from sparse_losses.distributed import (
    agree_across_ranks,
    average_grad_over_ranks,
    gather_rows,
    num_ranks,
    sum_over_ranks,
)
from sparse_losses.fast.label_lists import LabelLists
from sparse_losses.kernels import Impl, check_impl, uses_triton

__all__ = ["NWSLoss", "nws_loss"]

# Queries that the fused path works on at once, and references that it normalises at once.
TILE_QUERIES = 96
TILE_REFERENCES = 1024

# Powers of four from this one down to its inverse are normal numbers, and so are their sums.
TOP_POWER = {torch.float32: 63, torch.float64: 511}


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
    gather: bool = False,
    impl: Impl = "auto",
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
            ``label_similarity``; ``None`` for prototypes alone.
        key: ``[K, F]``, detached; with ``key_labels``.
        key_labels: ``[K, L]`` multi-hot. A key without labels is a negative with ``a = 1``.
        queue: ``[Q, F]``, detached; with ``queue_labels`` (see ``LabelQueue``).
        queue_labels: ``[Q, L]`` multi-hot.
        queue_mask: ``[Q]`` bool, int or float 0/1: the slots that are filled.
        alpha: weight of keys and queue among the positives, >= 0.
        beta: weight of keys and queue among the negatives, >= 0; 0 drops them.
        temperature: ``t``, finite and > 0; a 0-d tensor or ``nn.Parameter`` is learned.
        aggregation: ``"mean"`` or ``"max"``.
        decoupled: whether the positives stay out of the denominator.
        eps: >= 0. With 0 the loss is exact; above it, a negative's gradient fades once the best
            positive leads it by ``-log(eps)`` temperatures.
        gather: whether all ranks' keys are references, and ``"mean"`` and ``"sum"`` are over all
            ranks' queries (see ``sparse_losses.distributed``). Sizes are the same on every rank,
            and so are prototypes and queue (``LabelQueue(gather=True)``).
        impl: ``"torch"``, ``"triton"`` (a kernel for NVIDIA GPUs) or ``"auto"``, the kernel where
            it was measured to be ahead. It has no ``aggregation="max"``, no ``reduction="none"``
            and no ``gather`` over several ranks.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 features), 0-d or ``[B]``. A row without labels is not valid; neither
        is, when decoupled with ``eps=0``, a row without negatives.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, labels that are not 0/1, a
            similarity outside [0, 1], or features without labels.
        TypeError: for wrong dtypes.

    Examples:
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
        label_similarity=(label_similarity, "L L, optional"),
        key=(key, "K F, optional"),
        key_labels=(key_labels, "K L, optional"),
        queue=(queue, "Q F, optional"),
        queue_labels=(queue_labels, "Q L, optional"),
        queue_mask=(queue_mask, "Q, optional"),
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
    check_impl(impl)
    check_reduction(reduction)
    dtype = compute_dtype(query=query, prototype=prototype, key=key, queue=queue)
    if queue_mask is not None:
        queue_mask = as_mask("queue_mask", queue_mask)
    _check_labels("query_labels", query_labels)
    _check_labels("key_labels", key_labels)
    _check_labels("queue_labels", queue_labels, queue_mask)
    sizes = {"B": size["B"], "F": size["F"], "L": size["L"], "K": size.get("K", 0)}
    data = query, prototype, key, queue
    gathers = agree_across_ranks("nws_loss", gather, *data, Q=size.get("Q", 0), **sizes)
    if gathers and key is not None and key_labels is not None:
        key, key_labels = gather_rows(key.detach().to(dtype)), gather_rows(key_labels != 0)
    learned = temperature.to(dtype) if isinstance(temperature, Tensor) else None
    constants = (query_labels, label_similarity, key, key_labels, queue, queue_labels, queue_mask)
    tensors = (
        query,
        prototype,
        learned,
        *(None if constant is None else constant.detach() for constant in constants),
    )
    fixed = 1.0 if isinstance(temperature, Tensor) else temperature
    options = _Options(alpha, beta, fixed, aggregation, decoupled, eps, reduction, gathers)
    plain: Callable[..., Tensor] = functools.partial(_plain, options)
    references = size.get("K", 0) + size.get("Q", 0) + size["L"]
    needs = _needs(options, size)
    needs["a `temperature` on the device of `query`"] = (
        learned is None or learned.device == query.device
    )
    if uses_triton("nws", impl, *data, elements=size["B"] * references, needs=needs):
        from sparse_losses.kernels._operators import scale_
        from sparse_losses.kernels.nws import nws

        return fuse(plain, functools.partial(nws, *options), *tensors, scale_=scale_)
    if reduction != "none" and query.device.type == "cpu" and can_fuse(*tensors):
        wide = query.to(dtype), prototype.to(dtype), *tensors[2:]
        value = fuse(plain, functools.partial(_fused, options), *wide)
        return average_grad_over_ranks(value) if gathers else value
    return plain(*tensors)


class _Options(NamedTuple):
    alpha: float
    beta: float
    temperature: float  # unless it is learned
    aggregation: str
    decoupled: bool
    eps: float
    reduction: str
    gather: bool


def _needs(options: _Options, size: Mapping[str, int]) -> dict[str, bool]:
    """What the kernel asks for."""
    return {
        '`aggregation` to be "mean"': options.aggregation == "mean",
        '`reduction` to be "mean" or "sum"': options.reduction != "none",
        "`gather=False`, or a single rank,": not options.gather,
        "queries with features": size["B"] > 0 and size["F"] > 0,
        # The kernel counts shared labels in units of twice as many, which fp16 must hold.
        "at most 16384 labels": size["L"] <= 16384,
    }


def _plain(
    options: _Options,
    query: Tensor,
    prototype: Tensor,
    temperature: Tensor | None,
    query_labels: Tensor,
    label_similarity: Tensor | None,
    key: Tensor | None,
    key_labels: Tensor | None,
    queue: Tensor | None,
    queue_labels: Tensor | None,
    queue_mask: Tensor | None,
) -> Tensor:
    """The formula, operation by operation."""
    alpha, beta, number, aggregation, decoupled, eps, reduction, gather = options
    dtype = compute_dtype(query=query, prototype=prototype, key=key, queue=queue)
    query, prototype = query.to(dtype), prototype.to(dtype)
    # Keys, then queue; an empty slot has neither features nor labels.
    features, label_rows, filled = [], [], []
    if key is not None and key_labels is not None:
        features.append(key.to(dtype))
        label_rows.append(key_labels.to(dtype))
        filled.append(key.new_ones(key.shape[0], dtype=torch.bool))
    if queue is not None and queue_labels is not None:
        mask = (
            queue.new_ones(queue.shape[0], dtype=torch.bool) if queue_mask is None else queue_mask
        )
        features.append(torch.where(mask[:, None], queue.to(dtype), 0.0))
        label_rows.append(torch.where(mask[:, None], queue_labels.to(dtype), 0.0))
        filled.append(mask)
    labels = query_labels.to(dtype)

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
    per_label = _per_label(labels, share, eps)
    weight, is_positive, negative_weight = per_label, labels > 0, 1 - labels
    is_member = torch.ones_like(is_positive)
    references = prototype
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
    query = normalize(torch.where(valid[:, None], query, 0.0))
    references = torch.where(valid.any(), references, 0.0)
    scores = query @ normalize(references).T
    scores = scores / (number if temperature is None else temperature)

    weighted = scores + negative_weight.log()
    # A weight of 0 is no mask: a NaN shows.
    is_counted = (negative_weight > 0) | (is_member & scores.isnan())
    floor = None
    if eps > 0:
        highest = torch.where(is_member, scores, -torch.inf).max(-1, keepdim=True).values
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
    return reduce(values, reduction, valid, gather)


def _fused(
    options: _Options,
    needs: Sequence[bool],
    query: Tensor,
    prototype: Tensor,
    temperature: Tensor | None,
    query_labels: Tensor,
    label_similarity: Tensor | None,
    key: Tensor | None,
    key_labels: Tensor | None,
    queue: Tensor | None,
    queue_labels: Tensor | None,
    queue_mask: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Value and gradients of ``_plain`` on the CPU, a tile of queries at a time.

    Matrices are ``[R, rows of the tile]``: sums over lists of labels add up rows of them.
    """
    alpha, beta, number, aggregation, decoupled, eps, reduction, gather = options
    dtype, batch = query.dtype, len(query)
    t = number if temperature is None else temperature
    labels = query_labels.to(dtype)
    count = labels.sum(-1)
    with torch.set_grad_enabled(any(needs)):
        query, prototype = (x.detach().requires_grad_(any(needs)) for x in (query, prototype))
        unit_query = normalize(torch.where((count > 0)[:, None], query, 0.0))
        unit_prototype = normalize(prototype)
    anchors = unit_query.detach() / t

    # Keys, then queue; an empty slot has neither features nor labels.
    parts = [(key, key_labels, None), (queue, queue_labels, queue_mask)]
    given = [(x, y, mask) for x, y, mask in parts if x is not None and y is not None and len(x)]
    size = sum(len(x) for x, _, _ in given)
    references = unit_prototype.new_empty(size + len(prototype), prototype.shape[1])
    references[size:] = unit_prototype.detach()
    instances, prototypes = slice(size), slice(size, None)
    filled = torch.ones(size, 1, dtype=torch.bool)
    start = 0
    for x, _, mask in given:
        if mask is not None:
            filled[start : start + len(x), 0] = mask
        for some in torch.split(x, TILE_REFERENCES):
            here = slice(start, start + len(some))
            references[here] = unit_rows(torch.where(filled[here], some.to(dtype), 0.0))[0]
            start += len(some)
    if size:
        lists = LabelLists(
            *(y != 0 if mask is None else (y != 0) & mask[:, None] for _, y, mask in given)
        )
        label_count = lists.count.clamp(min=1).to(dtype)[:, None]
        absent = torch.where(filled, 0.0, -torch.inf).to(dtype)
        negative_scale, overlap_scale = filled.to(dtype) * beta, filled.to(dtype) * alpha
        assert label_similarity is not None  # checked by the caller
        similarity = label_similarity.to(dtype)
        if aggregation == "mean":
            alike = labels @ similarity
        else:
            alike = LabelLists(query_labels).largest(similarity)

    values, valid = torch.empty_like(count), count > 0
    d_query = torch.empty_like(query) if needs[0] else None
    d_prototype = torch.zeros_like(prototype) if needs[1] else None
    d_temperature = labels.new_zeros(()) if needs[2] else None
    buffer = references.new_empty(4 * len(references) * min(TILE_QUERIES, batch))
    for start in range(0, batch, TILE_QUERIES):
        rows = slice(start, min(start + TILE_QUERIES, batch))
        y, one_or_more = labels[rows].T, count[rows].clamp(min=1)
        shape = (4, len(references), y.shape[1])
        scores, weight, terms, spare = buffer[: math.prod(shape)].view(shape)

        # Of the labels: `terms` becomes the negatives' weight, `weight` the positives'.
        share = 1 - alpha / one_or_more
        terms[prototypes] = 1 - y if decoupled else 1.0
        if size:
            unlike = terms[instances]
            if aggregation == "mean":
                pairs = torch.mul(label_count, one_or_more, out=spare[instances]).add_(eps)
                torch.div(lists.sums(alike[rows].T), pairs, out=unlike)
            else:
                unlike.copy_(lists.largest(alike[rows].T))
            unlike.neg_().add_(1.0).clamp_(0.0, 1.0).mul_(negative_scale)
            shared = lists.sums(y)
            # 1 where no label is shared, else 0: arithmetic is many times as fast as `where`.
            is_negative = torch.sub(1.0, shared, out=spare[instances]).clamp_(min=0.0)
            unlike.mul_(is_negative)
            if not decoupled:
                unlike.sub_(is_negative.sub_(1.0))
            union = shared.neg_().add_(label_count).add_(one_or_more)
            overlap = torch.div(overlap_scale, union, out=union)
            share = share + lists.sums_by_label(overlap)
        if decoupled and eps == 0:
            valid[rows] &= terms.amax(0) > 0
        is_valid = valid[rows]
        per_label = _per_label(y, share, eps) / (one_or_more + eps)
        weight[prototypes] = per_label = torch.where(is_valid, per_label, 0.0)
        if size:
            torch.mul(overlap, lists.sums(per_label), out=weight[instances])

        anchor = torch.where(is_valid[:, None], anchors[rows], 0.0)
        torch.mm(references, anchor.T, out=scores)
        at_floor = torch.zeros_like(one_or_more)
        if eps > 0:
            spare.copy_(scores)
            if size:
                spare[instances] += absent
            highest, at_highest = _max(spare)
        # The largest score among those that count; an infinity would make 0 * inf.
        torch.sign(terms, out=spare).sub_(1.0).mul_(torch.finfo(dtype).max / 4).add_(scores)
        shift = spare.amax(0)
        if eps > 0:
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
        values[rows] = near + total * rest.log1p()
        if not any(needs):
            continue

        # By the scores, in place: softmax times the weight of all positives, minus weight.
        probability = total / (1 + rest)
        terms.mul_(probability / peak).sub_(weight)
        by_top = torch.where(is_top, (others - top_weight * rest) / (1 + rest), 0.0)
        terms.scatter_add_(0, at_top[None], by_top[None])
        if eps > 0:
            terms.scatter_add_(0, at_highest[None], (probability * at_floor / peak)[None])
        if d_query is not None:
            torch.mm(terms.T, references, out=d_query[rows])
        if d_prototype is not None:
            d_prototype.addmm_(terms[prototypes], anchor)
        if d_temperature is not None:
            # A shift of all scores changes nothing, so shifted ones do.
            by_row = torch.linalg.vecdot(terms, scores, dim=0)
            d_temperature -= torch.where(is_valid, by_row, 0.0).sum() / t

    value = reduce(values, reduction, valid, gather)
    divisor = values.new_ones(())
    if reduction == "mean":
        divisor = (sum_over_ranks(valid.sum()) if gather else valid.sum()).clamp(min=1).to(dtype)
    if gather:  # DDP divides by the number of ranks what they all contributed to
        divisor = divisor / num_ranks()
    if d_query is not None:
        (d_query,) = torch.autograd.grad(unit_query, query, d_query / t / divisor)
        d_query = torch.where(valid[:, None], d_query, 0.0)
    if d_prototype is not None:
        (d_prototype,) = torch.autograd.grad(unit_prototype, prototype, d_prototype / divisor)
        d_prototype = torch.where(valid.any(), d_prototype, 0.0)
    if d_temperature is not None:
        d_temperature = d_temperature / divisor
    return value, [d_query, d_prototype, d_temperature] + [None] * 7


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


def _per_label(labels: Tensor, share: Tensor, eps: float) -> Tensor:
    """``y / (D + eps)``, where a ``D`` of about 0 counts as 1."""
    share = labels * share
    return labels / (torch.where(share <= 1e-6, 1.0, share) + eps)


def _aggregate(
    labels: Tensor,
    instance_labels: Tensor,
    label_similarity: Tensor | None,
    aggregation: str,
    eps: float,
) -> Tensor:
    """``sim(y_i, y_r)`` as ``[B, R]``; 0 for an unlabelled reference."""
    assert label_similarity is not None  # checked by the caller
    similarity = label_similarity.to(labels.dtype)
    if aggregation == "mean":
        # A count of 0 may be any other: the total is 0.
        pairs = labels.sum(-1, keepdim=True).clamp(min=1) * instance_labels.sum(-1).clamp(min=1)
        return (labels @ similarity) @ instance_labels.T / (pairs + eps)
    # First the nearest of the row's labels to each label, then of those among the reference's.
    nearest = _largest(_rank_labels(similarity.T), labels).T
    return _largest(_rank_labels(nearest), instance_labels)


def _rank_labels(values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For every row of ``[M, L]`` a power of four by rank, and the values by rank, then 0.

    In blocks of as many labels as there are powers of four.
    """
    top = TOP_POWER[values.dtype]
    ranked = []
    for block in torch.split(values, 2 * top, dim=-1):
        by_rank, order = block.sort(dim=-1, descending=True)
        exponents = top - torch.arange(block.shape[-1], device=values.device)
        powers = torch.exp2(2 * exponents.to(values.dtype)).expand(block.shape)
        ranked.append(
            (torch.zeros_like(block).scatter(-1, order, powers), nnf.pad(by_rank, (0, 1)))
        )
    return ranked


def _largest(ranked: list[tuple[Tensor, Tensor]], labels: Tensor) -> Tensor:
    """Largest value, at least 0, among the labels of each row of ``[N, L]``, as ``[M, N]``.

    A product in place of ``[M, N, L]``: of a sum of powers of four, the logarithm knows the
    largest, as all that are smaller add up to a third of it.
    """
    largest = []
    top = TOP_POWER[labels.dtype]
    for (powers, by_rank), hot in zip(ranked, torch.split(labels, 2 * top, dim=-1), strict=True):
        none = by_rank.shape[-1] - 1
        rank = (powers @ hot.T).log2_().mul_(-0.5).add_(top + 0.5)
        rank = rank.nan_to_num_(none, none).clamp(0, none).long()
        largest.append(by_rank.gather(-1, rank))
    return functools.reduce(torch.maximum, largest).clamp(min=0)


def _check_labels(name: str, labels: Tensor | None, mask: Tensor | None = None) -> None:
    """Checks the labels in the slots that are filled."""
    if labels is None or labels.dtype == torch.bool or not values_can_be_checked(labels):
        return
    for start in range(0, labels.shape[0], TILE_REFERENCES):
        rows = labels[start : start + TILE_REFERENCES]
        if mask is not None:
            rows = torch.where(mask[start : start + TILE_REFERENCES, None], rows, 0)
        check_zero_one(name, rows)


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
    check_learnable("temperature", temperature)
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
    """Module of ``nws_loss``; ``label_similarity`` is a buffer.

    Examples:
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
        gather: bool = False,
        impl: Impl = "auto",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        check_shapes(label_similarity=(label_similarity, "L L, optional"))
        _check(label_similarity, alpha, beta, temperature, aggregation, decoupled, eps)
        check_flag(gather=gather)
        check_impl(impl)
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
        self.gather = gather
        self.impl: Impl = impl
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
            gather=self.gather,
            impl=self.impl,
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
            "gather",
            "impl",
            "reduction",
        )
