"""Contrastive loss of labelled pairs (Hadsell, Chopra and LeCun, 2006)."""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from sparse_losses._core.checks import check_flag, check_number, check_shapes, describe
from sparse_losses._core.fused import can_fuse, fuse
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses._core.reduction import Reduction, check_reduction, reduce
from sparse_losses._core.token_ids import as_mask
from sparse_losses.distributed import agree_across_ranks

__all__ = ["PairwiseContrastiveLoss", "pairwise_contrastive_loss"]


@full_precision
def pairwise_contrastive_loss(
    x1: Tensor,
    x2: Tensor,
    same: Tensor,
    *,
    margin: float = 1.0,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Pulls pairs of one class together, pushes pairs of two classes a margin apart.

    $$\ell_i = \begin{cases} d_i^2 & \text{same} \\ \max(0, m - d_i)^2 & \text{else} \end{cases}
    \qquad d_i = \lVert x_{1,i} - x_{2,i} \rVert_2$$

    $m$ is the margin. Identical vectors of two classes have no direction to part in: the gradient
    there is 0, not NaN.

    Args:
        x1: ``[B, D]`` floating.
        x2: ``[B, D]``.
        same: ``[B]`` bool, int or float 0/1.
        margin: ``m``, in units of the Euclidean distance, >= 0.
        gather: whether ``"mean"`` and ``"sum"`` are over the rows of all ranks, whose number is the
            same on each (see ``sparse_losses.distributed``).
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
    check_shapes(x1=(x1, "B D"), x2=(x2, "B D"), same=(same, "B"))
    _check(margin)
    check_reduction(reduction)
    gather = agree_across_ranks("pairwise_contrastive_loss", gather, x1, x2, B=x1.shape[0])
    dtype = compute_dtype(x1=x1, x2=x2)
    same = as_mask("same", same)

    x1, x2 = x1.to(dtype), x2.to(dtype)
    if can_fuse(x1, x2):
        plain = functools.partial(_row_values, margin)
        values = fuse(plain, functools.partial(_row_values_and_gradients, margin), x1, x2, same)
    else:
        values = _row_values(margin, x1, x2, same)
    return reduce(values, reduction, gather=gather)


def _row_values(margin: float, x1: Tensor, x2: Tensor, same: Tensor) -> Tensor:
    squared_distance = (x1 - x2).square().sum(-1)
    # The square root has no finite slope at 0.
    is_zero = squared_distance == 0
    distance = torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, squared_distance).sqrt())
    return torch.where(same, squared_distance, nnf.relu(margin - distance).square())


def _row_values_and_gradients(
    margin: float, needs: Sequence[bool], x1: Tensor, x2: Tensor, same: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """The same with the gradients, multiples of the one difference."""
    difference = x1 - x2
    distance = torch.linalg.vector_norm(difference, dim=-1)
    hinge = nnf.relu(margin - distance)
    values = torch.where(same, distance.square(), hinge.square())
    if not any(needs):
        return values, [None, None, None]
    slope = torch.where(distance == 0, 0.0, -hinge / distance)
    difference *= torch.where(same, 2.0, 2.0 * slope)[:, None]
    opposite = -difference if needs[1] else None
    return values, [difference if needs[0] else None, opposite, None]


def _check(margin: float) -> None:
    check_number("margin", margin, minimum=0.0)


class PairwiseContrastiveLoss(nn.Module):
    """Module of ``pairwise_contrastive_loss``.

    Examples:
        >>> import torch
        >>> from sparse_losses import PairwiseContrastiveLoss
        >>> loss = PairwiseContrastiveLoss(margin=2.0)
        >>> loss(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([True]))
        tensor(2.)
    """

    def __init__(
        self, *, margin: float = 1.0, gather: bool = False, reduction: Reduction = "mean"
    ) -> None:
        super().__init__()
        _check(margin)
        check_flag(gather=gather)
        check_reduction(reduction)
        self.margin = margin
        self.gather = gather
        self.reduction: Reduction = reduction

    def forward(self, x1: Tensor, x2: Tensor, same: Tensor) -> Tensor:
        """The loss; tensors as in the function."""
        return pairwise_contrastive_loss(
            x1, x2, same, margin=self.margin, gather=self.gather, reduction=self.reduction
        )

    def extra_repr(self) -> str:
        """The hyperparameters."""
        return describe(self, "margin", "gather", "reduction")
