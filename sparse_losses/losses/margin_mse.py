"""MarginMSE: the teacher's margin between positive and negative (Hofstaetter et al., 2020)."""

import torch.nn.functional as nnf
from torch import Tensor, nn

from sparse_losses._core.checks import check_flag, check_shapes, describe
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses._core.reduction import Reduction, check_reduction, reduce
from sparse_losses.distributed import agree_across_ranks

__all__ = ["MarginMSELoss", "margin_mse_loss"]


@full_precision
def margin_mse_loss(
    student_positive: Tensor,
    student_negative: Tensor,
    teacher_positive: Tensor,
    teacher_negative: Tensor,
    *,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Squared difference of the student's and the teacher's signed margins.

    $$\ell_i = \bigl((s_i^+ - s_i^-) - (t_i^+ - t_i^-)\bigr)^2$$

    $s^+$, $s^-$ are the student's scores of positive and negative, $t^+$, $t^-$ the teacher's.
    Only margins count: either side may be shifted, not scaled.

    Args:
        student_positive: ``[B]`` floating.
        student_negative: ``[B]``.
        teacher_positive: ``[B]``; detached.
        teacher_negative: ``[B]``; detached.
        gather: whether ``"mean"`` and ``"sum"`` are over the rows of all ranks, whose number is the
            same on each (see ``sparse_losses.distributed``).
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 inputs), 0-d or ``[B]``, >= 0.

    Raises:
        ValueError: for wrong shapes, devices or reduction.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import margin_mse_loss
        >>> s, t = torch.tensor([3.0]), torch.tensor([9.0])
        >>> margin_mse_loss(s, s - 1.0, t, t - 3.0)  # (1 - 3)^2
        tensor(4.)

    References:
        Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge Distillation,
        eq. 8.
    """
    size = check_shapes(
        student_positive=(student_positive, "B"),
        student_negative=(student_negative, "B"),
        teacher_positive=(teacher_positive, "B"),
        teacher_negative=(teacher_negative, "B"),
    )
    check_reduction(reduction)
    gather = agree_across_ranks(
        "margin_mse_loss",
        gather,
        student_positive,
        student_negative,
        teacher_positive,
        teacher_negative,
        B=size["B"],
    )
    dtype = compute_dtype(
        student_positive=student_positive,
        student_negative=student_negative,
        teacher_positive=teacher_positive,
        teacher_negative=teacher_negative,
    )
    student_margin = student_positive.to(dtype) - student_negative.to(dtype)
    teacher_margin = teacher_positive.detach().to(dtype) - teacher_negative.detach().to(dtype)
    if gather:
        return reduce((student_margin - teacher_margin).square(), reduction, gather=True)
    if size["B"] == 0 and reduction == "mean":
        reduction = "sum"  # of no row at all: 0, and part of the graph
    return nnf.mse_loss(student_margin, teacher_margin, reduction=reduction)


class MarginMSELoss(nn.Module):
    """Module of ``margin_mse_loss``.

    Examples:
        >>> import torch
        >>> from sparse_losses import MarginMSELoss
        >>> one, two = torch.ones(2), torch.full((2,), 2.0)
        >>> MarginMSELoss(reduction="sum")(two, one, one, one)
        tensor(2.)
    """

    def __init__(self, *, gather: bool = False, reduction: Reduction = "mean") -> None:
        super().__init__()
        check_flag(gather=gather)
        check_reduction(reduction)
        self.gather = gather
        self.reduction: Reduction = reduction

    def forward(
        self,
        student_positive: Tensor,
        student_negative: Tensor,
        teacher_positive: Tensor,
        teacher_negative: Tensor,
    ) -> Tensor:
        """The loss; tensors as in the function."""
        return margin_mse_loss(
            student_positive,
            student_negative,
            teacher_positive,
            teacher_negative,
            gather=self.gather,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        """The hyperparameters."""
        return describe(self, "gather", "reduction")
