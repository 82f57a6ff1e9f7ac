"""MarginMSE: match the teacher's margin of positive over negative (Hofstaetter et al., 2020)."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.checks import values_can_be_checked
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.reduction import Reduction, reduce, reduce_means


@loss(
    student_positive="B, uncast",
    student_negative="B or B N",
    teacher_positive="B, detached",
    teacher_negative="B or B N, detached",
    candidate_mask="B or B N, mask, optional",
)
def margin_mse_loss(
    student_positive: Tensor,
    student_negative: Tensor,
    teacher_positive: Tensor,
    teacher_negative: Tensor,
    *,
    candidate_mask: Tensor | None = None,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Squared difference of the student's and the teacher's margins.

    $$\ell_i = \bigl((s_i^+ - s_i^-) - (t_i^+ - t_i^-)\bigr)^2$$

    $s^+$, $s^-$ are the student's scores of positive and negative, $t^+$, $t^-$ the teacher's. With
    several negatives per row, $\ell_i$ is the mean over those that exist. A constant added to
    the scores of either model changes nothing; a factor does. A teacher's score of ``-inf`` means
    that the candidate does not exist, as in ``distillation_loss``.

    Args:
        student_positive: ``[B]`` floating.
        student_negative: ``[B]``, or ``[B, N]``.
        teacher_positive: ``[B]``; detached. ``-inf`` marks a row without a positive.
        teacher_negative: ``[B]`` or ``[B, N]``; detached. ``-inf`` marks what does not exist.
        candidate_mask: ``[B]`` or ``[B, N]`` bool, int or float 0/1; marks negatives that exist.
        gather: whether ``reduction`` is over the rows of all ranks, as many on each.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 inputs), 0-d or ``[B]``, >= 0. A row without a positive or without a
        negative is not valid: its loss is 0, without a gradient.

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
    for name, other in (("teacher_negative", teacher_negative), ("candidate_mask", candidate_mask)):
        if other is not None and other.shape != student_negative.shape:
            raise ValueError(
                f"expected `{name}` of the shape of `student_negative`, "
                f"{list(student_negative.shape)}, got {list(other.shape)}"
            )
    has_list = student_negative.ndim == 2
    if has_list:
        student_positive, teacher_positive = student_positive[:, None], teacher_positive[:, None]
    # A NaN of one side does not make up for the -inf of the other.
    absent = torch.fmin(teacher_positive, teacher_negative) == -torch.inf
    absent = absent if candidate_mask is None else absent | ~candidate_mask
    margins = student_positive - student_negative, teacher_positive - teacher_negative
    if values_can_be_checked(absent) and absent.numel() and not absent.any():  # nothing to mask
        squares = nnf.mse_loss(*margins, reduction="none")
        return reduce(squares.mean(1) if has_list else squares, reduction, gather=gather)
    student_margin, teacher_margin = (margin.masked_fill(absent, 0.0) for margin in margins)
    if reduction == "mean" and not (has_list or gather):
        total = nnf.mse_loss(student_margin, teacher_margin, reduction="sum")
        return total / (~absent).sum().clamp(min=1)
    squares = nnf.mse_loss(student_margin, teacher_margin, reduction="none")
    if not has_list:
        return reduce(squares, reduction, ~absent, gather, zeroed=True)
    num_negatives = (~absent).sum(1, dtype=squares.dtype)
    return reduce_means(squares.sum(1), num_negatives, reduction, gather)


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
        super().__init__(margin_mse_loss, locals())

    def forward(
        self,
        student_positive: Tensor,
        student_negative: Tensor,
        teacher_positive: Tensor,
        teacher_negative: Tensor,
        *,
        candidate_mask: Tensor | None = None,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        tensors = student_positive, student_negative, teacher_positive, teacher_negative
        options = self.hyperparameters(gather=gather, candidate_mask=candidate_mask)
        return margin_mse_loss(*tensors, **options)
