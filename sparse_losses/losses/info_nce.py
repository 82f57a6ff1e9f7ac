"""InfoNCE: classify the positive among the candidates (Contrastive Predictive Coding, 2018)."""

from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.implementations import Arguments, Implementation, always, compute
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.products import as_single
from sparse_losses._core.reduction import Reduction, reduce
from sparse_losses._core.similarity import finite_rows, normalize
from sparse_losses._core.softmax import (
    contrastive_rows,
    diagonal,
    false_negative_limit,
    one_positive_rows,
)
from sparse_losses.distributed import gather_rows, num_ranks, rank
from sparse_losses.fast.info_nce import (
    blockwise_info_nce,
    dense_unsupported_reason,
    direct_info_nce,
    exceeds_a_block,
    nonzeros_unsupported_reason,
    number_of,
    prefers_nonzeros,
    reverse,
)
from sparse_losses.fast.info_nce_nonzeros import nonzeros_info_nce

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
        negatives_from: ``"document"`` stands for the other rows' positives, ``"query"`` adds the
            other anchors, ``"positive"`` adds the other positives, by their similarity to the row's
            own positive. If the positive of row ``j`` is left out of row ``i``, or is a positive of
            row ``i``, then row ``i`` also leaves out what these two add of row ``j``.
        positive_ids: ``[B]`` integers that identify the positives. Another row's positive with the
            id of the row's own is a duplicate and is left out of the row's denominator.
        positive_mask: ``[B, B]`` bool, int or float 0/1; entry ``[i, j]`` marks positive ``j`` as a
            positive of anchor ``i``. The diagonal is not implied. Needs ``in_batch``.
        candidate_mask: ``[B, C]`` bool, int or float 0/1; 0 leaves a candidate and its NaN out of
            the row. The columns are the ``B`` positives (without ``in_batch`` only the row's own),
            then the ``N`` negatives. ``symmetric`` transposes the part of the positives.
        false_negative_margin: leaves out another row's positive whose similarity, before the
            temperature and without a gradient, is above that of the row's (largest) positive plus
            this number. ``negative`` is never left out.
        false_negative_ratio: likewise leaves it out above this number >= 0 times the similarity of
            the row's positive, where that similarity is > 0. With both, either is enough.
        decoupled: whether to leave the positives out of the denominator.
        gather: whether all ranks' positives and shared negatives are candidates, and ``"mean"`` and
            ``"sum"`` are over all ranks' rows, so that every rank has value and gradient of the
            whole batch (see ``sparse_losses.distributed``). ``"none"`` returns this rank's rows.
            Sizes must be the same on all ``W`` ranks. ``positive_mask`` is then ``[B, W B]``;
            ``candidate_mask`` has ``W B`` positives and, of shared negatives, ``W N``.
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
    arguments = {
        "anchor": anchor,
        "positive": positive,
        "negative": negative,
        "temperature": temperature,
        "similarity": similarity,
        "symmetric": symmetric,
        "in_batch": in_batch,
        "negatives_from": negatives_from,
        "positive_ids": positive_ids,
        "positive_mask": positive_mask,
        "candidate_mask": candidate_mask,
        "false_negative_margin": false_negative_margin,
        "false_negative_ratio": false_negative_ratio,
        "decoupled": decoupled,
        "gather": gather,
        "reduction": reduction,
    }
    _check(arguments)
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
    negatives_from: tuple[str, ...],
    positive_ids: Tensor | None,
    positive_mask: Tensor | None,
    candidate_mask: Tensor | None,
    false_negative_margin: float | None,
    false_negative_ratio: float | None,
    decoupled: bool,
    gather: bool,
    reduction: Reduction,
) -> Tensor:
    """The formula, operation by operation.

    With ``gather`` the queries are this rank's rows, the keys are the rows of all ranks.
    """
    first = rank() * len(anchor) if gather and in_batch else 0  # the key of the first query
    num_keys = len(anchor) * (num_ranks() if gather else 1) if in_batch else 1
    same_id = None
    if positive_ids is not None and in_batch:
        same_id = positive_ids[:, None] == gather_rows(positive_ids, gather)
    pairs, rest = None, None  # which keys and which negatives are candidates
    if candidate_mask is not None:
        pairs, rest = candidate_mask.tensor_split([num_keys], dim=1)
    is_own = positive_mask
    if is_own is None or len(negatives_from) > 1:
        is_own = _own_keys(anchor, first, num_keys, in_batch)
    is_positive = is_own if positive_mask is None else positive_mask
    masks = [_masks(is_positive, same_id, pairs)]
    if symmetric:
        if positive_mask is not None:
            is_positive = reverse(positive_mask, gather)
        if pairs is not None and in_batch:
            pairs = reverse(pairs, gather)
        masks.append(_masks(is_positive, same_id, pairs))
    has_rest, valid = number_of(negative) > 0, None
    is_full = has_rest or (same_id is None and num_keys > 1)
    if positive_mask is not None or candidate_mask is not None or (decoupled and not is_full):
        valid = _valid_rows(masks, has_rest if rest is None else rest.any(-1), decoupled)

    sides = ["positive", *(["anchor"] if symmetric or "query" in negatives_from else [])]
    inputs = {"anchor": anchor, "positive": positive, "negative": negative}
    hides_nan = []
    if same_id is not None or valid is not None:
        hides_nan = [*sides, *(["negative"] if candidate_mask is not None else [])]
    rows, keys = _vectors(inputs, sides, similarity, hides_nan, valid, in_batch, gather)
    sources = {"query": "anchor", "positive": "positive"}
    blocks = [_products(rows[x], keys[x]) for name, x in sources.items() if name in negatives_from]

    has_bound = false_negative_margin is not None or false_negative_ratio is not None
    values: list[Tensor] = []
    of_keys = anchor
    for number, (is_positive, absent) in enumerate(masks):
        query, key = ("positive", "anchor") if number else ("anchor", "positive")
        is_shared = number == 1 and in_batch and not (gather and num_ranks() > 1)
        of_keys = of_keys.T if is_shared else _products(rows[query], keys[key])
        columns = [(of_keys, absent), *((block, absent | is_own) for block in blocks)]
        if has_bound:
            bounds = false_negative_margin, false_negative_ratio
            columns = _without_false_negatives(columns, is_positive, *bounds)
        if negative is not None:
            others = _products(rows[query], keys["negative"])
            left_out = torch.zeros_like(others, dtype=torch.bool) if rest is None else ~rest
            columns.append((others, left_out))
        scores, absent = columns[0] if len(columns) == 1 else _joined(columns)
        if valid is not None:
            scores = scores.masked_fill(~valid[:, None], 0.0)
        if decoupled and has_bound:  # which may have left a row without a negative
            has_negative = ~absent.all(-1)
            valid = has_negative if valid is None else valid & has_negative
        scores = scores / temperature
        own = diagonal(scores, first) if in_batch else scores[:, 0]
        positives = None if positive_mask is None else is_positive
        values.append(_row_values(scores, own, positives, absent, decoupled))
    mean = (values[0] + values[1]) / 2 if symmetric else values[0]
    return reduce(mean, reduction, valid, gather)


def _row_values(
    scores: Tensor, own: Tensor, is_positive: Tensor | None, absent: Tensor, decoupled: bool
) -> Tensor:
    """Return the loss of each row: of its own positive, or of several among the first columns."""
    if is_positive is None:
        return one_positive_rows(scores, own, absent, decoupled=decoupled)
    if more := scores.shape[1] - is_positive.shape[1]:
        is_positive = nnf.pad(is_positive, (0, more))
    return contrastive_rows(scores, is_positive, absent, decoupled=decoupled)


def _own_keys(anchor: Tensor, first: int, num_keys: int, in_batch: bool) -> Tensor:
    """Mask ``[B, K]`` of each row's own positive."""
    own = torch.arange(first, first + len(anchor), device=anchor.device)[:, None]
    return own == (torch.arange(num_keys, device=anchor.device) if in_batch else own)


def _masks(
    is_positive: Tensor, same_id: Tensor | None, candidate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return two masks ``[B, K]``: each row's positives, and what is none of its negatives."""
    absent = is_positive if same_id is None else is_positive | same_id
    if candidate is None:
        return is_positive, absent
    return is_positive & candidate, absent | ~candidate


def _valid_rows(
    masks: list[tuple[Tensor, Tensor]], has_negative: Tensor | bool, decoupled: bool
) -> Tensor:
    """Mask of rows with a positive, and if ``decoupled`` a negative, in every direction."""
    has_terms = [is_positive.any(-1) for is_positive, _ in masks]
    if decoupled and has_negative is not True:
        has_terms += [~absent.all(-1) | has_negative for _, absent in masks]
    return torch.stack(has_terms).all(0)


Vectors = tuple[Tensor, Tensor | None]  # and which of them stand for vectors that are not finite


def _vectors(
    inputs: dict[str, Tensor | None],
    sides: list[str],
    similarity: str,
    hides_nan: list[str],
    valid: Tensor | None,
    in_batch: bool,
    gather: bool,
) -> tuple[dict[str, Vectors], dict[str, Vectors]]:
    """Return what is multiplied: this rank's rows, and as keys these ``sides`` and the negatives.

    What is left out may be NaN, which must not reach a gradient: it is replaced by 0.
    """

    def vectors(name: str, x: Tensor) -> Vectors:
        is_nan = None
        if name in hides_nan or (valid is not None and name == "negative" and x.ndim == 2):
            x, is_nan = finite_rows(x)
        elif valid is not None:  # only its own row is concerned
            x = x.masked_fill(~valid.reshape(-1, *[1] * (x.ndim - 1)), 0.0)
        return normalize(x) if similarity == "cosine" else x, is_nan

    dense = {name: _dense(x) for name, x in inputs.items() if x is not None}
    negative = dense.pop("negative", None)
    rows = {name: vectors(name, x) for name, x in dense.items()}
    keys = rows
    if not in_batch:  # each row's own key
        keys = {name: (x[:, None], n if n is None else n[:, None]) for name, (x, n) in rows.items()}
    elif gather and num_ranks() > 1:
        keys = {name: vectors(name, gather_rows(dense[name])) for name in sides}
    if negative is not None:
        is_shared = negative.ndim == 2
        all_rows = gather_rows(negative, gather and is_shared)
        keys = {**keys, "negative": vectors("negative", all_rows)}
    return rows, keys


def _products(query: Vectors, key: Vectors) -> Tensor:
    """Return the similarities of all queries with all keys, or with their own, ``[B, N, D]``."""
    (query_rows, query_is_nan), (key_rows, key_is_nan) = query, key
    if key_rows.ndim == 2:
        scores = query_rows @ key_rows.T
    else:
        scores = torch.einsum("bd,bnd->bn", query_rows, key_rows)
    if key_is_nan is not None:
        scores = scores.masked_fill(key_is_nan, torch.nan)
    if query_is_nan is not None:
        scores = scores.masked_fill(query_is_nan[:, None], torch.nan)
    return scores


def _without_false_negatives(
    columns: list[tuple[Tensor, Tensor]],
    is_positive: Tensor,
    margin: float | None,
    ratio: float | None,
) -> list[tuple[Tensor, Tensor]]:
    """Add false negatives to the masks of what is no negative; the keys are the first columns."""
    largest = _largest_positive(columns[0][0], is_positive)
    limit = false_negative_limit(largest, margin, ratio)[:, None]
    return [(scores, absent | (scores.detach() > limit)) for scores, absent in columns]


def _largest_positive(scores: Tensor, is_positive: Tensor) -> Tensor:
    """Return each row's largest score of a positive ``[B]``, infinity without one."""
    if scores.shape[1] == 0:
        return scores.sum(1)
    largest = scores.detach().masked_fill(~is_positive, -torch.inf).amax(1)
    return torch.where(is_positive.any(1), largest, torch.inf)


def _joined(columns: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    scores, absent = zip(*columns, strict=True)
    return torch.cat(scores, dim=1), torch.cat(absent, dim=1)


def _dense(x: Tensor) -> Tensor:
    return as_single(x if x.layout == torch.strided else x.to_dense())


def _check(arguments: Arguments) -> None:
    """Raise for options that do not go together, and masks that do not fit the candidates."""
    batch, negative = len(arguments["anchor"]), arguments["negative"]
    if not arguments["in_batch"]:
        if arguments["positive_mask"] is not None:
            raise ValueError(
                "expected `positive_mask` only with `in_batch=True`, got in_batch=False"
            )
        if set(arguments["negatives_from"]) != {"document"}:
            raise ValueError(
                'expected `negatives_from` to be ("document",) with in_batch=False, '
                f"got {arguments['negatives_from']!r}"
            )
        if number_of(negative) == 0:
            raise ValueError("expected `negative` with in_batch=False, got no other candidates")
    ranks = num_ranks() if arguments["gather"] else 1
    num_keys = ranks * batch if arguments["in_batch"] else 1
    columns = ("B" if ranks == 1 else f"{ranks} B") if arguments["in_batch"] else "1"
    is_shared = negative is not None and negative.ndim == 2
    num_negatives = number_of(negative) * (ranks if is_shared else 1)
    both = f"{columns} + {ranks} N" if is_shared and ranks > 1 else f"{columns} + N"
    for name, shape, width in (
        ("positive_mask", columns, num_keys),
        ("candidate_mask", both if num_negatives else columns, num_keys + num_negatives),
    ):
        mask = arguments[name]
        if mask is not None and mask.shape[1] != width:
            where = f" with gather=True on {ranks} ranks" if ranks > 1 else ""
            raise ValueError(
                f"expected `{name}` of shape [B, {shape}] = [{batch}, {width}]{where}, "
                f"got {list(mask.shape)}"
            )


# In order of preference.
IMPLEMENTATIONS = (
    Implementation("nonzeros", nonzeros_unsupported_reason, prefers_nonzeros, nonzeros_info_nce),
    Implementation("blocks", dense_unsupported_reason, exceeds_a_block, blockwise_info_nce),
    Implementation("direct", dense_unsupported_reason, always, direct_info_nce),
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
        super().__init__(
            info_nce_loss,
            temperature=temperature,
            similarity=similarity,
            symmetric=symmetric,
            in_batch=in_batch,
            negatives_from=negatives_from,
            false_negative_margin=false_negative_margin,
            false_negative_ratio=false_negative_ratio,
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
        candidate_mask: Tensor | None = None,
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
            candidate_mask=candidate_mask,
            **self.hyperparameters(gather=gather, impl=impl),
        )


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
    ratio $\rho$. With both, it is left out if it is above either. A candidate at the bound, a
    positive and a NaN stay.

    The scores may be those of a guide, a second model, as in GIST. ``info_nce_loss`` itself applies
    margin and ratio to its own scores.

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
    limit = false_negative_limit(_largest_positive(scores, positive_mask), margin, ratio)
    return ~(scores > limit[:, None]) | positive_mask


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
    -\log \frac{\exp(s_{ip})}{\sum_{c \in C_i} \exp(s_{ic})}$$

    $s_{ic}$ is the score of candidate $c$ for row $i$, divided by the temperature: from late
    interaction, a cross-encoder, or products of vectors computed elsewhere. $C_i$ are the row's
    candidates, $P_i \subseteq C_i$ its positives. ``info_nce_loss`` applies the same formula to
    its similarities.

    Args:
        scores: ``[B, C]`` floating.
        positive_mask: ``[B, C]`` bool, int or float 0/1.
        candidate_mask: ``[B, C]`` bool, int or float 0/1; by default every column is a candidate.
        temperature: divides the scores; finite and > 0.
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
    if not (isinstance(temperature, float) and temperature == 1.0):
        scores = scores / temperature
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
        *,
        candidate_mask: Tensor | None = None,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather)
        masks = {"positive_mask": positive_mask, "candidate_mask": candidate_mask}
        return info_nce_from_scores(scores, **masks, **options)
