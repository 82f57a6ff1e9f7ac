"""InfoNCE: classify the positive among the candidates (Contrastive Predictive Coding, 2018)."""

from typing import Literal

import torch
from torch import Tensor

from sparse_losses._core.implementations import Arguments, Implementation, always, compute
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.products import as_single
from sparse_losses._core.reduction import Reduction, reduce
from sparse_losses._core.similarity import normalize
from sparse_losses._core.softmax import contrastive_rows, diagonal, one_positive_rows
from sparse_losses.distributed import gather_rows, num_ranks, rank
from sparse_losses.fast.info_nce import blockwise_info_nce, direct_info_nce, most_scores
from sparse_losses.fast.info_nce_nonzeros import (
    FEWEST_COLUMNS,
    has_few_nonzeros,
    nonzeros_info_nce,
)

__all__ = ["InfoNCEFromScoresLoss", "InfoNCELoss", "info_nce_from_scores", "info_nce_loss"]

Similarity = Literal["cosine", "dot"]
Impl = Literal["auto", "definition", "direct", "blocks", "nonzeros"]


@loss(
    anchor="B D, csr, halves",
    positive="B D, csr, halves",
    negative="N D or B N D, optional, csr, halves",
    positive_ids="B, integer, optional",
    positive_mask="B C, mask, optional",
    temperature="> 0, learnable",
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
    positive_ids: Tensor | None = None,
    positive_mask: Tensor | None = None,
    decoupled: bool = False,
    gather: bool = False,
    impl: Impl = "auto",
    reduction: Reduction = "mean",
) -> Tensor:
    r"""InfoNCE: cross-entropy of the positive among the candidates of a row.

    $$\ell_i = -\log \frac{\exp(s_{ii} / t)}{\sum_{c \in C_i} \exp(s_{ic} / t)}$$

    $s_{ic}$ is the similarity of anchor $i$ and candidate $c$, $t$ the temperature. The candidates
    $C_i$ are the row's own positive, the other rows' positives (``in_batch``) and the negatives.
    $\ell_i \ge 0$; it is computed without cancellation near 0, as
    $\mathrm{softplus}(\log\sum_{c \ne i} e^{s_{ic}/t} - s_{ii}/t)$.

    With ``positive_mask`` a row has several positives $P_i$, and $\ell_i$ is the mean over them of
    $-\log(e^{s_{ip}/t} / \sum_{c \in C_i} e^{s_{ic}/t})$: every denominator contains all
    candidates, including the other positives. With ``decoupled`` the denominator contains only the
    negatives; on raw dot products that loss is unbounded below.

    Args:
        anchor: ``[B, D]`` floating; the queries. Anchors, positives and shared negatives may be
            CSR tensors; the gradient of a CSR tensor has its sparsity pattern.
        positive: ``[B, D]``; row ``i`` is the positive of anchor ``i``.
        negative: ``[N, D]``, shared by all rows, or ``[B, N, D]``, ``N`` for each row.
        temperature: ``t``, finite and > 0; a 0-d tensor or ``nn.Parameter`` is learned.
        similarity: ``"cosine"`` (of the rows, normalised here) or ``"dot"``.
        symmetric: whether to average both directions. The negatives take part in both,
            ``positive_mask`` is transposed for the second, and a row must be valid in both.
        in_batch: whether the other rows' positives are candidates.
        positive_ids: ``[B]`` integers that identify the positives. Another row's positive with the
            id of the row's own is a duplicate and is left out of the row's denominator.
        positive_mask: ``[B, B]`` bool, int or float 0/1; entry ``[i, j]`` marks positive ``j`` as a
            positive of anchor ``i``. The diagonal is not implied. Needs ``in_batch``.
        decoupled: whether to leave the positives out of the denominator.
        gather: whether all ranks' positives and shared negatives are candidates, and ``"mean"`` and
            ``"sum"`` are over all ranks' rows, so that every rank has value and gradient of the
            whole batch (see ``sparse_losses.distributed``). ``"none"`` returns this rank's rows.
            Sizes must be the same on all ``W`` ranks; ``positive_mask`` is then ``[B, W B]``.
        impl: how the value is computed; value and gradient are the same. ``"auto"`` selects the
            first of these that supports the call and is expected to be faster: ``"nonzeros"``
            multiplies only the non-zeros (selected for CSR tensors, and on the CPU if a sample of
            wide inputs has few: below 12% for 512 rows or more, half of that on several threads);
            ``"blocks"`` holds some rows of the scores at a time (selected for more than 2^21 scores
            on a CPU, 2^26 elsewhere); ``"direct"`` holds all scores at once. ``"definition"``, the
            formula operation by operation, is used otherwise, under ``torch.compile`` and under
            ``torch.func``.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 inputs), 0-d or ``[B]``. A row without a positive, and with
        ``decoupled`` a row without a negative, is not valid: its loss is 0, without a gradient.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, or if there are no negatives.
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
        Learning, eq. 2 (``positive_mask``). Decoupled Contrastive Learning (``decoupled``).
    """
    _check(len(anchor), negative, positive_mask, in_batch, gather)
    arguments = {
        "anchor": anchor,
        "positive": positive,
        "negative": negative,
        "temperature": temperature,
        "similarity": similarity,
        "symmetric": symmetric,
        "in_batch": in_batch,
        "positive_ids": positive_ids,
        "positive_mask": positive_mask,
        "decoupled": decoupled,
        "gather": gather,
        "reduction": reduction,
    }
    return compute(_definition, IMPLEMENTATIONS, impl, arguments)


def _definition(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: float | Tensor,
    *,
    similarity: str,
    symmetric: bool,
    in_batch: bool,
    positive_ids: Tensor | None,
    positive_mask: Tensor | None,
    decoupled: bool,
    gather: bool,
    reduction: Reduction,
) -> Tensor:
    """The formula, operation by operation.

    With ``gather`` the queries are this rank's rows, the keys are the rows of all ranks.
    """
    anchor, positive = _dense(anchor), _dense(positive)
    if negative is not None:
        negative = gather_rows(_dense(negative), gather and negative.ndim == 2)
    if positive_ids is not None:
        positive_ids = gather_rows(positive_ids, gather)
    if positive_mask is not None:
        positive_mask = gather_rows(positive_mask, gather)
    directions = [(anchor, positive, positive_mask)]
    if symmetric:
        directions.append((positive, anchor, None if positive_mask is None else positive_mask.T))

    first = rank() * len(anchor) if gather else 0
    own = torch.arange(first, first + len(anchor), device=anchor.device)  # the key of each query
    num_keys, num_negatives = len(anchor) * (num_ranks() if gather else 1), _number_of(negative)
    masks = [
        _masks(own, num_keys, num_negatives, positive_ids, mask, in_batch)
        for _, _, mask in directions
    ]
    all_valid = positive_mask is None and not (decoupled and num_negatives == 0)
    valid = None if all_valid else _valid_rows(masks, decoupled)
    # Both directions share one product where each is the other's transpose.
    shares = valid is None and negative is None and positive_ids is None and in_batch and not gather
    values: list[Tensor] = []
    scores = anchor
    for number, (query, key, _) in enumerate(directions):
        if number == 1 and shares:
            scores = scores.T
        else:
            key = gather_rows(key, gather and in_batch)
            has_ids = positive_ids is not None
            scores = _scores(query, key, negative, valid, similarity, in_batch, has_ids)
            scores = scores / temperature
        is_positive, absent = masks[number]  # the formula of a row: _core/softmax.py
        if positive_mask is None:
            row_values = diagonal(scores, first) if in_batch else scores[:, 0]
            values.append(one_positive_rows(scores, row_values, absent, decoupled=decoupled))
        else:
            values.append(contrastive_rows(scores, is_positive, absent, decoupled=decoupled))
    mean = (values[0] + values[1]) / 2 if symmetric else values[0]
    return reduce(mean, reduction, valid, gather)


def _masks(
    own: Tensor,
    num_keys: int,
    num_negatives: int,
    positive_ids: Tensor | None,
    positive_mask: Tensor | None,
    in_batch: bool,
) -> tuple[Tensor, Tensor]:
    """Return two masks ``[B, C]``: each row's positives, and what is none of its negatives."""
    if in_batch:
        index = torch.arange(num_keys, device=own.device)
        is_positive = own[:, None] == index if positive_mask is None else positive_mask[own]
    else:
        is_positive = torch.ones_like(own[:, None], dtype=torch.bool)
    absent = is_positive
    if positive_ids is not None and in_batch:
        absent = absent | (positive_ids[own, None] == positive_ids)
    if num_negatives:
        others = is_positive.new_zeros(len(own), num_negatives)
        is_positive, absent = (torch.cat([x, others], dim=1) for x in (is_positive, absent))
    return is_positive, absent


def _valid_rows(masks: list[tuple[Tensor, Tensor]], decoupled: bool) -> Tensor:
    """Mask of rows with a positive, and if ``decoupled`` a negative, in every direction."""
    has_terms = [p.any(-1) & ~a.all(-1) if decoupled else p.any(-1) for p, a in masks]
    return torch.stack(has_terms).all(0)


def _scores(
    query: Tensor,
    key: Tensor,
    negative: Tensor | None,
    valid: Tensor | None,
    similarity: str,
    in_batch: bool,
    has_ids: bool,
) -> Tensor:
    """Similarities ``[B, C]`` of a query with the keys (or its own key), then the negatives."""
    # Zero what no valid row uses, or its NaN would reach the gradient: 0 * NaN is NaN.
    if valid is not None:
        query = torch.where(valid[:, None], query, 0.0)
        key = torch.where(valid.any(), key, 0.0)
        if negative is not None:
            is_used = valid.any() if negative.ndim == 2 else valid[:, None, None]
            negative = torch.where(is_used, negative, 0.0)
    is_nan = None
    if has_ids:  # ids exclude keys from some queries
        is_nan = key.isnan().any(-1)
        key = torch.where(is_nan[:, None], 0.0, key)
    if similarity == "cosine":
        query, key = normalize(query), normalize(key)
        negative = None if negative is None else normalize(negative)
    if in_batch:
        scores = query @ key.T
        scores = scores if is_nan is None else torch.where(is_nan, torch.nan, scores)
    else:
        scores = (query * key).sum(-1, keepdim=True)
        scores = scores if is_nan is None else torch.where(is_nan[:, None], torch.nan, scores)
    if negative is None:
        return scores
    shared = negative.ndim == 2
    of_negatives = query @ negative.T if shared else torch.einsum("bd,bnd->bn", query, negative)
    return torch.cat([scores, of_negatives], dim=1)


def _number_of(negative: Tensor | None) -> int:
    return 0 if negative is None else negative.shape[-2]


def _dense(x: Tensor) -> Tensor:
    return as_single(x if x.layout == torch.strided else x.to_dense())


def _check(
    batch: int,
    negative: Tensor | None,
    positive_mask: Tensor | None,
    in_batch: bool,
    gather: bool,
) -> None:
    if not in_batch and positive_mask is not None:
        raise ValueError("expected `positive_mask` only with `in_batch=True`, got in_batch=False")
    if not in_batch and _number_of(negative) == 0:
        raise ValueError("expected `negative` with in_batch=False, got no other candidates")
    ranks = num_ranks() if gather else 1
    if positive_mask is not None and positive_mask.shape[1] != ranks * batch:
        columns = "B" if ranks == 1 else f"{ranks} B"
        where = f" with gather=True on {ranks} ranks" if gather else ""
        raise ValueError(
            f"expected `positive_mask` of shape [B, {columns}] = [{batch}, {ranks * batch}]"
            f"{where}, got {list(positive_mask.shape)}"
        )


def _unsupported_reason(arguments: Arguments) -> str | None:
    """Return why implementations with their own gradient do not support the call, or ``None``."""
    anchor, temperature = arguments["anchor"], arguments["temperature"]
    if not arguments["in_batch"]:
        return "in_batch=True"
    if arguments["positive_mask"] is not None:
        return "no `positive_mask`"
    if arguments["reduction"] == "none":
        return 'reduction="mean" or "sum"'
    if min(anchor.shape) == 0:
        return f"B and D of at least 1, got {list(anchor.shape)},"
    if arguments["decoupled"] and _number_of(arguments["negative"]) == 0:
        batch = len(anchor) * (num_ranks() if arguments["gather"] else 1)
        if arguments["positive_ids"] is not None or batch < 2:
            return "a negative in every row"
    limits = torch.finfo(torch.float64 if anchor.dtype == torch.float64 else torch.float32)
    if isinstance(temperature, Tensor):
        if temperature.device != anchor.device:
            return f"`temperature` on {anchor.device}, where `anchor` is, got {temperature.device}"
    elif not limits.tiny <= temperature <= limits.max:
        return f"`temperature` from {limits.tiny:.2g} to {limits.max:.2g}, got {temperature},"
    return None


def _dense_unsupported_reason(arguments: Arguments) -> str | None:
    if any(x.layout != torch.strided for x in _inputs(arguments)):
        return "dense tensors"
    return _unsupported_reason(arguments)


def _nonzeros_unsupported_reason(arguments: Arguments) -> str | None:
    negative = arguments["negative"]
    if negative is not None and negative.ndim == 3:
        return "no negatives per row"
    if arguments["anchor"].device.type == "meta":
        return "tensors with values"
    return _unsupported_reason(arguments)


def _prefers_nonzeros(arguments: Arguments) -> bool:
    inputs = _inputs(arguments)
    if any(x.layout != torch.strided for x in inputs):
        return True
    is_wide = inputs[0].is_cpu and inputs[0].shape[1] >= FEWEST_COLUMNS
    return is_wide and has_few_nonzeros(*inputs)


def _exceeds_a_block(arguments: Arguments) -> bool:
    """Whether the full score matrix is larger than a block."""
    anchor = arguments["anchor"]
    keys = len(anchor) * (num_ranks() if arguments["gather"] else 1)
    num_scores: int = len(anchor) * (keys + _number_of(arguments["negative"]))
    return num_scores > most_scores(anchor.device)


def _inputs(arguments: Arguments) -> list[Tensor]:
    inputs = (arguments["anchor"], arguments["positive"], arguments["negative"])
    return [x for x in inputs if x is not None]


# In order of preference.
IMPLEMENTATIONS = (
    Implementation("nonzeros", _nonzeros_unsupported_reason, _prefers_nonzeros, nonzeros_info_nce),
    Implementation("blocks", _dense_unsupported_reason, _exceeds_a_block, blockwise_info_nce),
    Implementation("direct", _dense_unsupported_reason, always, direct_info_nce),
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
    # `SpladeObjective` may compute this loss from scores shared between terms. A subclass may
    # compute something else, so it does not inherit this and has to set it itself.
    takes_scores = True

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        similarity: Similarity = "cosine",
        symmetric: bool = False,
        in_batch: bool = True,
        decoupled: bool = False,
        gather: bool = False,
        impl: Impl = "auto",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            info_nce_loss,
            temperature=temperature,
            similarity=similarity,
            symmetric=symmetric,
            in_batch=in_batch,
            decoupled=decoupled,
            gather=gather,
            impl=impl,
            reduction=reduction,
        )

    def forward(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor | None = None,
        *,
        positive_ids: Tensor | None = None,
        positive_mask: Tensor | None = None,
        gather: bool | None = None,
        impl: Impl | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        return info_nce_loss(
            anchor,
            positive,
            negative,
            positive_ids=positive_ids,
            positive_mask=positive_mask,
            **self.hyperparameters(gather=gather, impl=impl),
        )


@loss(scores="B C", positive_mask="B C, mask", candidate_mask="B C, mask, optional")
def info_nce_from_scores(
    scores: Tensor,
    positive_mask: Tensor,
    candidate_mask: Tensor | None = None,
    *,
    decoupled: bool = False,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""InfoNCE of precomputed scores, from any model.

    $$\ell_i = \frac{1}{|P_i|} \sum_{p \in P_i}
    -\log \frac{\exp(s_{ip})}{\sum_{c \in C_i} \exp(s_{ic})}$$

    $s_{ic}$ is the score of candidate $c$ for row $i$, divided by the temperature: from late
    interaction, a cross-encoder, or products of vectors computed elsewhere. $C_i$ are the row's
    candidates, $P_i \subseteq C_i$ its positives. ``info_nce_loss`` applies the same formula to
    its similarities.

    Args:
        scores: ``[B, C]`` floating.
        positive_mask: ``[B, C]`` bool, int or float 0/1.
        candidate_mask: ``[B, C]`` bool, int or float 0/1; by default every column is a candidate.
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

    def __init__(
        self, *, decoupled: bool = False, gather: bool = False, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(
            info_nce_from_scores, decoupled=decoupled, gather=gather, reduction=reduction
        )

    def forward(
        self,
        scores: Tensor,
        positive_mask: Tensor,
        candidate_mask: Tensor | None = None,
        *,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather)
        return info_nce_from_scores(scores, positive_mask, candidate_mask, **options)
