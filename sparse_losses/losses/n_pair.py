"""N-pair loss: one positive against N negatives on raw dot products (N-pair Loss, 2016)."""

import functools

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_flag, check_shapes, describe
from sparse_losses._core.fused import can_fuse, fuse
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses._core.reduction import Reduction, check_reduction, reduce
from sparse_losses._core.softmax import masked_logsumexp, softplus
from sparse_losses.distributed import (
    agree_across_ranks,
    gather_rows,
    num_ranks,
    rank,
    sum_over_ranks,
)
from sparse_losses.fast.info_nce import contrast

__all__ = ["NPairLoss", "n_pair_loss"]


@full_precision
def n_pair_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None = None,
    *,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""N-pair loss on raw dot products.

    $$\ell_i = \log\Bigl(1 + \sum_k \exp(a_i \cdot n_k - a_i \cdot p_i)\Bigr)$$

    $a_i$, $p_i$ are anchor and positive of row $i$, $n_k$ its negatives: those given, and only
    those, else the other rows' positives. Equals InfoNCE on dot products at temperature 1.

    Args:
        anchor: ``[B, D]`` floating.
        positive: ``[B, D]``.
        negative: ``[N, D]`` shared by all rows, or ``[B, N, D]``, each row its own.
        gather: whether all ranks' positives and shared negatives serve, and ``"mean"`` and
            ``"sum"`` are over all ranks' rows (see ``sparse_losses.distributed``). Sizes are the
            same on every rank.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 inputs), 0-d or ``[B]``; 0 for a row without negatives.

    Raises:
        ValueError: for wrong shapes, devices or reduction.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import n_pair_loss
        >>> n_pair_loss(torch.eye(3), torch.eye(3))  # log(1 + 2 / e)
        tensor(0.5514)

    References:
        Improved Deep Metric Learning with Multi-class N-pair Loss Objective, eq. 4.
    """
    size = check_shapes(
        anchor=(anchor, "B D"),
        positive=(positive, "B D"),
        negative=(negative, "N D or B N D, optional"),
    )
    check_reduction(reduction)
    dtype = compute_dtype(anchor=anchor, positive=positive, negative=negative)
    anchor, positive = anchor.to(dtype), positive.to(dtype)
    negative = None if negative is None else negative.to(dtype)
    first, batch = 0, size["B"]
    number = {"number of dimensions of `negative`": 0 if negative is None else negative.ndim}
    sizes = {"B": batch, "D": size["D"], "N": size.get("N", 0)} | number
    gathers = agree_across_ranks("n_pair_loss", gather, anchor, **sizes)
    key = positive
    if gathers:
        first, batch = rank() * batch, num_ranks() * batch
        if negative is None:
            key = gather_rows(positive)
        elif negative.ndim == 2:
            negative = gather_rows(negative)
    if negative is None and reduction != "none" and can_fuse(anchor, key):
        plain = functools.partial(_row_sum, first)
        fused = functools.partial(contrast, mean=False, first=first)
        total = fuse(plain, fused, anchor, key, None, anchor.new_ones(()))
        total = sum_over_ranks(total) if gathers else total
        return total / (batch if reduction == "mean" else 1)
    return reduce(_row_losses(first, anchor, key, positive, negative), reduction, gather=gathers)


def _row_sum(first: int, anchor: Tensor, key: Tensor, _: None, __: Tensor) -> Tensor:
    positive = key[first : first + anchor.shape[0]]
    return _row_losses(first, anchor, key, positive, None).sum()


def _row_losses(
    first: int, anchor: Tensor, key: Tensor, positive: Tensor, negative: Tensor | None
) -> Tensor:
    """One value an anchor; the positive of the first is number ``first`` of the keys."""
    positive_score = (anchor * positive).sum(-1)
    if negative is None:
        scores = anchor @ key.T
        index = torch.arange(key.shape[0], device=anchor.device)
        is_negative = index[first : first + anchor.shape[0], None] != index
    else:
        if negative.ndim == 2:
            scores = anchor @ negative.T
        else:
            scores = torch.einsum("bd,bnd->bn", anchor, negative)
        is_negative = torch.ones_like(scores, dtype=torch.bool)
    return softplus(masked_logsumexp(scores, is_negative) - positive_score)


class NPairLoss(nn.Module):
    """Module of ``n_pair_loss``, which holds formula and arguments.

    Examples:
        >>> import torch
        >>> from sparse_losses import NPairLoss
        >>> NPairLoss()(torch.eye(3), torch.eye(3), torch.zeros(1, 3))  # log(1 + 1 / e)
        tensor(0.3133)
    """

    def __init__(self, *, gather: bool = False, reduction: Reduction = "mean") -> None:
        super().__init__()
        check_flag(gather=gather)
        check_reduction(reduction)
        self.gather = gather
        self.reduction: Reduction = reduction

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor | None = None) -> Tensor:
        """The loss; tensors as in the function."""
        return n_pair_loss(anchor, positive, negative, gather=self.gather, reduction=self.reduction)

    def extra_repr(self) -> str:
        """The hyperparameters."""
        return describe(self, "gather", "reduction")
