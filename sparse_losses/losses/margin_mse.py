"""MarginMSE: match the teacher's margin of positive over negative (Hofstaetter et al., 2020)."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.checks import values_can_be_checked
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.reduction import Reduction, reduce

__all__ = ["MarginMSELoss", "margin_mse_loss"]


@loss(
    student_positive="B",
    student_negative="B",
    teacher_positive="B, detached",
    teacher_negative="B, detached",
)
def margin_mse_loss(
    student_positive: Tensor,
    student_negative: Tensor,
    teacher_positive: Tensor,
    teacher_negative: Tensor,
    *,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Squared difference of the student's and the teacher's margins.

    $$\ell_i = \bigl((s_i^+ - s_i^-) - (t_i^+ - t_i^-)\bigr)^2$$

    $s^+$, $s^-$ are the student's scores of positive and negative, $t^+$, $t^-$ the teacher's. A
    constant added to the scores of either model changes nothing; a factor does.
    A teacher's score of ``-inf`` means that the candidate is not there: the row is not valid.

    Args:
        student_positive: ``[B]`` floating.
        student_negative: ``[B]``.
        teacher_positive: ``[B]``; detached. ``-inf`` marks a row that does not count.
        teacher_negative: ``[B]``; detached; ``-inf`` likewise.
        gather: whether ``"mean"`` and ``"sum"`` are over the rows of all ranks, which must have the
            same number of rows (see ``sparse_losses.distributed``).
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

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
    student_margin = student_positive - student_negative
    teacher_margin = teacher_positive - teacher_negative
    if values_can_be_checked(teacher_margin) and teacher_margin.isfinite().all():
        squares = nnf.mse_loss(student_margin, teacher_margin, reduction="none")
        return reduce(squares, reduction, gather=gather)
    valid = (teacher_positive != -torch.inf) & (teacher_negative != -torch.inf)
    difference = torch.where(valid, student_margin - teacher_margin, 0.0)
    return reduce(difference.square(), reduction, valid, gather, zeroed=True)


class MarginMSELoss(LossModule):
    """Module of ``margin_mse_loss``.

    Examples:
        >>> import torch
        >>> from sparse_losses import MarginMSELoss
        >>> one, two = torch.ones(2), torch.full((2,), 2.0)
        >>> MarginMSELoss(reduction="sum")(two, one, one, one)
        tensor(2.)
    """

    def __init__(self, *, gather: bool = False, reduction: Reduction = "mean") -> None:
        super().__init__(margin_mse_loss, gather=gather, reduction=reduction)

    def forward(
        self,
        student_positive: Tensor,
        student_negative: Tensor,
        teacher_positive: Tensor,
        teacher_negative: Tensor,
        *,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        return margin_mse_loss(
            student_positive,
            student_negative,
            teacher_positive,
            teacher_negative,
            **self.hyperparameters(gather=gather),
        )
