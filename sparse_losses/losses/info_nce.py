"""InfoNCE: classify the positive among the candidates (Contrastive Predictive Coding, 2018)."""

from typing import Any, Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.candidates import Call, directions
from sparse_losses._core.implementations import as_dict, compute
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.products import as_dense
from sparse_losses._core.reduction import Reduction, reduce
from sparse_losses._core.similarity import finite_rows, normalize
from sparse_losses._core.softmax import (
    contrastive_rows,
    diagonal,
    false_negative_limit,
    largest_positive,
    one_positive_rows,
)
from sparse_losses.distributed import gather_rows
from sparse_losses.fast.info_nce import IMPLEMENTATIONS

Similarity = Literal["cosine", "dot"]
NegativesFrom = tuple[Literal["document", "query", "positive"], ...]
Impl = Literal["auto", "definition", "direct", "blocks", "nonzeros"]


@loss(
    anchor="B D, csr, halves",
    positive="B D, csr, halves",
    negative="N D or B N D, optional, csr, halves",
    positive_ids="B, integer, optional",
    positive_mask="B K, mask, optional",
    candidate_mask="B C, mask, optional",
    temperature="> 0, learnable",
    false_negative_margin="finite",
    false_negative_ratio=">= 0",
)
def info_nce_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.07,
    similarity: Similarity = "cosine",
    symmetric: bool = False,
    in_batch: bool = True,
    negatives_from: NegativesFrom = ("document",),
    positive_ids: Tensor | None = None,
    positive_mask: Tensor | None = None,
    candidate_mask: Tensor | None = None,
    false_negative_margin: float | None = None,
    false_negative_ratio: float | None = None,
    decoupled: bool = False,
    gather: bool = False,
    impl: Impl = "auto",
    reduction: Reduction = "mean",
) -> Tensor:
    r"""InfoNCE: cross-entropy of the positive among the candidates of a row.

    $$\ell_i = -\log \frac{\exp(s_{ii} / t)}{\sum_{c \in C_i} \exp(s_{ic} / t)}$$

    $s_{ic}$ is the similarity of anchor $i$ and candidate $c$, $t$ the temperature. The candidates
    $C_i$ are the row's own positive, the other rows' positives (``in_batch``) and the negatives.
    An easy row keeps its digits: $\mathrm{softplus}(\log\sum_{c \ne i} e^{s_{ic}/t} - s_{ii}/t)$.

    With ``positive_mask`` a row has several positives, and $\ell_i$ is the mean over them of the
    same term: every denominator contains all candidates, including the other positives. With
    ``decoupled`` it contains only the negatives; on raw dot products that loss is unbounded below.

    Args:
        anchor: ``[B, D]`` floating; the queries. Anchors, positives and shared negatives may be
            CSR tensors, whose gradient has their sparsity pattern.
        positive: ``[B, D]``; row ``i`` is the positive of anchor ``i``.
        negative: ``[N, D]``, shared by all rows, or ``[B, N, D]``, ``N`` for each row.
        temperature: ``t``, finite and > 0; a 0-d tensor or ``nn.Parameter`` is learned.
        similarity: ``"cosine"`` (of the rows, normalised here) or ``"dot"``.
        symmetric: whether to average both directions: the negatives are in both, masks are
            transposed for the second, and a row must be valid in both.
        in_batch: whether the other rows' positives are candidates.
        negatives_from: ``"document"`` stands for the other rows' positives, ``"query"`` adds the
            other anchors, ``"positive"`` adds the other positives, by their similarity to the row's
            own positive. If another row's positive is left out for a row, so is what these two add
            from that other row.
        positive_ids: ``[B]`` integers that identify the positives. Another row's positive with the
            id of the row's own is a duplicate and is left out of the row's denominator.
        positive_mask: ``[B, B]`` bool, int or float 0/1; entry ``[i, j]`` marks positive ``j`` as a
            positive of anchor ``i``. The diagonal is not implied. Needs ``in_batch``.
        candidate_mask: ``[B, C]`` bool, int or float 0/1; 0 leaves a candidate and its NaN out of
            the row, which is not valid without its positive. The columns are the ``B`` positives,
            the row's own among them (without ``in_batch`` that alone), then the ``N`` negatives.
        false_negative_margin: leaves out another row's positive whose similarity, before the
            temperature and without a gradient, is above that of the row's (largest) positive plus
            this number. ``negative`` is never left out.
        false_negative_ratio: likewise leaves it out above this number >= 0 times the similarity of
            the row's positive, where that is > 0. With both, either is enough.
        decoupled: whether to leave the positives out of the denominator.
        gather: whether all ranks' positives and shared negatives are candidates, and ``"mean"`` and
            ``"sum"`` are over all ranks' rows: value and gradient are those of the whole batch (see
            ``sparse_losses.distributed``). Sizes must agree on all ``W`` ranks. ``positive_mask``
            is then ``[B, W B]``; ``candidate_mask`` has ``W B`` positives, ``W N`` negatives.
        impl: how the same value and gradient are computed. ``"auto"`` takes the first of these that
            supports the call: ``"nonzeros"`` (for CSR tensors), ``"blocks"`` (some rows of scores
            at a time, for more than 2^21 on a CPU, 2^26 elsewhere), ``"direct"`` (all at once) and,
            as under ``torch.compile`` and ``torch.func``, ``"definition"``, the formula itself.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 inputs), 0-d or ``[B]``. A row without a positive, and with
        ``decoupled`` a row without a negative, is not valid: its loss is 0, without a gradient.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, or without ``in_batch`` if there
            are no negatives.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import info_nce_loss
        >>> anchor = torch.eye(3)
        >>> info_nce_loss(anchor, anchor, temperature=0.5)  # log(1 + 2 exp(-2))
        tensor(0.2395)
        >>> info_nce_loss(anchor, anchor.flip(0), temperature=0.5, reduction="none")
        tensor([2.2395, 0.2395, 2.2395])

    References:
        Representation Learning with Contrastive Predictive Coding, eq. 4. Supervised Contrastive
        Learning, eq. 2 (``positive_mask``). Decoupled Contrastive Learning (``decoupled``). Qwen3
        Embedding, section 2 (``false_negative_margin``). NV-Retriever: Improving text embedding
        models with effective hard-negative mining (``false_negative_ratio``). Towards General Text
        Embeddings with Multi-stage Contrastive Learning, eq. 4 (``negatives_from``).
    """
    call = Call(
        anchor=anchor,
        positive=positive,
        negative=negative,
        temperature=temperature,
        similarity=similarity,
        symmetric=symmetric,
        in_batch=in_batch,
        negatives_from=negatives_from,
        positive_ids=positive_ids,
        positive_mask=positive_mask,
        candidate_mask=candidate_mask,
        false_negative_margin=false_negative_margin,
        false_negative_ratio=false_negative_ratio,
        decoupled=decoupled,
        gather=gather,
        reduction=reduction,
    )
    _check(call)
    return compute(_definition, IMPLEMENTATIONS, impl, as_dict(call))


def _definition(**arguments: Any) -> Tensor:
    """The formula, operation by operation; with ``gather`` the keys are the rows of all ranks."""
    call = Call(**arguments)
    scored = _scored(call)
    valid = None  # in every direction
    if call.decoupled or call.positive_mask is not None or call.candidate_mask is not None:
        has_terms = [is_positive.any(-1) for _, is_positive, _ in scored]
        has_terms += [~absent.all(-1) for *_, absent in scored if call.decoupled]
        valid = torch.stack(has_terms).all(0)
    values = []
    for scores, is_positive, absent in scored:
        if valid is not None:
            scores = scores.masked_fill(~valid[:, None], 0.0)
        is_positive = nnf.pad(is_positive, (0, scores.shape[1] - is_positive.shape[1]))
        if isinstance(call.temperature, Tensor):  # its gradient has the scores: 0 * NaN is NaN
            scores = scores.masked_fill(absent & ~is_positive, 0.0)
        scores = scores / call.temperature
        if call.positive_mask is None:
            own = diagonal(scores, call.first()) if call.in_batch else scores[:, 0]
            values.append(one_positive_rows(scores, own, absent, decoupled=call.decoupled))
        else:
            values.append(contrastive_rows(scores, is_positive, absent, decoupled=call.decoupled))
    mean = (values[0] + values[1]) / 2 if call.symmetric else values[0]
    return reduce(mean, call.reduction, valid, call.gather)


def _scored(call: Call) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return of each direction the scores, the positives ``[B, K]`` and what is no negative."""
    (rows, keys), every = _vectors(call), slice(0, len(call.anchor))
    place = torch.arange(call.first(), call.first() + len(call.anchor), device=call.anchor.device)
    own = place[:, None] == torch.arange(call.num_keys(), device=place.device)
    own = own if call.in_batch else torch.ones_like(own)
    sources = {"query": "anchor", "positive": "positive"}
    more = [_products(rows[x], keys[x]) for s, x in sources.items() if s in call.negatives_from]
    bounds = call.false_negative_margin, call.false_negative_ratio
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    of_keys = call.anchor
    for direction in directions(call):
        if found and call.in_batch and call.ranks() == 1:
            of_keys = of_keys.T
        else:
            of_keys = _products(rows[direction.query], keys[direction.key])
        marked = own if direction.positives is None else direction.positives
        is_positive, left_out = marked, direction.left_out
        if left_out is not None:
            is_positive = marked & ~left_out[:, : call.num_keys()]
        limit = None
        if bounds != (None, None):
            limit = false_negative_limit(largest_positive(of_keys, is_positive), *bounds)[:, None]
        parts: list[tuple[Tensor, ...]] = []
        for scores, absent in [(of_keys, marked), *((x, marked | own) for x in more)]:
            excluded = direction.excluded(scores, limit, every)
            parts.append((scores, absent if excluded is None else absent | excluded))
        if call.negative is not None:
            scores = _products(rows[direction.query], keys["negative"])
            absent = torch.zeros_like(scores, dtype=torch.bool)
            parts.append((scores, absent if left_out is None else left_out[:, call.num_keys() :]))
        if len(parts) > 1:
            parts = [tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))]
        found.append((parts[0][0], is_positive, parts[0][1]))
    return found


Vectors = tuple[Tensor, Tensor | None]  # and which of them stand for vectors that are not finite


def _vectors(call: Call) -> tuple[dict[str, Vectors], dict[str, Vectors]]:
    """Return what is multiplied: this rank's rows, and as keys the sides and the negatives."""
    # What masks and ids leave out may be NaN, which must not reach a gradient: 0 replaces it.
    options = call.positive_ids, call.positive_mask, call.candidate_mask
    hides_nan = call.decoupled or any(option is not None for option in options)

    def vectors(x: Tensor) -> Vectors:
        x, is_nan = finite_rows(x) if hides_nan else (x, None)
        return normalize(x) if call.similarity == "cosine" else x, is_nan

    dense = {name: as_dense(getattr(call, name)) for name in ("anchor", "positive")}
    rows = {name: vectors(x) for name, x in dense.items()}
    keys = rows
    if not call.in_batch:  # each row's own key
        keys = {name: (x[:, None], n if n is None else n[:, None]) for name, (x, n) in rows.items()}
    elif call.ranks() > 1:
        is_needed = {"anchor": call.symmetric or "query" in call.negatives_from, "positive": True}
        keys = {name: vectors(gather_rows(x)) for name, x in dense.items() if is_needed[name]}
    if call.negative is not None:
        negative = as_dense(call.negative)
        negative = gather_rows(negative, call.gather and negative.ndim == 2)
        keys = {**keys, "negative": vectors(negative)}
    return rows, keys


def _products(query: Vectors, key: Vectors) -> Tensor:
    """Return the similarities of all queries with all keys, or with their own, ``[B, N, D]``."""
    (rows, row_is_nan), (keys, key_is_nan) = query, key
    scores = rows @ keys.T if keys.ndim == 2 else torch.einsum("bd,bnd->bn", rows, keys)
    if key_is_nan is None or row_is_nan is None:
        return scores
    return scores.masked_fill(row_is_nan[:, None] | key_is_nan, torch.nan)


def _check(call: Call) -> None:
    """Raise for options that do not go together, and masks that do not fit the candidates."""
    if not call.in_batch:
        if call.positive_mask is not None or set(call.negatives_from) != {"document"}:
            raise ValueError(
                "expected in_batch=True with `positive_mask`, and with `negatives_from` other than "
                '("document",), got in_batch=False'
            )
        if call.num_negatives() == 0:
            raise ValueError("expected `negative` with in_batch=False, got no other candidates")
    is_shared = call.negative is not None and call.negative.ndim == 2
    num_negatives = call.num_negatives() * (call.ranks() if is_shared else 1)
    for name, more in (("positive_mask", 0), ("candidate_mask", num_negatives)):
        mask, num_keys = getattr(call, name), call.num_keys()
        if mask is not None and mask.shape[1] != num_keys + more:
            raise ValueError(
                f"expected `{name}` of shape {[len(call.anchor), num_keys + more]}, columns for "
                f"{num_keys} positives and {more} negatives, got {list(mask.shape)}"
            )


class InfoNCELoss(LossModule):
    """Module of ``info_nce_loss``; see the function for formula and arguments.

    Examples:
        >>> import torch
        >>> from sparse_losses import InfoNCELoss
        >>> loss = InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.05)))
        >>> anchor, positive = torch.randn(8, 32), torch.randn(8, 32)
        >>> loss(anchor, positive).backward()
        >>> loss.temperature.grad.shape
        torch.Size([])
    """

    temperature: float | Tensor
    negatives_from: NegativesFrom

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        similarity: Similarity = "cosine",
        symmetric: bool = False,
        in_batch: bool = True,
        negatives_from: NegativesFrom = ("document",),
        false_negative_margin: float | None = None,
        false_negative_ratio: float | None = None,
        decoupled: bool = False,
        gather: bool = False,
        impl: Impl = "auto",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(info_nce_loss, locals())

    def forward(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor | None = None,
        *,
        positive_ids: Tensor | None = None,
        positive_mask: Tensor | None = None,
        candidate_mask: Tensor | None = None,
        gather: bool | None = None,
        impl: Impl | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        masks = {"positive_mask": positive_mask, "candidate_mask": candidate_mask}
        options = self.hyperparameters(gather=gather, impl=impl, positive_ids=positive_ids, **masks)
        return info_nce_loss(anchor, positive, negative, **options)


@loss(
    scores="B C",
    positive_mask="B C, mask",
    candidate_mask="B C, mask, optional",
    temperature="> 0, learnable",
)
def info_nce_from_scores(
    scores: Tensor,
    positive_mask: Tensor,
    *,
    candidate_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    decoupled: bool = False,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""InfoNCE of precomputed scores, from any model.

    $$\ell_i = \frac{1}{|P_i|} \sum_{p \in P_i}
    -\log \frac{\exp(s_{ip} / t)}{\sum_{c \in C_i} \exp(s_{ic} / t)}$$

    $s_{ic}$ is the score of candidate $c$ for row $i$, from late interaction, a cross-encoder, or
    products of vectors computed elsewhere, $t$ the temperature. $C_i$ are the row's candidates,
    $P_i \subseteq C_i$ its positives.

    Args:
        scores: ``[B, C]`` floating.
        positive_mask: ``[B, C]`` bool, int or float 0/1.
        candidate_mask: ``[B, C]`` bool, int or float 0/1; by default every column is a candidate.
        temperature: ``t``, finite and > 0; a 0-d tensor or ``nn.Parameter`` is learned.
        decoupled: whether to leave the positives out of the denominator.
        gather: whether ``"mean"`` and ``"sum"`` are over the rows of all ranks, which must have the
            same number of rows (see ``sparse_losses.distributed``); no scores are exchanged.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 scores), 0-d or ``[B]``. A row without a positive, and with
        ``decoupled`` a row without a negative, is not valid: its loss is 0, without a gradient.

    Raises:
        ValueError: for wrong shapes, devices or reduction, or masks that are not 0/1.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import info_nce_from_scores
        >>> scores = torch.tensor([[2.0, 0.0, 0.0]])
        >>> info_nce_from_scores(scores, torch.tensor([[1, 0, 0]]))  # log(1 + 2 exp(-2))
        tensor(0.2395)

    References:
        Representation Learning with Contrastive Predictive Coding, eq. 4. Supervised Contrastive
        Learning, eq. 2.
    """
    is_positive, absent = positive_mask, positive_mask  # no negatives
    if candidate_mask is not None:
        is_positive, absent = is_positive & candidate_mask, absent | ~candidate_mask
    valid = is_positive.any(-1)
    if isinstance(temperature, Tensor):  # its gradient multiplies by the scores: 0 * NaN is NaN
        is_there = is_positive | ~absent
        scores = torch.where(is_there & valid[:, None], scores, 0.0)
    scores = scores / temperature
    if decoupled:
        valid = valid & ~absent.all(-1)
        scores = torch.where(valid[:, None], scores, 0.0)  # or 0 * NaN would reach the gradient
    else:
        absent = absent | ~valid[:, None]  # the row is 0: it has no candidate
    values = contrastive_rows(scores, is_positive, absent, decoupled=decoupled)
    return reduce(values, reduction, valid, gather, zeroed=not decoupled)


class InfoNCEFromScoresLoss(LossModule):
    """Module of ``info_nce_from_scores``; see the function for formula and arguments.

    Examples:
        >>> import torch
        >>> from sparse_losses import InfoNCEFromScoresLoss
        >>> InfoNCEFromScoresLoss()(torch.zeros(2, 4), torch.eye(2, 4))  # log(4)
        tensor(1.3863)
    """

    temperature: float | Tensor

    def __init__(
        self,
        *,
        temperature: float | Tensor = 1.0,
        decoupled: bool = False,
        gather: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(info_nce_from_scores, locals())

    def forward(
        self,
        scores: Tensor,
        positive_mask: Tensor,
        *,
        candidate_mask: Tensor | None = None,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather)
        return info_nce_from_scores(scores, positive_mask, candidate_mask=candidate_mask, **options)


@loss(scores="B C, detached", positive_mask="B C, mask, optional", margin="finite", ratio=">= 0")
def false_negative_mask(
    scores: Tensor,
    positive_mask: Tensor | None = None,
    *,
    margin: float | None = None,
    ratio: float | None = None,
) -> Tensor:
    r"""Mask that leaves out candidates that score too high to be negatives.

    Candidate $c$ of row $i$ is left out if $s_{ic} > s_i + m$ or, where $s_i > 0$, if
    $s_{ic} > \rho s_i$, with the largest score $s_i$ of the row's positives, the margin $m$ and the
    ratio $\rho$. A candidate at the bound, a positive and a NaN stay. The scores may be those of a
    guide, a second model; ``info_nce_loss`` itself applies margin and ratio to its own.

    Args:
        scores: ``[B, C]`` floating, of any model; detached.
        positive_mask: ``[B, C]`` bool, int or float 0/1; by default the diagonal of square scores.
            A row without a positive keeps all candidates.
        margin: ``m``, finite, in units of the scores.
        ratio: ``rho``, >= 0.

    Returns:
        ``[B, C]`` bool, False for candidates that are left out: a ``candidate_mask`` for a loss.

    Raises:
        ValueError: for wrong shapes or bounds, without any bound, or without ``positive_mask`` if
            the scores are not square.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import false_negative_mask
        >>> guide = torch.tensor([[0.8, 0.95, 0.1], [0.2, 0.9, 0.7], [0.0, 0.6, 0.5]])
        >>> false_negative_mask(guide, margin=0.1)
        tensor([[ True, False,  True],
                [ True,  True,  True],
                [ True,  True,  True]])

    References:
        GISTEmbed: Guided In-sample Selection of Training Negatives. NV-Retriever: Improving text
        embedding models with effective hard-negative mining (``ratio``). Qwen3 Embedding
        (``margin``).
    """
    if margin is None and ratio is None:
        raise ValueError("expected `margin` or `ratio`, got neither")
    rows, columns = scores.shape
    if positive_mask is None:
        if rows != columns:
            raise ValueError(
                "expected `positive_mask` unless `scores` are square, "
                f"got `scores` of shape {list(scores.shape)}"
            )
        positive_mask = torch.eye(rows, dtype=torch.bool, device=scores.device)
    limit = false_negative_limit(largest_positive(scores, positive_mask), margin, ratio)
    return ~(scores > limit[:, None]) | positive_mask
