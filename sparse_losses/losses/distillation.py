"""Knowledge distillation of scores: softened KL plus z-score MSE."""

import math
from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.checks import values_can_be_checked
from sparse_losses._core.loss import LossModule, loss
from sparse_losses.distributed import maximum_over_ranks, sum_over_ranks

Standardize = Literal["batch", "row"]


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
    + \alpha_{mse} \, \mathrm{MSE}\bigl(z(s), z(t)\bigr)$$

    $$z(s) = \frac{s - \bar s}{\mathrm{std}(s) + 10^{-8}}$$

    $s_i$, $t_i$ are the student's and the teacher's scores of the candidates of row $i$, $T$ is the
    temperature; $T^2$ preserves the size of the gradient. $z$ uses mean and unbiased standard
    deviation of the matrix or of each row. Equal scores have $z = 0$ and no gradient from the MSE.

    Cosines at $T = 3$ give a weak signal: with 32 candidates uniform in [0, 1], the KL times $T^2$
    is 0.08 for a random student. Divide cosines by the temperature of the contrastive loss first.

    Args:
        student_scores: ``[B, C]`` floating.
        teacher_scores: ``[B, C]``; detached. ``-inf`` marks an entry that is not a candidate.
        temperature: ``T``, finite and > 0; a 0-d tensor or ``nn.Parameter`` is learned.
        alpha_kl: weight of the KL, >= 0; at 0 the KL is not computed.
        alpha_mse: weight of the MSE, >= 0; at 0 the MSE is not computed.
        standardize: ``"batch"`` for one mean and deviation of the matrix, or ``"row"``. Rows with
            fewer than three candidates then have $z = 0$: two always have z-scores of +-0.7071.
        candidate_mask: ``[B, C]`` bool, int or float 0/1; marks the entries that count.
        gather: whether all statistics are over all ranks' rows (``sparse_losses.distributed``).

    Returns:
        0-d, fp32 (fp64 for fp64 inputs), >= 0; 0 without candidates. The KL is divided by the
        number of rows with candidates, the MSE by that of candidates: there is no ``reduction``.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, or fewer than two candidates per
            row (three with ``standardize="row"``).
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import distillation_loss
        >>> teacher = torch.tensor([[9.0, 5.0, 1.0]])
        >>> distillation_loss(teacher, teacher)
        tensor(0.)
        >>> distillation_loss(teacher.flip(1), teacher)
        tensor(12.5267)

    References:
        Distilling the Knowledge in a Neural Network, section 2. Logit Standardization in Knowledge
        Distillation (the z-scores). The combination comes from the notes of a Korean neural sparse
        retriever (its version V26).
    """
    by_row = standardize == "row"
    fewest = 3 if by_row else 2
    if student_scores.shape[1] < fewest:
        raise ValueError(
            f"expected at least {fewest} candidates per row for standardize={standardize!r}, "
            f"got C = {student_scores.shape[1]}"
        )
    if len(student_scores) == 0 or not (alpha_kl > 0 or alpha_mse > 0):
        return student_scores[:0].sum()  # 0 and part of the graph
    candidate = None  # all are
    if candidate_mask is not None:
        candidate = candidate_mask & (teacher_scores != -torch.inf)
    elif not values_can_be_checked(teacher_scores) or teacher_scores.amin() == -torch.inf:
        candidate = teacher_scores != -torch.inf

    absent = None if candidate is None else ~candidate
    scores = student_scores, teacher_scores, candidate, absent
    if not alpha_mse > 0:
        return _softened_kl(alpha_kl, *scores, temperature, gather)
    mse = _z_score_mse(alpha_mse, *scores, by_row, gather)
    return _softened_kl(alpha_kl, *scores, temperature, gather) + mse if alpha_kl > 0 else mse


def _softened_kl(
    weight: float,
    student: Tensor,
    teacher: Tensor,
    candidate: Tensor | None,
    absent: Tensor | None,
    temperature: float | Tensor,
    gather: bool,
) -> Tensor:
    """Return ``weight * T^2`` times the mean KL of the rows that have candidates."""
    limits = torch.finfo(student.dtype)
    if absent is not None and isinstance(temperature, Tensor):
        # Its gradient multiplies by the scores: 0 * inf is NaN.
        student, teacher = student.masked_fill(absent, 0.0), teacher.masked_fill(absent, 0.0)
    s, t = student / temperature, teacher / temperature
    if absent is not None:
        s, t = s.masked_fill(absent, limits.min), t.masked_fill(absent, limits.min)
    log_q = s.log_softmax(-1)
    # p is at least the smallest normal number, so that q / p does not overflow.
    log_p = t.log_softmax(-1).clamp(min=math.log(limits.tiny))
    x = log_q - log_p
    if absent is not None:
        x = x.masked_fill(absent, 0.0)
    # The sum of p log(p / q) - p + q, where q - p sums to 0: in this form the gradient keeps its
    # digits where p and q are nearly equal and where one entry has nearly all of the probability.
    kl = (log_p.exp() * (x.expm1() - x)).sum()

    rows = (
        kl.new_full((), len(student))
        if candidate is None
        else candidate.any(-1).sum(dtype=kl.dtype)
    )
    if gather:
        kl, rows = sum_over_ranks(kl), sum_over_ranks(rows)
    # Beyond this limit both distributions are equal, and T^2 is infinite: 0 * inf is NaN.
    most = limits.max**0.5 / 2
    rows = rows.clamp(min=1)
    if isinstance(temperature, Tensor):  # a quotient by its square would have a gradient of 1 / T^4
        temperature = temperature.clamp(max=most)
        return kl * temperature * temperature * weight / rows
    temperature = min(temperature, most)
    if torch.compiler.is_compiling():  # PyTorch 2.6 would compile every weight anew
        return kl * weight / (rows / (temperature * temperature))
    return kl / (rows / (weight * temperature * temperature))


def _z_score_mse(
    weight: float,
    student: Tensor,
    teacher: Tensor,
    candidate: Tensor | None,
    absent: Tensor | None,
    by_row: bool,
    gather: bool,
) -> Tensor:
    """Return ``weight`` times the mean squared difference of the candidates' z-scores."""
    dims = (-1,) if by_row else (-2, -1)
    across_ranks = gather and not by_row  # one matrix of all ranks' rows
    if candidate is None:
        size = student.shape[1] if by_row else student.numel()
        count = student.new_full((1, 1), size).expand(len(student) if by_row else 1, 1)
    else:
        count = candidate.sum(dims, keepdim=True, dtype=student.dtype)
    count = sum_over_ranks(count) if across_ranks else count
    if by_row:
        divisor = sum_over_ranks(count.sum()) if gather else count.sum()
        if absent is not None:  # the z of a row of two are always +-0.7071: they say nothing
            absent = absent | (count < 2.5)
    # Fewer than two candidates have z = 0 and need no division by 0.
    count = count.clamp(min=1.5)
    divisor = divisor.clamp(min=1.0) if by_row else count.squeeze()

    if torch.compiler.is_compiling():  # absent is not None, as no value can be read
        z_student, z_teacher = _compiled_z_scores(
            (student, teacher), absent, count, dims, across_ranks
        )
    elif student.is_cpu:
        z_student, z_teacher = (
            _z_scores(scores, absent, count, dims, across_ranks) for scores in (student, teacher)
        )
    else:  # half of the launches, but the teacher's side is also part of the backward pass
        both = _z_scores(torch.stack([student, teacher]), absent, count, dims, across_ranks)
        z_student, z_teacher = both[0], both[1].detach()
    error = nnf.mse_loss(z_student, z_teacher, reduction="sum")
    if gather:
        error = sum_over_ranks(error)
    return error / (divisor / weight)


def _z_scores(
    scores: Tensor, absent: Tensor | None, count: Tensor, dims: tuple[int, ...], across_ranks: bool
) -> Tensor:
    """Return the z-scores of the candidates; 0 elsewhere and where all candidates are equal."""
    # z does not depend on shift and scale, so the gradient treats them as constants. A lowest score
    # of 0 makes equal scores exactly 0; a range of 1 keeps their squares from under- and overflow.
    lowest = scores.detach() if absent is None else scores.detach().masked_fill(absent, torch.inf)
    lowest = lowest.amin(dims, keepdim=True)
    lowest = -maximum_over_ranks(-lowest) if across_ranks else lowest
    x = torch.add(lowest * -0.5, scores, alpha=0.5)  # the range of halves does not overflow
    if absent is not None:
        x = x.masked_fill(absent, 0.0)
    largest = x.detach().amax(dims, keepdim=True)
    largest = maximum_over_ranks(largest) if across_ranks else largest
    x = x / largest.clamp(min=1e-30)

    sums = x.sum(dims, keepdim=True)
    centred = x - (sum_over_ranks(sums) if across_ranks else sums) / count
    if absent is not None:
        centred = centred.masked_fill(absent, 0.0)
    norm = torch.linalg.vector_norm(centred, dim=dims, keepdim=True)
    if across_ranks:  # a range of 1 makes the sum at least 1/2; without it there is no gradient
        norm = sum_over_ranks(norm.square()).clamp(min=0.25).sqrt()
    # Equal scores are divided by infinity, so that they have no gradient either.
    root = (count - 1).sqrt()
    return centred / (torch.addcdiv(norm, root, largest, value=0.5e-8) / root)


def _compiled_z_scores(
    both: tuple[Tensor, Tensor],
    absent: Tensor | None,
    count: Tensor,
    dims: tuple[int, ...],
    across_ranks: bool,
) -> list[Tensor]:
    """Return the same in more operations, but fewer passes once a compiler has fused them.

    Masks are products with 0 and 1: on a CPU, compiled code reads stored booleans one by one.
    """
    sum_over = sum_over_ranks if across_ranks else _unchanged
    maximum_over = maximum_over_ranks if across_ranks else _unchanged
    absent = torch.zeros_like(both[1], dtype=torch.bool) if absent is None else absent
    member = (~absent).to(both[0].dtype)
    far_below = (member - 1) * torch.finfo(member.dtype).max
    size, scaled, outputs = member.numel(), [], []
    for scores in both:  # in two loops, so that both sides are computed in one pass
        x = torch.where(absent, 0.0, scores) * 0.5
        half = x.detach()
        highest = maximum_over((half + far_below).amax(dims, keepdim=True))
        lowest = -maximum_over((far_below - half).amax(dims, keepdim=True))
        # Near the mean squares do not cancel; divided by the size, no sum overflows.
        rough_mean = sum_over((half * (1 / size)).sum(dims, keepdim=True)) * (size / count)
        scale = (highest - lowest).clamp(min=1e-30).reciprocal()
        scale = torch.where(highest <= lowest, 0.0, scale)
        scaled.append(((x - rough_mean) * member * scale, scale))
    for x, scale in scaled:
        mean = sum_over(x.sum(dims, keepdim=True)) / count
        squares = sum_over(x.square().sum(dims, keepdim=True)) - mean.square() * count
        deviation = (squares.clamp(min=0.25) / (count - 1)).sqrt()  # at least 1/2, but for rounding
        outputs.append((x - mean) * member * (deviation + 0.5e-8 * scale).reciprocal())
    return outputs


def _unchanged(x: Tensor) -> Tensor:
    return x


class DistillationLoss(LossModule):
    """Module of ``distillation_loss``; see the function for formula and arguments.

    Examples:
        >>> import torch
        >>> from sparse_losses import DistillationLoss
        >>> loss = DistillationLoss(temperature=1.0, alpha_mse=0.0)
        >>> student = torch.zeros(2, 4, requires_grad=True)
        >>> loss(student, torch.randn(2, 4)).backward()
        >>> student.grad.shape
        torch.Size([2, 4])
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
        super().__init__(
            distillation_loss,
            temperature=temperature,
            alpha_kl=alpha_kl,
            alpha_mse=alpha_mse,
            standardize=standardize,
            gather=gather,
        )

    def forward(
        self,
        student_scores: Tensor,
        teacher_scores: Tensor,
        *,
        candidate_mask: Tensor | None = None,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather)
        return distillation_loss(
            student_scores, teacher_scores, candidate_mask=candidate_mask, **options
        )
