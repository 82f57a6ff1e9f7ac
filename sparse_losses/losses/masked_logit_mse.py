"""Masked logit MSE: a student's logits follow a teacher's where either is active (MILCO, 2025)."""

import torch
from torch import Tensor

from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.reduction import Reduction, reduce_means


@loss(student_logits="B V, uncast", teacher_logits="B V, detached", threshold="finite")
def masked_logit_mse_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    threshold: float = 0.0,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Mean squared difference of two texts' logits over the dimensions that either activates.

    $$\ell_i = \frac{1}{\lvert A_i \rvert} \sum_{j \in A_i} (z_{ij} - t_{ij})^2
    \qquad A_i = \{j : z_{ij} > \theta \text{ or } t_{ij} > \theta\}$$

    $z_{ij}$ is the student's pooled logit of token $j$ for text $i$, $t_{ij}$ the teacher's,
    $\theta$ the ``threshold``.

    Args:
        student_logits: ``[B, V]`` floating; signed, as ``return_logits=True`` of the head gives.
        teacher_logits: ``[B, V]``, over the same vocabulary; detached.
        threshold: $\theta$, finite, on the scale of the logits.
        gather: whether ``reduction`` is over the rows of all ranks, as many on each.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 inputs), 0-d or ``[B]``, >= 0. A row without an active dimension is not
        valid: its loss is 0, without a gradient.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import masked_logit_mse_loss
        >>> student = torch.tensor([[1.0, -1.0, -5.0]])
        >>> teacher = torch.tensor([[3.0, 1.0, -2.0]])
        >>> masked_logit_mse_loss(student, teacher)  # (4 + 4) / 2
        tensor(4.)

    References:
        MILCO: Learned Sparse Retrieval Across Languages via a Multilingual Connector.
    """
    # A NaN of either side is not silent.
    is_silent = torch.maximum(student_logits.detach(), teacher_logits) <= threshold
    difference = (student_logits - teacher_logits).masked_fill(is_silent, 0.0)
    num_active = (~is_silent).sum(1, dtype=difference.dtype)
    return reduce_means(difference.square().sum(1), num_active, reduction, gather)


class MaskedLogitMSELoss(LossModule):
    """Module of ``masked_logit_mse_loss``.

    Examples:
        >>> import torch
        >>> from sparse_losses import MaskedLogitMSELoss
        >>> MaskedLogitMSELoss()(torch.tensor([[2.0, -1.0]]), torch.tensor([[5.0, -3.0]]))
        tensor(9.)
    """

    def __init__(
        self, *, threshold: float = 0.0, gather: bool = False, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(masked_logit_mse_loss, locals())

    def forward(
        self, student_logits: Tensor, teacher_logits: Tensor, *, gather: bool | None = None
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather)
        return masked_logit_mse_loss(student_logits, teacher_logits, **options)
