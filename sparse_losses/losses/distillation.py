"""Knowledge distillation of scores: softened KL plus z-score MSE."""

import math
from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.checks import values_can_be_checked
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.z_scores import fill, z_scores
from sparse_losses.distributed import sum_over_ranks

Standardize = Literal["batch", "row"]
Scores = tuple[Tensor, Tensor, Tensor | None]  # student, teacher, which are no candidates


@loss(
    student_scores="B C",
    teacher_scores="B C, detached",
    candidate_mask="B C, mask, optional",
    temperature="> 0, learnable",
    alpha_kl=">= 0",
    alpha_mse=">= 0",
)
def distillation_loss(
    student_scores: Tensor,
    teacher_scores: Tensor,
    *,
    temperature: float | Tensor = 3.0,
    alpha_kl: float = 0.7,
    alpha_mse: float = 0.3,
    standardize: Standardize = "batch",
    candidate_mask: Tensor | None = None,
    gather: bool = False,
) -> Tensor:
    r"""Match the student's scores of a candidate list to the teacher's.

    $$\ell = \alpha_{kl} \, T^2 \, \frac{1}{B} \sum_{i=1}^{B}
    \mathrm{KL}\bigl(\mathrm{softmax}(t_i / T) \,\Vert\, \mathrm{softmax}(s_i / T)\bigr)
    + \alpha_{mse} \, \mathrm{MSE}\bigl(z(s), z(t)\bigr) \qquad
    z(s) = \frac{s - \bar s}{\mathrm{std}(s) + 10^{-8}}$$

    $s_i$, $t_i$ are the student's and the teacher's scores of the candidates of row $i$, $T$ is the
    temperature. $z$ uses mean and unbiased standard deviation of the matrix or of each row. Equal
    scores have $z = 0$ and no gradient from the MSE. Cosines give a weak signal at $T = 3$: divide
    them by the temperature of the contrastive loss first.

    Args:
        student_scores: ``[B, C]`` floating.
        teacher_scores: ``[B, C]``; detached. ``-inf`` marks what is not a candidate.
        temperature: ``T``, finite and > 0; a 0-d tensor or ``nn.Parameter`` is learned.
        alpha_kl: weight of the KL, >= 0; at 0 the KL is not computed.
        alpha_mse: weight of the MSE, >= 0; at 0 the MSE is not computed.
        standardize: ``"batch"`` for one mean and deviation of the matrix, or ``"row"``, of at
            least three candidates: a row with fewer has $z = 0$, as two always have +-0.7071.
        candidate_mask: ``[B, C]`` bool, int or float 0/1; marks the entries that count.
        gather: whether all statistics are over all ranks' rows (``sparse_losses.distributed``).

    Returns:
        0-d, fp32 (fp64 for fp64 inputs), >= 0; 0 without candidates. The KL is divided by the
        number of rows with candidates, the MSE by that of candidates: there is no ``reduction``.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, or too few candidates.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import distillation_loss
        >>> teacher = torch.tensor([[9.0, 5.0, 1.0]])
        >>> distillation_loss(teacher.flip(1), teacher)
        tensor(12.5267)

    References:
        Distilling the Knowledge in a Neural Network, section 2. Logit Standardization in Knowledge
        Distillation (the z-scores). Combined in the notes of a Korean retriever (its version V26).
    """
    fewest, received = 3 if standardize == "row" else 2, student_scores.shape[1]
    if received < fewest:
        raise ValueError(f"expected at least {fewest} candidates per row, got C = {received}")
    if len(student_scores) == 0 or not (alpha_kl > 0 or alpha_mse > 0):
        return student_scores[:0].sum()  # 0 and part of the graph
    absent = None if candidate_mask is None else ~candidate_mask
    if not values_can_be_checked(teacher_scores) or teacher_scores.amin() == -torch.inf:
        is_not_there = teacher_scores == -torch.inf
        absent = is_not_there if absent is None else absent | is_not_there
    scores = student_scores, teacher_scores, absent
    parts = [_kl(scores, alpha_kl, temperature, gather)] if alpha_kl > 0 else []
    if alpha_mse > 0:
        parts.append(_mse(scores, alpha_mse, standardize == "row", gather))
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _kl(scores: Scores, weight: float, temperature: float | Tensor, gather: bool) -> Tensor:
    """Return ``weight * T^2`` times the mean KL of the rows that have candidates."""
    student, teacher, absent = scores
    limits = torch.finfo(student.dtype)
    if isinstance(temperature, Tensor):  # its gradient multiplies by the scores: 0 * inf is NaN
        student, teacher = fill(student, absent, 0.0), fill(teacher, absent, 0.0)
    log_q = fill(student / temperature, absent, limits.min).log_softmax(-1)
    # p is at least the smallest normal number, so that q / p does not overflow.
    log_p = fill(teacher / temperature, absent, limits.min).log_softmax(-1)
    log_p = log_p.clamp(min=math.log(limits.tiny))
    x = fill(log_q - log_p, absent, 0.0)
    # The sum of p log(p / q) - p + q, where q - p sums to 0: its gradient keeps its digits where p
    # and q are nearly equal and where one entry has nearly all of the probability.
    kl = log_p.exp().flatten().dot((x.expm1() - x).flatten())
    is_row = student.new_ones(len(student)) if absent is None else ~absent.all(-1)
    rows = is_row.sum(dtype=kl.dtype)
    if gather:
        kl, rows = sum_over_ranks(kl), sum_over_ranks(rows)
    # Beyond this limit both distributions are equal, and T^2 is infinite: 0 * inf is NaN.
    most, rows = limits.max**0.5 / 2, rows.clamp(min=1)
    if isinstance(temperature, Tensor):  # a quotient by its square would have a gradient of 1 / T^4
        temperature = temperature.clamp(max=most)
        return kl * temperature * temperature * weight / rows
    temperature = min(temperature, most)
    if torch.compiler.is_compiling():  # PyTorch 2.6 would compile every weight anew
        return kl * weight / (rows / (temperature * temperature))
    return kl / (rows / (weight * temperature * temperature))


def _mse(scores: Scores, weight: float, by_row: bool, gather: bool) -> Tensor:
    """Return ``weight`` times the mean squared difference of the z-scores."""
    student, teacher, absent = scores
    dims = (-1,) if by_row else (-2, -1)
    across_ranks = gather and not by_row  # one matrix of all ranks' rows
    if absent is None:
        size = student.shape[1] if by_row else student.numel()
        count = student.new_full((len(student), 1) if by_row else (1, 1), size)
    else:
        count = (~absent).sum(dims, keepdim=True, dtype=student.dtype)
    count = sum_over_ranks(count) if across_ranks else count
    if by_row:
        divisor = (sum_over_ranks(count.sum()) if gather else count.sum()).clamp(min=1)
        if absent is not None:  # the z of a row of two are always +-0.7071: they say nothing
            absent = absent | (count < 2.5)
    count = count.clamp(min=1.5)  # fewer than two candidates have z = 0 and need no division by 0
    divisor = divisor if by_row else count.squeeze()
    options = absent, count, dims, across_ranks
    if student.is_cpu:
        z_student, z_teacher = (z_scores(x, *options) for x in (student, teacher))
    else:  # half of the launches
        z_student, z_teacher = z_scores(torch.stack([student, teacher]), *options)
    error = nnf.mse_loss(z_student, z_teacher.detach(), reduction="sum")
    return (sum_over_ranks(error) if gather else error) / (divisor / weight)


class DistillationLoss(LossModule):
    """Module of ``distillation_loss``.

    Examples:
        >>> import torch
        >>> from sparse_losses import DistillationLoss
        >>> DistillationLoss(temperature=1.0)(torch.eye(3), torch.eye(3))
        tensor(0.)
    """

    def __init__(
        self,
        *,
        temperature: float | Tensor = 3.0,
        alpha_kl: float = 0.7,
        alpha_mse: float = 0.3,
        standardize: Standardize = "batch",
        gather: bool = False,
    ) -> None:
        super().__init__(distillation_loss, locals())

    def forward(
        self,
        student_scores: Tensor,
        teacher_scores: Tensor,
        *,
        candidate_mask: Tensor | None = None,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather) | {"candidate_mask": candidate_mask}
        return distillation_loss(student_scores, teacher_scores, **options)
