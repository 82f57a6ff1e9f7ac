"""N-pair loss: one positive against N negatives on raw dot products (N-pair Loss, 2016)."""

from typing import Any, Literal

import torch
from torch import Tensor

from sparse_losses._core.implementations import Arguments, Implementation, Options, always, compute
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.products import as_single
from sparse_losses._core.reduction import Reduction, reduce
from sparse_losses._core.softmax import contrastive_rows
from sparse_losses.distributed import gather_rows, rank
from sparse_losses.fast.info_nce import blockwise_info_nce, direct_info_nce, too_many_scores

__all__ = ["NPairLoss", "n_pair_loss"]


Impl = Literal["auto", "definition", "direct", "blocks"]


@loss(anchor="B D, halves", positive="B D, halves", negative="N D or B N D, optional, halves")
def n_pair_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None = None,
    *,
    gather: bool = False,
    impl: Impl = "auto",
    reduction: Reduction = "mean",
) -> Tensor:
    r"""N-pair loss on raw dot products.

    $$\ell_i = \log\Bigl(1 + \sum_k \exp(a_i \cdot n_k - a_i \cdot p_i)\Bigr)$$

    $a_i$, $p_i$ are anchor and positive of row $i$. Its negatives $n_k$ are ``negative`` if given,
    else the other rows' positives. Equals InfoNCE on dot products at temperature 1.

    Args:
        anchor: ``[B, D]`` floating.
        positive: ``[B, D]``.
        negative: ``[N, D]``, shared by all rows, or ``[B, N, D]``, ``N`` for each row.
        gather: whether all ranks' positives and shared negatives are used, and ``"mean"`` and
            ``"sum"`` are over all ranks' rows (see ``sparse_losses.distributed``). Sizes must be
            the same on every rank.
        impl: ``"definition"`` evaluates the formula operation by operation; ``"direct"`` holds all
            scores at once, ``"blocks"`` some rows of them at a time, both with
            ``negative=None`` only; ``"auto"`` selects the one expected to be fastest.
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
        Improved Deep Metric Learning with Multi-class N-pair Loss Objective.
    """
    options = {
        "similarity": "dot",
        "symmetric": False,
        "positive_ids": None,
        "decoupled": False,
        "gather": gather,
        "reduction": reduction,
    }
    return compute(_definition, IMPLEMENTATIONS, impl, (anchor, positive, negative, 1.0), options)


def _definition(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None,
    temperature: float,
    *,
    gather: bool,
    reduction: Reduction,
    **_: Any,
) -> Tensor:
    """InfoNCE's row formula on raw dot products; the temperature is always 1."""
    anchor, positive = as_single(anchor), as_single(positive)
    negative = None if negative is None else as_single(negative)
    own = torch.arange(len(anchor), device=anchor.device)  # column of a row's positive
    if negative is None:
        key = gather_rows(positive, gather)
        scores = anchor @ key.T
        own = own + rank() * len(anchor) if gather else own
    else:
        shared = negative.ndim == 2
        negative = gather_rows(negative, gather) if shared else negative
        others = anchor @ negative.T if shared else torch.einsum("bd,bnd->bn", anchor, negative)
        scores = torch.cat([(anchor * positive).sum(-1, keepdim=True), others], dim=1)
        own = torch.zeros_like(own)
    is_positive = own[:, None] == torch.arange(scores.shape[1], device=anchor.device)
    values = contrastive_rows(scores, is_positive, ~is_positive, one_positive=True)
    return reduce(values, reduction, gather=gather)


def _why_not(arguments: Arguments, options: Options) -> str | None:
    anchor, _, negative, _ = arguments
    if negative is not None:
        return "no `negative`"
    if options["reduction"] == "none":
        return 'reduction="mean" or "sum"'
    return f"B and D of at least 1, got {list(anchor.shape)}," if min(anchor.shape) == 0 else None


# The ways of InfoNCE compute this loss at temperature 1.
IMPLEMENTATIONS = (
    Implementation(
        "blocks",
        unsupported_reason=_why_not,
        is_preferred=too_many_scores,
        compute=blockwise_info_nce,
    ),
    Implementation(
        "direct", unsupported_reason=_why_not, is_preferred=always, compute=direct_info_nce
    ),
)


class NPairLoss(LossModule):
    """Module of ``n_pair_loss``; see the function for formula and arguments.

    Examples:
        >>> import torch
        >>> from sparse_losses import NPairLoss
        >>> NPairLoss()(torch.eye(3), torch.eye(3), torch.zeros(1, 3))  # log(1 + 1 / e)
        tensor(0.3133)
    """

    def __init__(
        self, *, gather: bool = False, impl: Impl = "auto", reduction: Reduction = "mean"
    ) -> None:
        super().__init__(n_pair_loss, gather=gather, impl=impl, reduction=reduction)

    def forward(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor | None = None,
        *,
        gather: bool | None = None,
        impl: Impl | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather, impl=impl)
        return n_pair_loss(anchor, positive, negative, **options)
