"""N-pair loss: one positive against N negatives on raw dot products (N-pair Loss, 2016)."""

from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.candidates import Call
from sparse_losses._core.implementations import as_dict, compute
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.products import as_dense
from sparse_losses._core.reduction import Reduction, reduce
from sparse_losses._core.softmax import diagonal, one_positive_rows
from sparse_losses.distributed import gather_rows, rank
from sparse_losses.fast.info_nce import IMPLEMENTATIONS


@loss(
    anchor="B D, csr, halves",
    positive="B D, csr, halves",
    negative="N D or B N D, optional, csr, halves",
)
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

    $a_i$, $p_i$ are anchor and positive of row $i$, $n_k$ its negatives: ``negative``, or without
    it the other rows' positives. Equals InfoNCE on dot products at temperature 1.

    Args:
        anchor: ``[B, D]`` floating, dense or CSR, with a gradient of its pattern.
        positive: ``[B, D]``, likewise.
        negative: ``[N, D]``, likewise, shared by all rows, or dense ``[B, N, D]``.
        gather: whether all ranks' positives and shared negatives are used, and ``"mean"`` and
            ``"sum"`` are over all ranks' rows, whose sizes agree (``sparse_losses.distributed``).
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
    # The arguments of InfoNCE at temperature 1.
    arguments = as_dict(Call(anchor, positive, negative))
    arguments.update({"in_batch": negative is None, "gather": gather, "reduction": reduction})
    return compute(_definition, IMPLEMENTATIONS, "auto", arguments)


def _definition(**arguments: Any) -> Tensor:
    """The formula, operation by operation."""
    call = Call(**arguments)
    anchor, positive = as_dense(call.anchor), as_dense(call.positive)
    if call.negative is None:
        scores = anchor @ gather_rows(positive, call.gather).T
        first = rank() * len(anchor) if call.gather else 0  # the column of the first row's positive
        own, (rows, columns) = diagonal(scores, first), scores.shape
        is_own = torch.eye(first + rows, columns, dtype=torch.bool, device=scores.device)[first:]
    else:
        negative = as_dense(call.negative)
        is_shared = negative.ndim == 2
        negative = gather_rows(negative, call.gather and is_shared)
        scores = anchor @ negative.T if is_shared else torch.einsum("bd,bnd->bn", anchor, negative)
        own, is_own = (anchor * positive).sum(-1), None
    return reduce(one_positive_rows(scores, own, is_own), call.reduction, gather=call.gather)


class NPairLoss(LossModule):
    """Module of ``n_pair_loss``.

    Examples:
        >>> import torch
        >>> from sparse_losses import NPairLoss
        >>> NPairLoss()(torch.eye(3), torch.eye(3), torch.zeros(1, 3))  # log(1 + 1 / e)
        tensor(0.3133)
    """

    def __init__(self, *, gather: bool = False, reduction: Reduction = "mean") -> None:
        super().__init__(n_pair_loss, locals())

    def forward(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor | None = None,
        *,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        return n_pair_loss(anchor, positive, negative, **self.hyperparameters(gather=gather))
