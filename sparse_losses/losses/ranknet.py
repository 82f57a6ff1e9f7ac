"""RankNet: order the candidates as the teacher orders them (Burges et al., 2005)."""

import torch
from torch import Tensor

from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.reduction import Reduction, reduce_means
from sparse_losses._core.softmax import softplus


@loss(
    student_scores="B C, uncast",
    teacher_scores="B C, detached",
    candidate_mask="B C, mask, optional",
    temperature="> 0, learnable",
)
def ranknet_loss(
    student_scores: Tensor,
    teacher_scores: Tensor,
    *,
    candidate_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Logistic loss of the pairs of candidates that the teacher orders.

    $$\ell_i = \frac{1}{\lvert O_i \rvert} \sum_{(a, b) \in O_i}
    \log\bigl(1 + e^{-(s_{ia} - s_{ib}) / T}\bigr)
    \qquad O_i = \{(a, b) : t_{ia} > t_{ib}\}$$

    $s_i$, $t_i$ are the student's and the teacher's scores of the candidates of row $i$, $T$ is the
    temperature. Only the order of the teacher's scores counts: they may be ranks or grades. Ties
    make no pair.

    Args:
        student_scores: ``[B, C]`` floating.
        teacher_scores: ``[B, C]``, higher is better; detached. ``-inf`` marks an entry that is not
            a candidate.
        candidate_mask: ``[B, C]`` bool, int or float 0/1; marks the entries that count.
        temperature: ``T``, finite and > 0; a 0-d tensor or ``nn.Parameter`` is learned.
        gather: whether ``reduction`` is over the rows of all ranks, as many on each.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 inputs), 0-d or ``[B]``, > 0. A row without a pair is not valid: its
        loss is 0, without a gradient. The pairs ``[B, C, C]`` are held.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import ranknet_loss
        >>> student, grades = torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0, 1.0]])
        >>> ranknet_loss(student, grades)  # log(1 + exp(-2))
        tensor(0.1269)
        >>> ranknet_loss(student, -grades)  # log(1 + exp(2))
        tensor(2.1269)

    References:
        Learning to Rank using Gradient Descent, eq. 3 with a target probability of 1. The mean over
        the pairs of a row is an addition.
    """
    teacher = teacher_scores
    if candidate_mask is not None:
        teacher = teacher.masked_fill(~candidate_mask, -torch.inf)
    # Nothing is better than what is no candidate. A NaN makes pairs.
    worse = teacher.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)
    no_pair = teacher[:, :, None] <= worse[:, None, :]
    # A NaN of the teacher shows in the student's scores, and so in the gradient.
    scores = (student_scores + teacher.clamp(0, 0))[:, None].expand(no_pair.shape)
    gap = scores - scores.mT
    if isinstance(temperature, Tensor):  # its gradient multiplies by the gaps: 0 * inf is NaN
        gap = gap.masked_fill(no_pair, 0.0)
    if isinstance(temperature, Tensor) or temperature != 1.0:
        gap = gap / temperature
    with torch.no_grad():  # -inf costs 0 and has slope 0, so the mask needs no backward pass
        gap.masked_fill_(no_pair, -torch.inf)
    num_pairs = no_pair.shape[1] ** 2 - no_pair.sum((1, 2), dtype=gap.dtype)
    return reduce_means(softplus(gap).sum((1, 2)), num_pairs, reduction, gather)


class RankNetLoss(LossModule):
    """Module of ``ranknet_loss``.

    Examples:
        >>> import torch
        >>> from sparse_losses import RankNetLoss
        >>> RankNetLoss()(torch.zeros(1, 3), torch.tensor([[2.0, 1.0, 1.0]]))  # log(2)
        tensor(0.6931)
    """

    def __init__(
        self,
        *,
        temperature: float | Tensor = 1.0,
        gather: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(ranknet_loss, locals())

    def forward(
        self,
        student_scores: Tensor,
        teacher_scores: Tensor,
        *,
        candidate_mask: Tensor | None = None,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather, candidate_mask=candidate_mask)
        return ranknet_loss(student_scores, teacher_scores, **options)
