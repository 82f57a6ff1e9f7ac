"""Knowledge distillation of scores: softened KL plus z-score MSE."""

import math
from typing import Literal

import torch
from torch import Tensor

from sparse_losses._core.checks import values_can_be_checked
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.ways import Arguments, Options, Way, always, compute
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
    r"""Matches the student's scores of a candidate list to the teacher's.

    $$\ell = \alpha_{kl} \, T^2 \, \frac{1}{B} \sum_{i=1}^{B}
    \mathrm{KL}\bigl(\mathrm{softmax}(t_i / T) \,\Vert\, \mathrm{softmax}(s_i / T)\bigr)
    + \alpha_{mse} \, \mathrm{MSE}\bigl(z(s), z(t)\bigr)$$

    $$z(s) = \frac{s - \bar s}{\mathrm{std}(s) + 10^{-8}}$$

    $s_i$, $t_i$ are the student's and the teacher's scores of the candidates of row $i$, $T$ the
    temperature; $T^2$ keeps the gradient's size. $z$ runs over the whole matrix or each row, with
    the unbiased standard deviation. Equal scores have $z = 0$ and no gradient from the MSE.

    Cosines at $T = 3$ give a weak signal: with 32 candidates uniform in [0, 1] the KL, with $T^2$,
    is 0.08 for a random student. Divide cosines by the temperature of the contrastive loss first.

    Args:
        student_scores: ``[B, C]`` floating.
        teacher_scores: ``[B, C]``; detached. ``-inf``: not a candidate.
        temperature: ``T``, finite and > 0; a 0-d tensor or ``nn.Parameter`` is learned.
        alpha_kl: weight of the KL, >= 0; at 0 the KL is not computed.
        alpha_mse: weight of the MSE, >= 0; at 0 the MSE is not computed.
        standardize: ``"batch"``, one mean and deviation for the matrix, or ``"row"``, which needs
            three candidates, as two always stand at +-0.7071: rows with fewer have $z = 0$.
        candidate_mask: ``[B, C]`` bool, int or float 0/1; the KL, $z$ and the MSE run over these.
        gather: means and deviation over the rows of all ranks (see ``sparse_losses.distributed``).
        impl: how the value is computed: ``"definition"``, the formula operation by operation,
            ``"direct"``, with a gradient of its own (a number as ``temperature``, no ``gather``),
            or ``"auto"``, the latter where it holds.

    Returns:
        0-d, fp32 (fp64 for fp64 inputs), >= 0: KL and MSE divide by different counts (rows with
        candidates; candidates), hence no ``reduction``. 0 if there is no candidate.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, or fewer than two candidates a
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
        Distillation (the z-scores). The mixture comes from the notes of a Korean neural sparse
        retriever (its version V26).
    """
    by_row = standardize == "row"
    fewest = 3 if by_row else 2
    if student_scores.shape[1] < fewest:
        raise ValueError(
            f"expected at least {fewest} candidates a row for standardize={standardize!r}, "
            f"got C = {student_scores.shape[1]}"
        )
    if len(student_scores) == 0 or not (alpha_kl > 0 or alpha_mse > 0):
        return student_scores[:0].sum()  # 0, and part of the graph
    absent = None
    if candidate_mask is not None:
        absent = ~candidate_mask | (teacher_scores == -torch.inf)
    elif not values_can_be_checked(teacher_scores) or teacher_scores.amin() == -torch.inf:
        absent = teacher_scores == -torch.inf
    tensors = (student_scores, teacher_scores, absent, temperature)
    options = {"alpha_kl": alpha_kl, "alpha_mse": alpha_mse, "by_row": by_row, "gather": gather}
    return compute(_definition, WAYS, impl, tensors, options)


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
    student = torch.where(candidate, student, 0.0)
    teacher = torch.where(candidate, teacher, 0.0)
    # Arithmetic by 0 and 1 takes a CPU a fraction of the time of `where`. Added to scores,
    # `far_below` takes all but candidates out; -inf would make a row without candidates NaN.
    member = candidate.to(student.dtype)
    far_below = (1 - member) * torch.finfo(student.dtype).min
    over_ranks = sum_over_ranks if gather else _unchanged

    value = student.new_zeros(())
    if alpha_kl > 0:
        log_q = (student / temperature + far_below).log_softmax(-1)
        log_p = (teacher / temperature + far_below).log_softmax(-1)
        rows = over_ranks(candidate.any(-1).sum()).clamp(min=1)
        kl = over_ranks(_divergence(log_p, log_q, candidate).sum()) / rows
        # In this order, PyTorch 2.6 compiles one graph for all weights.
        value = value + alpha_kl * (temperature**2 * kl)
    if alpha_mse > 0:
        z_student, z_teacher = (
            _z_scores(x / 2, member, far_below, by_row, gather) for x in (student, teacher)
        )
        mse = over_ranks((z_student - z_teacher).square().sum())
        mse = mse / over_ranks(candidate.sum()).clamp(min=1)
        value = value + alpha_mse * mse
    return value


def _unchanged(x: Tensor) -> Tensor:
    return x


def _divergence(log_p: Tensor, log_q: Tensor, candidate: Tensor) -> Tensor:
    """Terms of the KL divergence: ``p log(p / q) - p + q``, each >= 0; ``q - p`` sums to 0.

    At a high temperature both distributions are nearly uniform, and ``p log(p / q)`` alone cancels
    until nothing but rounding, of either sign, is left for T^2 to multiply. With ``x = log(q / p)``
    the term is ``p (expm1(x) - x)``.
    """
    # The least p is the smallest normal number: q / p does not overflow.
    log_p = log_p.clamp(min=math.log(torch.finfo(log_p.dtype).tiny))
    x = torch.where(candidate, log_q - log_p, 0.0)
    return log_p.exp() * (torch.expm1(x) - x)


def _z_scores(
    scores: Tensor, member: Tensor, far_below: Tensor, by_row: bool, gather: bool
) -> Tensor:
    """Candidates' scores minus their mean over their unbiased standard deviation; 0 elsewhere.

    Scores are halved: no range overflows. ``member`` is 1 for candidates; else both are 0.
    """
    dims = (-1,) if by_row else (-2, -1)
    of_matrix = gather and not by_row  # all ranks' rows make one matrix
    over_ranks = sum_over_ranks if of_matrix else _unchanged
    largest_of_ranks = maximum_over_ranks if of_matrix else _unchanged
    count = over_ranks(member.sum(dims, keepdim=True))
    # z sees neither shift nor scale, so both are constants to the gradient. With the largest score
    # exactly 0 and the range 1, squares neither overflow nor underflow.
    highest = largest_of_ranks((scores.detach() + far_below).amax(dims, keepdim=True))
    below = (scores - highest) * member
    spread = largest_of_ranks(-below.detach().amin(dims, keepdim=True))
    # Equal scores say nothing, nor does a row of two, which always stands at +-0.7071.
    says_nothing = (spread <= 0) | (count < (3 if by_row else 2))
    spread = torch.where(says_nothing, 1.0, spread)
    scaled = below / spread
    mean = over_ranks(scaled.sum(dims, keepdim=True)) / count.clamp(min=1)
    centred = (scaled - mean) * member
    variance = over_ranks(centred.square().sum(dims, keepdim=True)) / (count - 1).clamp(min=1)
    deviation = torch.where(says_nothing, torch.inf, variance).sqrt()  # by infinity, z is 0
    return centred / (deviation + 0.5e-8 / spread)


def _why_not_direct(arguments: Arguments, options: Options) -> str | None:
    if options["gather"]:
        return "gather=False"
    return "a number as `temperature`" if isinstance(arguments[3], Tensor) else None


WAYS = (Way("direct", why_not=_why_not_direct, pays=always, compute=direct_distillation),)


class DistillationLoss(LossModule):
    """Module of ``distillation_loss``, which holds formula and arguments.

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
        """The loss; tensors as in the function."""
        options = self.hyperparameters(gather=gather, impl=impl)
        return distillation_loss(
            student_scores, teacher_scores, candidate_mask=candidate_mask, **options
        )
