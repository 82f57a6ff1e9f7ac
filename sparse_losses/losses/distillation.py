"""Knowledge distillation of scores: softened KL plus z-score MSE."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from sparse_losses._core.checks import values_can_be_checked
from sparse_losses._core.implementations import Arguments, Implementation, always
from sparse_losses._core.loss import LossModule, loss
from sparse_losses.distributed import maximum_over_ranks, sum_over_ranks
from sparse_losses.fast.distillation import direct_distillation

__all__ = ["DistillationLoss", "distillation_loss"]

Standardize = Literal["batch", "row"]
Impl = Literal["auto", "definition", "direct"]


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
    impl: Impl = "auto",
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
        impl: ``"definition"`` evaluates the formula operation by operation; ``"direct"`` computes
            value and gradient together (``temperature`` is a number, no ``gather``); ``"auto"``
            selects direct where it is supported.

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
    absent = None
    if candidate_mask is not None:
        absent = ~candidate_mask | (teacher_scores == -torch.inf)
    elif not values_can_be_checked(teacher_scores) or teacher_scores.amin() == -torch.inf:
        absent = teacher_scores == -torch.inf
    tensors = (student_scores, teacher_scores, absent, temperature)
    options = {"alpha_kl": alpha_kl, "alpha_mse": alpha_mse, "by_row": by_row, "gather": gather}
    return _definition(*tensors, **options)


def _definition(
    student: Tensor,
    teacher: Tensor,
    absent: Tensor | None,
    temperature: float | Tensor,
    *,
    alpha_kl: float,
    alpha_mse: float,
    by_row: bool,
    gather: bool,
) -> Tensor:
    candidate = torch.ones_like(student, dtype=torch.bool) if absent is None else ~absent
    student, teacher = (torch.where(candidate, x, 0.0) for x in (student, teacher))
    # On a CPU, a product with 0 and 1 takes a fraction of the time of `where`. `far_below` excludes
    # entries that are not candidates; -inf would make a row without candidates NaN.
    member = candidate.to(student.dtype)
    far_below = (1 - member) * torch.finfo(student.dtype).min
    over_ranks = sum_over_ranks if gather else _unchanged

    value = student.new_zeros(())
    if alpha_kl > 0:
        log_q, log_p = ((x / temperature + far_below).log_softmax(-1) for x in (student, teacher))
        rows = over_ranks(candidate.any(-1).sum()).clamp(min=1)
        kl = over_ranks(_divergence(log_p, log_q, candidate).sum()) / rows
        # Beyond this limit both distributions are equal, and T^2 is infinite: 0 * inf is NaN.
        most = torch.finfo(kl.dtype).max ** 0.5 / 2
        squared = (kl.new_ones(()) * temperature).clamp(max=most).square()
        value = value + alpha_kl * (squared * kl)
    if alpha_mse > 0:
        z_student, z_teacher = _z_scores((student, teacher), member, far_below, by_row, gather)
        mse = over_ranks((z_student - z_teacher).square().sum())
        mse = mse / over_ranks(candidate.sum()).clamp(min=1)
        value = value + alpha_mse * mse
    return value


def _unchanged(x: Tensor) -> Tensor:
    return x


def _divergence(log_p: Tensor, log_q: Tensor, candidate: Tensor) -> Tensor:
    """Return ``p log(p / q) - p + q``, each >= 0, as ``p (expm1(x) - x)`` with ``x = log(q / p)``.

    ``q - p`` sums to 0. At a high temperature both distributions are nearly uniform, and the terms
    ``p log(p / q)`` alone cancel to rounding errors, which T^2 multiplies.
    """
    # p is at least the smallest normal number, so that q / p does not overflow.
    log_p = log_p.clamp(min=math.log(torch.finfo(log_p.dtype).tiny))
    x = torch.where(candidate, log_q - log_p, 0.0)
    return log_p.exp() * (torch.expm1(x) - x)


def _z_scores(
    both: Sequence[Tensor], member: Tensor, far_below: Tensor, by_row: bool, gather: bool
) -> list[Tensor]:
    """Return the z-scores of the candidates; elsewhere scores and ``member`` are 0, and z is 0."""
    dims = (-1,) if by_row else (-2, -1)
    of_matrix = gather and not by_row  # one matrix of the rows of all ranks
    over_ranks = sum_over_ranks if of_matrix else _unchanged
    largest_of_ranks = maximum_over_ranks if of_matrix else _unchanged
    count = over_ranks(member.sum(dims, keepdim=True))
    some, size = count.clamp(min=1), member.numel()  # divided by the size, no sum overflows
    scaled, found = [], []
    for scores in both:  # in two loops, so that compiled code computes both sides in one pass
        half = scores.detach() * 0.5  # the range of halves does not overflow
        highest = largest_of_ranks((half + far_below).amax(dims, keepdim=True))
        lowest = -largest_of_ranks((far_below - half).amax(dims, keepdim=True))
        rough_mean = over_ranks((half * (1 / size)).sum(dims, keepdim=True)) * (size / some)
        # Equal scores carry no information, nor does a row of two, whose z are always +-0.7071.
        says_nothing = (highest <= lowest) | (count < (3 if by_row else 2))
        # z does not depend on shift and scale, so the gradient treats them as constants.
        scale = torch.where(says_nothing, 0.0, 1 / (highest - lowest).clamp(min=1e-30))
        scaled.append(((scores * 0.5 - rough_mean) * member * scale, 0.5e-8 * scale))
    for x, least in scaled:
        mean = over_ranks(x.sum(dims, keepdim=True)) / some
        squares = over_ranks(x.square().sum(dims, keepdim=True)) - mean.square() * count
        # A range of 1 makes them at least 1/2, but for rounding.
        deviation = (squares.clamp(min=0.25) / (count - 1).clamp(min=1)).sqrt()
        found.append((x - mean) * member * (deviation + least).reciprocal())
    return found


def _why_not_direct(arguments: Arguments, options: Arguments) -> str | None:
    if options["gather"]:
        return "gather=False"
    return "a number as `temperature`" if isinstance(arguments[3], Tensor) else None


IMPLEMENTATIONS = (
    Implementation(
        "direct",
        unsupported_reason=_why_not_direct,
        is_preferred=always,
        compute=direct_distillation,
    ),
)


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
        impl: Impl = "auto",
    ) -> None:
        super().__init__(
            distillation_loss,
            temperature=temperature,
            alpha_kl=alpha_kl,
            alpha_mse=alpha_mse,
            standardize=standardize,
            gather=gather,
            impl=impl,
        )

    def forward(
        self,
        student_scores: Tensor,
        teacher_scores: Tensor,
        *,
        candidate_mask: Tensor | None = None,
        gather: bool | None = None,
        impl: Impl | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather, impl=impl)
        return distillation_loss(
            student_scores, teacher_scores, candidate_mask=candidate_mask, **options
        )
