"""Contrastive loss on labelled pairs (Hadsell, Chopra and LeCun, 2006)."""

import torch
from torch import Tensor

from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.reduction import Reduction, reduce
from sparse_losses._core.similarity import distance


@loss(x1="B D, halves", x2="B D, halves", same="B, mask", margin=">= 0")
def pairwise_contrastive_loss(
    x1: Tensor,
    x2: Tensor,
    same: Tensor,
    *,
    margin: float = 1.0,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Pull pairs of the same class together; push pairs of different classes a margin apart.

    $$\ell_i = \begin{cases} d_i^2 & \text{same} \\ \max(0, m - d_i)^2 & \text{else} \end{cases}
    \qquad d_i = \lVert x_{1,i} - x_{2,i} \rVert_2$$

    $m$ is the margin. For identical vectors of different classes the gradient is 0, not NaN.

    Args:
        x1: ``[B, D]`` floating.
        x2: ``[B, D]``.
        same: ``[B]`` bool, int or float 0/1; whether the pair is of the same class.
        margin: ``m``, in units of the Euclidean distance, >= 0.
        gather: whether ``reduction`` is over the rows of all ranks, as many on each.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 inputs), 0-d or ``[B]``, >= 0.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import pairwise_contrastive_loss
        >>> x1, x2 = torch.zeros(2, 2), torch.tensor([[0.0, 0.5], [0.0, 0.5]])
        >>> pairwise_contrastive_loss(x1, x2, torch.tensor([True, False]), reduction="none")
        tensor([0.2500, 0.2500])

    References:
        Dimensionality Reduction by Learning an Invariant Mapping, eq. 4 (without its halves).
    """
    length = distance(x1, x2)
    # `margin - length` would compile a new graph for every margin.
    beyond = torch.where(same, length, (length - margin).clamp(max=0.0))
    values = beyond.square().to(torch.promote_types(x1.dtype, torch.float32))
    return reduce(values, reduction, gather=gather)


class PairwiseContrastiveLoss(LossModule):
    """Module of ``pairwise_contrastive_loss``.

    Examples:
        >>> import torch
        >>> from sparse_losses import PairwiseContrastiveLoss
        >>> loss = PairwiseContrastiveLoss(margin=2.0)
        >>> loss(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), torch.tensor([True]))
        tensor(25.)
    """

    def __init__(
        self, *, margin: float = 1.0, gather: bool = False, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(pairwise_contrastive_loss, locals())

    def forward(
        self, x1: Tensor, x2: Tensor, same: Tensor, *, gather: bool | None = None
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather)
        return pairwise_contrastive_loss(x1, x2, same, **options)
