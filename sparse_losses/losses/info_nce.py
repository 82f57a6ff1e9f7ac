"""InfoNCE: find the positive among the candidates (Contrastive Predictive Coding, 2018)."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparse_losses._core.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_shapes,
    check_temperature,
    describe,
)
from sparse_losses._core.contrast import contrast
from sparse_losses._core.fused import can_fuse, fuse
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses._core.reduction import Reduction, check_reduction, reduce
from sparse_losses._core.ring import ring_contrast
from sparse_losses._core.similarity import normalize
from sparse_losses._core.softmax import masked_logsumexp, negative_log_softmax, softplus
from sparse_losses._core.token_ids import as_mask
from sparse_losses.distributed import (
    gather_rows,
    num_ranks,
    rank,
    shared_by_ranks,
    spans_ranks,
    sum_over_ranks,
)
from sparse_losses.kernels import Impl, check_impl, uses_triton

__all__ = ["InfoNCELoss", "info_nce_loss", "mutual_information_lower_bound"]

# Where `sparse="auto"` takes the sparse products, as measured (docs/benchmarks.md): they are faster
# below this density from so many rows on, and below a smaller one for fewer.
DENSEST, ROWS_FOR_DENSEST = 0.12, 512
FEWEST_COLUMNS = 4096
SAMPLED_ROWS = 16


@full_precision
def info_nce_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.07,
    similarity: str = "cosine",
    symmetric: bool = False,
    in_batch: bool = True,
    positive_ids: Tensor | None = None,
    positive_mask: Tensor | None = None,
    decoupled: bool = False,
    chunk_size: int | None = None,
    gather: bool | str = False,
    sparse: bool | str = "auto",
    impl: Impl = "auto",
    reduction: Reduction = "mean",
) -> Tensor:
    r"""InfoNCE: cross-entropy of the positive among the candidates of a row.

    $$\ell_i = -\log \frac{\exp(s_{ii} / t)}{\sum_{c \in C_i} \exp(s_{ic} / t)}$$

    $s_{ic}$ is the similarity of anchor $i$ and candidate $c$, $t$ the temperature. The candidates
    $C_i$ are the row's own positive, the other rows' positives (``in_batch``) and the negatives.
    $\ell_i \ge 0$, and $\ell_i \to 0$ keeps its digits: it is computed as
    $\mathrm{softplus}(\log\sum_{c \ne i} e^{s_{ic}/t} - s_{ii}/t)$.

    With ``positive_mask`` a row has several positives $P_i$ and $\ell_i$ is the mean over them of
    $-\log(e^{s_{ip}/t} / \sum_{c \in C_i} e^{s_{ic}/t})$: every denominator holds all candidates,
    the other positives included. With ``decoupled`` the denominator holds the negatives only; on
    raw dot products that loss is unbounded below.

    Args:
        anchor: ``[B, D]`` floating; queries. ``D`` is the vocabulary for sparse vectors, and then
            this, ``positive`` and shared negatives may be CSR: the gradient is by what they store.
        positive: ``[B, D]``; row ``i`` is the positive of anchor ``i``.
        negative: ``[N, D]`` shared by all rows, or ``[B, N, D]``, each row its own.
        temperature: ``t``, finite and > 0; a 0-d tensor or ``nn.Parameter`` is learned.
        similarity: ``"cosine"`` (of the rows, normalised here) or ``"dot"``.
        symmetric: the mean of both directions; the negatives join both, ``positive_mask`` is
            transposed for the second, and a row is valid if it is in both.
        in_batch: whether the other rows' positives are candidates.
        positive_ids: ``[B]`` integers; another row's positive with the same id as the row's own is
            left out of its denominator: the same text twice is no negative.
        positive_mask: ``[B, B]`` bool, int or float 0/1; ``[i, j]``: positive ``j`` is a positive
            of anchor ``i``. The diagonal is not implied. Needs ``in_batch``.
        decoupled: leave the positives out of the denominator (decoupled contrastive learning).
        chunk_size: rows of the score matrix held at once; changes memory, not the result. Left to
            itself, a large plain loss holds some four million scores at once.
        gather: whether all ranks' positives and shared negatives are candidates, and ``"mean"`` and
            ``"sum"`` are over all ranks' rows: value and gradient of the whole batch on every rank
            (see ``sparse_losses.distributed``). ``"none"`` gives this rank's rows. Sizes are the
            same on every rank; ``positive_mask`` is then ``[B, W B]``. ``"ring"`` is the same but
            never holds the rows of more than one other rank: it sends them round twice. It needs a
            ``reduction``, ``in_batch`` and no ``positive_mask``. Compiled, and where ``decoupled``
            and ``positive_ids`` alone may leave a row without a negative, it is ``True``.
        sparse: whether products run over the non-zeros, exactly, which is faster where fewer than
            about one in eight is not zero. The scores are then held whole. ``"auto"`` looks at some
            rows, on the CPU, for wide inputs and without ``chunk_size`` only. Needs eager mode, a
            ``reduction``, ``in_batch``, no ``positive_mask`` and no negatives per row (nor any with
            ``symmetric``); else the product is dense.
        impl: ``"torch"``, ``"triton"`` (a kernel for NVIDIA GPUs) or ``"auto"``, the kernel where
            it was measured to be ahead. It multiplies half precision as it is, summing in fp32, and
            takes dense tensors with ``in_batch``, a ``reduction``, no ``positive_mask``, no
            negatives per row, no ``sparse=True`` and no ``gather="ring"``.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 inputs), 0-d or ``[B]``. A row without a positive, and under
        ``decoupled`` a row without a negative, is not valid: 0 and no gradient.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, or no candidate but the positive.
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
        Learning, eq. 2 (``positive_mask``). Decoupled Contrastive Learning, eq. 5 (``decoupled``).
    """
    _check(temperature, similarity, symmetric, in_batch, decoupled, chunk_size, gather, sparse)
    check_impl(impl)
    ranks = num_ranks() if gather else 1
    csr = ("csr",) if ranks == 1 else ()
    size = check_shapes(
        anchor=(anchor, "B D", *csr),
        positive=(positive, "B D", *csr),
        negative=(negative, "N D", "B N D", *csr, "optional"),
        positive_ids=(positive_ids, "B", "optional"),
        positive_mask=(positive_mask, "B B" if ranks == 1 else "B C", "optional"),
    )
    check_reduction(reduction)
    if not in_batch and positive_mask is not None:
        raise ValueError("expected `positive_mask` only with `in_batch=True`, got in_batch=False")
    if not in_batch and size.get("N", 0) == 0:
        raise ValueError("expected `negative` with `in_batch=False`: the positive has no rival")
    if positive_ids is not None and positive_ids.is_floating_point():
        raise TypeError(f"expected `positive_ids` to be integers, got {positive_ids.dtype}")
    if positive_mask is not None and positive_mask.shape[1] != ranks * size["B"]:
        raise ValueError(
            f"expected `positive_mask` of shape [B, {ranks} B] = [{size['B']}, "
            f"{ranks * size['B']}] with gather={gather!r} on {ranks} ranks, "
            f"got {list(positive_mask.shape)}"
        )
    if gather == "ring" and (not in_batch or positive_mask is not None or reduction == "none"):
        raise ValueError(
            'expected gather="ring" with in_batch=True, no `positive_mask` and a reduction, got '
            f"in_batch={in_batch}, reduction={reduction!r}; gather=True takes all of them"
        )

    dtype = compute_dtype(anchor=anchor, positive=positive, negative=negative)
    positive_mask = None if positive_mask is None else as_mask("positive_mask", positive_mask)
    gathers = spans_ranks(
        "info_nce_loss",
        bool(gather),
        anchor,
        B=size["B"],
        D=size["D"],
        N=size.get("N", 0),
        **{
            "number of dimensions of `negative`": 0 if negative is None else negative.ndim,
            "number of `positive_ids`": 0 if positive_ids is None else size["B"],
            "number of `positive_mask`": 0 if positive_mask is None else 1,
            'number of rings (gather="ring")': int(gather == "ring"),
        },
    )
    negatives, batch = size.get("N", 0), ranks * size["B"]
    is_stored_sparse = any(
        x is not None and x.layout != torch.strided for x in (anchor, positive, negative)
    )
    has_fused_form = (
        in_batch
        and positive_mask is None
        and reduction != "none"
        and min(size["B"], size["D"]) > 0
        and not (symmetric and negative is not None and not gathers)
        and not (decoupled and not negatives and (positive_ids is not None or batch < 2))
        and not (is_stored_sparse and negative is not None and negative.ndim == 3)
    )
    options: dict[str, Any] = {
        "cosine": similarity == "cosine",
        "decoupled": decoupled,
        "chunk_size": chunk_size,
        "symmetric": symmetric,
        "positive_ids": positive_ids,
    }
    plain: Callable[..., Tensor] = functools.partial(
        _plain_loss,
        in_batch=in_batch,
        positive_mask=positive_mask,
        reduction=reduction,
        gather=gathers,
        **options,
    )
    takes_kernel = uses_triton(
        "info_nce",
        impl,
        anchor,
        positive,
        negative,
        elements=size["B"] * (batch + negatives),
        needs={
            "in_batch=True": in_batch,
            "no `positive_mask`": positive_mask is None,
            "a `reduction`": reduction != "none",
            "B and D of at least 1": min(size["B"], size["D"]) > 0,
            "no negatives per row": negative is None or negative.ndim == 2,
            "a negative in every row": not (
                decoupled and not negatives and (positive_ids is not None or batch < 2)
            ),
            'gather=True, not "ring",': not gathers or gather is True,
            "sparse=False": sparse is not True,
            "a `temperature` on the device of `anchor`": (
                not isinstance(temperature, Tensor) or temperature.device == anchor.device
            ),
        },
    )
    if takes_kernel and len({x.dtype for x in (anchor, positive, negative) if x is not None}) == 1:
        dtype = anchor.dtype  # half precision is multiplied as it is
    anchor, positive = anchor.to(dtype), positive.to(dtype)
    negative = None if negative is None else negative.to(dtype)
    if takes_kernel:
        return _by_kernel(
            plain,
            anchor,
            positive,
            negative,
            _as_tensor(temperature, anchor),
            gather=gathers,
            mean=reduction == "mean",
            **options,
        )
    # The ring is there to hold little, however little there is.
    elements = 1 << 62 if gathers and gather == "ring" else size["B"] * (batch + size["D"])
    if not has_fused_form or not can_fuse(anchor, positive, negative, elements=elements):
        return plain(anchor, positive, negative, temperature)
    tensors = anchor, positive, negative, _as_tensor(temperature, anchor)
    if gathers and gather == "ring":
        around = functools.partial(ring_contrast, mean=reduction == "mean", **options)
        return shared_by_ranks(fuse(plain, around, *tensors))
    is_sparse = is_stored_sparse or _pays_sparse(sparse, chunk_size, anchor, positive, negative)
    if gathers:
        fused = functools.partial(contrast, sparse=is_sparse)
        total = sum_over_ranks(_sum_of_directions(plain, fused, *tensors, **options))
        return total / (batch if reduction == "mean" else 1)
    fused = functools.partial(contrast, mean=reduction == "mean", sparse=is_sparse, **options)
    return fuse(plain, fused, *tensors)


def _as_tensor(temperature: float | Tensor, anchor: Tensor) -> Tensor:
    dtype = compute_dtype(anchor=anchor)
    if isinstance(temperature, Tensor):
        return temperature.to(dtype)
    return torch.full((), temperature, dtype=dtype, device=anchor.device)


def _by_kernel(
    plain: Callable[..., Tensor],
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: Tensor,
    *,
    gather: bool,
    mean: bool,
    symmetric: bool,
    **options: Any,
) -> Tensor:
    from sparse_losses.kernels._operators import scale_
    from sparse_losses.kernels.info_nce import info_nce

    tensors = anchor, positive, negative, temperature
    if not gather and not (symmetric and negative is not None):
        fused = functools.partial(info_nce, symmetric=symmetric, mean=mean, **options)
        return fuse(plain, fused, *tensors, scale_=scale_)
    total = _sum_of_directions(
        plain, info_nce, *tensors, symmetric=symmetric, gather=gather, scale_=scale_, **options
    )
    batch = anchor.shape[0] * (num_ranks() if gather else 1)
    return (sum_over_ranks(total) if gather else total) / (batch if mean else 1)


def _sum_of_directions(
    plain: Callable[..., Tensor],
    fused: Callable[..., Any],
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: Tensor,
    *,
    symmetric: bool,
    positive_ids: Tensor | None,
    gather: bool = True,
    scale_: Callable[[Tensor | None, Tensor], Tensor | None] | None = None,
    **options: Any,
) -> Tensor:
    """The sum over rows, a direction at a time: this rank's ask, all ranks' answer."""
    everyone = gather_rows if gather else _unchanged
    place: dict[str, Any] = {
        "first": rank() * anchor.shape[0] if gather else 0,
        "positive_ids": None if positive_ids is None else everyone(positive_ids),
    }
    plain = functools.partial(plain, symmetric=False, reduction="sum", gather=False, **place)
    fused = functools.partial(fused, mean=False, **place, **options)
    if negative is not None and negative.ndim == 2:
        negative = everyone(negative)
    total = fuse(plain, fused, anchor, everyone(positive), negative, temperature, scale_=scale_)
    if symmetric:
        other = fuse(plain, fused, positive, everyone(anchor), negative, temperature, scale_=scale_)
        total = (total + other) / 2
    return total


def _plain_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: float | Tensor,
    *,
    cosine: bool,
    symmetric: bool,
    in_batch: bool,
    positive_ids: Tensor | None,
    positive_mask: Tensor | None,
    decoupled: bool,
    chunk_size: int | None,
    reduction: Reduction,
    gather: bool = False,
    first: int = 0,
) -> Tensor:
    """The loss by differentiable operations; every option, every mode.

    With ``gather`` the tensors are this rank's. Positives and their ids may be more than the
    anchors (one direction only): that of the first anchor is number ``first``.
    """
    dtype = compute_dtype(anchor=anchor, positive=positive, negative=negative)
    anchor, positive = _dense(anchor).to(dtype), _dense(positive).to(dtype)
    negative = None if negative is None else _dense(negative).to(dtype)
    represent = normalize if cosine else _unchanged
    temperature = temperature.to(anchor.dtype) if isinstance(temperature, Tensor) else temperature
    everyone = gather_rows if gather else _unchanged
    if gather:
        first = rank() * anchor.shape[0]
        positive_ids = None if positive_ids is None else gather_rows(positive_ids)
        positive_mask = None if positive_mask is None else gather_rows(positive_mask)
    batch = anchor.shape[0]
    own = slice(first, first + batch)
    num_negatives = 0 if negative is None else negative.shape[-2]
    # Of all rows, then of those that ask here.
    valid = _valid_rows(
        positive.shape[0] * (num_ranks() if gather else 1),
        positive.device,
        num_negatives,
        positive_mask,
        positive_ids,
        symmetric,
        decoupled,
    )
    any_valid = None if valid is None else valid.any()
    valid = None if valid is None else valid[own]
    if negative is not None:
        if valid is not None and any_valid is not None:
            looked_at = any_valid if negative.ndim == 2 else valid[:, None, None]
            negative = torch.where(looked_at, negative, 0.0)
        negative = represent(negative)
        if negative.ndim == 2:
            negative = everyone(negative)
    if valid is None and positive_ids is None:
        # Nothing is hidden: represented once, though under `symmetric` both ask and both answer.
        anchor, positive, represent = represent(anchor), represent(positive), _unchanged

    def direction(
        asks: Tensor, answers: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        # What no valid row looks at must not send its NaN into a gradient: 0 * NaN is NaN.
        is_nan = None
        if valid is not None and any_valid is not None:
            asks = torch.where(valid[:, None], asks, 0.0)
            answers = torch.where(any_valid, answers, 0.0)
        if in_batch:
            answers = everyone(answers)
        if positive_ids is not None:  # which hides some columns from some rows
            is_nan = answers.isnan().any(-1)
            answers = torch.where(is_nan[:, None], 0.0, answers)
        return represent(asks), represent(answers), is_nan, mask

    mask = None if positive_mask is None else positive_mask[own]
    directions = [direction(anchor, positive, mask)]
    if symmetric:
        transposed = None if positive_mask is None else positive_mask.T[own]
        directions.append(direction(positive, anchor, transposed))

    def losses_of_rows(start: int, stop: int) -> Tensor:
        total = anchor.new_zeros(())
        for query, key, is_nan, mask in directions:
            total = total + _row_losses(
                query,
                key,
                is_nan,
                mask,
                negative,
                positive_ids,
                temperature,
                in_batch,
                decoupled,
                slice(start, stop),
                first,
            )
        return total / len(directions)

    if chunk_size is None or chunk_size >= batch:
        return reduce(losses_of_rows(0, batch), reduction, valid, gather)
    # torch.func knows no saved-tensor hooks; there the chunks are merely computed one by one.
    recompute = torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()
    chunks = []
    for start in range(0, batch, chunk_size):
        stop = min(start + chunk_size, batch)
        if recompute:
            chunk = checkpoint(
                losses_of_rows, start, stop, use_reentrant=False, preserve_rng_state=False
            )
        else:
            chunk = losses_of_rows(start, stop)
        chunks.append(chunk)
    return reduce(torch.cat(chunks), reduction, valid, gather)


def _row_losses(
    query: Tensor,
    key: Tensor,
    key_is_nan: Tensor | None,
    positive_mask: Tensor | None,
    negative: Tensor | None,
    positive_ids: Tensor | None,
    temperature: float | Tensor,
    in_batch: bool,
    decoupled: bool,
    rows: slice,
    first: int,
) -> Tensor:
    """The loss of each of the rows, one direction: ``query[rows]`` asks, ``key`` answers.

    The first query's own key is number ``first`` of a batch; without one keys are as queries.
    """
    query = query[rows]
    own_key = slice(first + rows.start, first + rows.stop)
    if in_batch:
        scores = query @ key.T
        if key_is_nan is not None:
            scores = torch.where(key_is_nan, torch.nan, scores)
        index = torch.arange(key.shape[0], device=key.device)
        own = index[own_key, None] == index
        positive = own if positive_mask is None else positive_mask[rows]
        rival = ~positive
        if positive_ids is not None:
            rival = rival & (positive_ids[own_key, None] != positive_ids)
    else:
        scores = (query * key[rows]).sum(-1, keepdim=True)
        if key_is_nan is not None:
            scores = torch.where(key_is_nan[rows, None], torch.nan, scores)
        positive = torch.ones_like(scores, dtype=torch.bool)
        rival = ~positive
    if negative is not None:
        if negative.ndim == 2:
            negative_scores = query @ negative.T
        else:
            negative_scores = torch.einsum("bd,bnd->bn", query, negative[rows])
        is_negative = torch.ones_like(negative_scores, dtype=torch.bool)
        scores = torch.cat([scores, negative_scores], dim=1)
        positive = torch.cat([positive, ~is_negative], dim=1)
        rival = torch.cat([rival, is_negative], dim=1)
    scores = scores / temperature

    if decoupled or positive_mask is None:
        gap = masked_logsumexp(scores, rival) - _mean_where(positive, scores)
        return gap if decoupled else softplus(gap)
    return _mean_where(positive, negative_log_softmax(scores, positive | rival))


def _mean_where(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def _valid_rows(
    batch: int,
    device: torch.device,
    num_negatives: int,
    positive_mask: Tensor | None,
    positive_ids: Tensor | None,
    symmetric: bool,
    decoupled: bool,
) -> Tensor | None:
    """Rows with a positive and, if decoupled, a negative; ``None`` where that is every row."""
    needs_rival = decoupled and num_negatives == 0
    if positive_mask is None:
        if not needs_rival:
            return None
        if positive_ids is None:
            return torch.full((batch,), batch > 1, dtype=torch.bool, device=device)
        # One differing id among the rows gives every row a rival.
        return (positive_ids != positive_ids[:1]).any().expand(batch)
    valid = positive_mask.any(1)
    if symmetric:
        valid = valid & positive_mask.any(0)
    if needs_rival:
        rival = ~positive_mask
        if positive_ids is not None:
            rival = rival & (positive_ids[:, None] != positive_ids)
        valid = valid & rival.any(1)
        if symmetric:
            valid = valid & rival.any(0)
    return valid


def _dense(x: Tensor) -> Tensor:
    return x if x.layout == torch.strided else x.to_dense()


def _unchanged(x: Tensor) -> Tensor:
    return x


def _pays_sparse(
    sparse: bool | str,
    chunk_size: int | None,
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
) -> bool:
    inputs = [x for x in (anchor, positive, negative) if x is not None]
    if negative is not None and negative.ndim == 3:
        return False
    if sparse != "auto":
        return sparse is True
    if anchor.device.type != "cpu" or anchor.shape[1] < FEWEST_COLUMNS or chunk_size is not None:
        return False
    sample = [x[:: max(x.shape[0] // SAMPLED_ROWS, 1)] for x in inputs]
    found = sum(int(x.count_nonzero()) for x in sample)
    densest = DENSEST * min(1.0, anchor.shape[0] / ROWS_FOR_DENSEST)
    return found < densest * sum(x.numel() for x in sample)


def _check(
    temperature: float | Tensor,
    similarity: str,
    symmetric: bool,
    in_batch: bool,
    decoupled: bool,
    chunk_size: int | None,
    gather: bool | str,
    sparse: bool | str,
) -> None:
    check_temperature(temperature)
    check_flag(symmetric=symmetric, in_batch=in_batch, decoupled=decoupled)
    check_choice("similarity", similarity, ("cosine", "dot"))
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, minimum=1)
    if not isinstance(gather, bool) and gather != "ring":
        raise ValueError(f'expected `gather` to be True, False or "ring", got {gather!r}')
    if not isinstance(sparse, bool) and sparse != "auto":
        raise ValueError(f'expected `sparse` to be True, False or "auto", got {sparse!r}')


class InfoNCELoss(nn.Module):
    """Module of ``info_nce_loss``, which holds formula and arguments.

    Examples:
        >>> import torch
        >>> from sparse_losses import InfoNCELoss
        >>> loss = InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.05)))
        >>> anchor, positive = torch.randn(8, 32), torch.randn(8, 32)
        >>> loss(anchor, positive).backward()
        >>> loss.temperature.grad.shape
        torch.Size([])
    """

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        similarity: str = "cosine",
        symmetric: bool = False,
        in_batch: bool = True,
        decoupled: bool = False,
        chunk_size: int | None = None,
        gather: bool | str = False,
        sparse: bool | str = "auto",
        impl: Impl = "auto",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        _check(temperature, similarity, symmetric, in_batch, decoupled, chunk_size, gather, sparse)
        check_impl(impl)
        check_reduction(reduction)
        self.temperature = temperature
        self.similarity = similarity
        self.symmetric = symmetric
        self.in_batch = in_batch
        self.decoupled = decoupled
        self.chunk_size = chunk_size
        self.gather = gather
        self.sparse = sparse
        self.impl: Impl = impl
        self.reduction: Reduction = reduction

    def forward(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor | None = None,
        *,
        positive_ids: Tensor | None = None,
        positive_mask: Tensor | None = None,
    ) -> Tensor:
        """The loss; tensors as in the function."""
        return info_nce_loss(
            anchor,
            positive,
            negative,
            temperature=self.temperature,
            similarity=self.similarity,
            symmetric=self.symmetric,
            in_batch=self.in_batch,
            positive_ids=positive_ids,
            positive_mask=positive_mask,
            decoupled=self.decoupled,
            chunk_size=self.chunk_size,
            gather=self.gather,
            sparse=self.sparse,
            impl=self.impl,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        """The hyperparameters."""
        return describe(
            self,
            "temperature",
            "similarity",
            "symmetric",
            "in_batch",
            "decoupled",
            "chunk_size",
            "gather",
            "sparse",
            "impl",
            "reduction",
        )


@full_precision
def mutual_information_lower_bound(loss: Tensor | float, num_candidates: int) -> Tensor:
    r"""What an InfoNCE value says about the mutual information of anchor and positive, in nats.

    $$I \ge \log n - \ell$$

    $n$ candidates a row: one positive and $n - 1$ independent draws from the marginal. The bound
    cannot exceed $\log n$, however much the two share: small batches cannot show much. It holds for
    plain InfoNCE only, not for decoupled, several positives, ids, mined negatives or weights.

    Args:
        loss: an InfoNCE value, a floating tensor of any shape or a number.
        num_candidates: ``n``; ``B`` for in-batch negatives alone, ``B + N`` with shared ones.

    Returns:
        The bound in nats, shape of ``loss``, at most ``log(num_candidates)``.

    Raises:
        ValueError: if ``num_candidates`` is below 1.
        TypeError: if ``loss`` is neither a floating tensor nor a number.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import mutual_information_lower_bound
        >>> mutual_information_lower_bound(torch.tensor(1.0), num_candidates=64)
        tensor(3.1589)

    References:
        Representation Learning with Contrastive Predictive Coding, eq. 6.
    """
    check_integer("num_candidates", num_candidates, minimum=1)
    if not isinstance(loss, Tensor):
        check_number("loss", loss)
        loss = torch.tensor(loss, dtype=torch.float64)
    loss = loss.to(compute_dtype(loss=loss))
    return math.log(num_candidates) - loss.clamp(min=0.0)
