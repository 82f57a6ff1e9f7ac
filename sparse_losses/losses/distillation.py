"""Knowledge distillation of scores: softened KL plus z-score MSE."""

import math
from collections.abc import Set
from typing import Any, Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.checks import values_can_be_checked
from sparse_losses._core.implementations import is_exported
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.own_gradient import Gradients, can_bring_its_gradient, with_own_gradient
from sparse_losses._core.private_torch import log_softmax_backward
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
    is_not_there = teacher_scores == -torch.inf
    if not values_can_be_checked(teacher_scores) or is_not_there.any():
        absent = is_not_there if absent is None else absent | is_not_there
    arguments: dict[str, Any] = {
        "student_scores": student_scores,
        "teacher_scores": teacher_scores,
        "absent": absent,
        "options": (alpha_kl, alpha_mse, temperature, standardize == "row", gather),
    }
    is_eager = can_bring_its_gradient(student_scores, teacher_scores) and not is_exported()
    if is_eager and not gather and not isinstance(temperature, Tensor):
        return with_own_gradient(_definition, _value_and_gradient, arguments)
    return _definition(**arguments)


def _definition(**arguments: Any) -> Tensor:
    return _value_and_gradient(frozenset(), **arguments)[0]


def _value_and_gradient(
    needs: Set[str],
    student_scores: Tensor,
    teacher_scores: Tensor,
    absent: Tensor | None,
    options: tuple[float, float, float | Tensor, bool, bool],
) -> tuple[Tensor, Gradients]:
    alpha_kl, alpha_mse, temperature, by_row, gather = options
    scores, parts = torch.stack([student_scores, teacher_scores]), []  # half of the launches
    if alpha_kl > 0:
        parts.append(_kl(scores, absent, alpha_kl, temperature, gather, bool(needs)))
    if alpha_mse > 0:
        parts.append(_mse(scores, absent, alpha_mse, by_row, gather, bool(needs)))
    value, gradient = parts[0]
    if len(parts) == 2:
        value = value + parts[1][0]
        gradient = gradient.add_(parts[1][1]) if needs else gradient
    return value, {"student_scores": gradient}


def _kl(
    scores: Tensor,
    absent: Tensor | None,
    weight: float,
    temperature: float | Tensor,
    gather: bool,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``weight * T^2`` times the mean KL of the rows that have candidates."""
    limits = torch.finfo(scores.dtype)
    if isinstance(temperature, Tensor):  # its gradient multiplies by the scores: 0 * inf is NaN
        scores = _fill(scores, absent, 0.0)
    log_q, log_p = _fill(scores / temperature, absent, limits.min).log_softmax(-1).unbind()
    # p is at least the smallest normal number, so that q / p does not overflow.
    log_p = log_p.clamp(min=math.log(limits.tiny))
    x = _fill(log_q - log_p, absent, 0.0)
    # The sum of p log(p / q) - p + q, where q - p sums to 0: it keeps its digits, as its gradient
    # does, where p and q are nearly equal and where one entry has nearly all of the probability.
    p, excess = log_p.exp(), x.expm1()
    divergence = (excess - x).flatten()
    rows = x.new_full((), len(x)) if absent is None else (~absent.all(-1)).sum(dtype=x.dtype)
    rows = (sum_over_ranks(rows) if gather else rows).clamp(min=1)
    # Beyond this limit both distributions are equal, and T^2 is infinite: 0 * inf is NaN.
    most = limits.max**0.5 / 2
    if isinstance(temperature, Tensor):
        temperature = temperature.clamp(max=most)
        p = p * temperature * weight / rows
    else:
        temperature = min(temperature, most)
        is_traced = torch.compiler.is_compiling()  # PyTorch 2.6 compiles a product of numbers anew
        p = p * temperature * weight / rows if is_traced else p / (rows / (weight * temperature))
    value = p.flatten().dot(divergence) * temperature
    value = sum_over_ranks(value) if gather else value
    return value, log_softmax_backward(excess.mul_(p), log_q) if needs_gradient else value


def _mse(
    scores: Tensor,
    absent: Tensor | None,
    weight: float,
    by_row: bool,
    gather: bool,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``weight`` times the mean squared difference of the z-scores."""
    dims = (-1,) if by_row else (-2, -1)
    across_ranks = gather and not by_row  # one matrix of all ranks' rows
    if absent is None:
        size = scores.shape[2] if by_row else scores[0].numel()
        count = scores.new_full((scores.shape[1], 1) if by_row else (1, 1), size)
    else:
        count = (~absent).sum(dims, keepdim=True, dtype=scores.dtype)
        if by_row:  # the z of a row of two are always +-0.7071: they say nothing
            absent = absent | (count < 2.5)
    divisor = count.sum() if by_row else count.squeeze()
    divisor = (sum_over_ranks(divisor) if gather else divisor).clamp(min=1) / weight
    # Fewer than two candidates have z = 0 and need no division by 0.
    count = (sum_over_ranks(count) if across_ranks else count).clamp(min=1.5)

    # z does not depend on shift and scale, so the gradient treats them as constants. A lowest score
    # of 0 makes equal scores exactly 0; a range of 1 keeps their squares from under- and overflow.
    lowest = _fill(scores.detach(), absent, torch.inf).amin(dims, keepdim=True)
    lowest = -maximum_over_ranks(-lowest) if across_ranks else lowest
    # The range of halves does not overflow.
    x = _fill(torch.add(lowest * -0.5, scores, alpha=0.5), absent, 0.0)
    largest = x.detach().amax(dims, keepdim=True)
    largest = maximum_over_ranks(largest) if across_ranks else largest
    scale = largest.clamp(min=1e-30)
    x = x / scale
    sums = x.sum(dims, keepdim=True)
    centred = _fill(x - (sum_over_ranks(sums) if across_ranks else sums) / count, absent, 0.0)
    norm = torch.linalg.vector_norm(centred, dim=dims, keepdim=True)
    if across_ranks:  # a range of 1 makes the sum at least 1/2; without it there is no gradient
        norm = sum_over_ranks(norm.square()).clamp(min=0.25).sqrt()
    # Equal scores are divided by infinity, so that they have no gradient either.
    root = (count - 1).sqrt()
    spread = torch.addcdiv(norm, root, largest, value=0.5e-8) / root
    z, target = (centred / spread).unbind()
    error = nnf.mse_loss(z, target.detach(), reduction="sum")
    value = (sum_over_ranks(error) if gather else error) / divisor
    if not needs_gradient:
        return value, z
    # What is along z changes nothing, nor does a shift.
    slope = z - target
    along = (slope * z).sum(dims, keepdim=True)
    along = along / (norm[0] / spread[0] * root).clamp(min=torch.finfo(z.dtype).tiny)
    slope = slope.addcmul_(along, z, value=-1.0)
    slope = _fill(slope - slope.sum(dims, keepdim=True) / count, absent, 0.0)
    return value, slope.div_(spread[0] * divisor).div_(scale[0])


def _fill(x: Tensor, mask: Tensor | None, value: float) -> Tensor:
    """Return ``x`` with ``value`` where a mask is set, if there is one."""
    return x if mask is None else x.masked_fill(mask, value)


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
        options = self.hyperparameters(gather=gather, candidate_mask=candidate_mask)
        return distillation_loss(student_scores, teacher_scores, **options)
