"""Knowledge distillation of scores: softened KL plus z-score MSE."""

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import (
    check_choice,
    check_number,
    check_shapes,
    check_temperature,
    describe,
)
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses._core.token_ids import as_mask

__all__ = ["DistillationLoss", "distillation_loss"]


@full_precision
def distillation_loss(
    student_scores: Tensor,
    teacher_scores: Tensor,
    *,
    temperature: float | Tensor = 3.0,
    alpha_kl: float = 0.7,
    alpha_mse: float = 0.3,
    standardize: str = "batch",
    candidate_mask: Tensor | None = None,
) -> Tensor:
    r"""Brings the student's scores of a candidate list to the teacher's.

    $$\ell = \alpha_{kl} \, T^2 \, \frac{1}{B} \sum_{i=1}^{B}
    \mathrm{KL}\bigl(\mathrm{softmax}(t_i / T) \,\Vert\, \mathrm{softmax}(s_i / T)\bigr)
    + \alpha_{mse} \, \mathrm{MSE}\bigl(z(s), z(t)\bigr)
    \qquad z(s) = \frac{s - \bar s}{\mathrm{std}(s) + 10^{-8}}$$

    $s_i$, $t_i$ are the student's and the teacher's scores of the candidates of row $i$, $T$ the
    temperature; $T^2$ keeps the gradient's size. $z$ runs over the whole matrix or each row, with
    the unbiased standard deviation. Scores that are all equal have $z = 0$ and no gradient from the
    MSE.

    Cosines at $T = 3$ are flat: the KL is about 0.01 whatever the student does. Bring both sides to
    the scale of the contrastive loss first (cosines over its temperature).

    Args:
        student_scores: ``[B, C]`` floating.
        teacher_scores: ``[B, C]``; detached. ``-inf``: not a candidate.
        temperature: ``T``, finite and > 0; a 0-d tensor or ``nn.Parameter`` is learned.
        alpha_kl: weight of the KL, >= 0.
        alpha_mse: weight of the MSE, >= 0.
        standardize: ``"batch"``, one mean and deviation for the matrix, or ``"row"``, which needs
            three candidates, as two always stand at +-0.7071: rows with fewer have $z = 0$.
        candidate_mask: ``[B, C]`` bool, int or float 0/1; the KL, $z$ and the MSE run over these.

    Returns:
        0-d, fp32 (fp64 for fp64 inputs), >= 0: KL and MSE divide by different counts (rows with
        candidates; candidates), hence no ``reduction``. 0 if there is no candidate.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, a single candidate a row, or fewer
            than three with ``standardize="row"``.
        TypeError: for wrong dtypes.

    Example:
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
    size = check_shapes(
        student_scores=(student_scores, "B C"),
        teacher_scores=(teacher_scores, "B C"),
        candidate_mask=(candidate_mask, "B C", "optional"),
    )
    _check(temperature, alpha_kl, alpha_mse, standardize)
    fewest = 3 if standardize == "row" else 2
    if size["C"] < fewest:
        raise ValueError(
            f"expected at least {fewest} candidates a row for standardize={standardize!r}, "
            f"got C = {size['C']}"
        )
    dtype = compute_dtype(student_scores=student_scores, teacher_scores=teacher_scores)
    student, teacher = student_scores.to(dtype), teacher_scores.detach().to(dtype)
    if size["B"] == 0:
        return student.sum()  # 0, and part of the graph
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype)
    candidate = teacher != -torch.inf
    if candidate_mask is not None:
        candidate = candidate & as_mask("candidate_mask", candidate_mask)

    student = torch.where(candidate, student, 0.0)
    teacher = torch.where(candidate, teacher, 0.0)

    log_student = _masked_log_softmax(student / temperature, candidate)
    log_teacher = _masked_log_softmax(teacher / temperature, candidate)
    kl = _divergence(log_teacher, log_student).sum() / candidate.any(-1).sum().clamp(min=1)

    dims = (-2, -1) if standardize == "batch" else (-1,)
    difference = _z_scores(student, candidate, dims) - _z_scores(teacher, candidate, dims)
    mse = difference.square().sum() / candidate.sum().clamp(min=1)
    return alpha_kl * temperature**2 * kl + alpha_mse * mse


def _masked_log_softmax(scores: Tensor, candidate: Tensor) -> Tensor:
    """Log-softmax over the candidates, 0 elsewhere."""
    # Not -inf: a row without candidates would be NaN.
    lowest = torch.finfo(scores.dtype).min
    log_probability = torch.where(candidate, scores, lowest).log_softmax(-1)
    return torch.where(candidate, log_probability, 0.0)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Terms of the KL divergence: ``p log(p / q) - p + q``, each >= 0; ``q - p`` sums to 0.

    At a high temperature both distributions are nearly uniform, and ``p log(p / q)`` alone cancels
    until nothing but rounding, of either sign, is left for T^2 to multiply.
    """
    ratio = log_p - log_q
    is_small = ratio.abs() < 1
    small = torch.where(is_small, ratio, 0.0)
    p, q = log_p.exp(), log_q.exp()
    return torch.where(is_small, p * (small + torch.expm1(-small)), p * ratio + q - p)


def _z_scores(scores: Tensor, candidate: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Candidates' scores minus their mean over their unbiased standard deviation; 0 elsewhere.

    Scores are 0 where there is no candidate.
    """
    count = candidate.sum(dims, keepdim=True)
    with torch.no_grad():
        low = torch.where(candidate, scores, torch.inf).amin(dims, keepdim=True)
        high = torch.where(candidate, scores, -torch.inf).amax(dims, keepdim=True)
        # A row of two always stands at +-0.7071 and says nothing.
        constant = (low >= high) | ((count < 3) if len(dims) == 1 else (count < 2))
        # Scaled by the range, squares neither overflow nor underflow (infinite slope of the root).
        spread = torch.where(constant, 1.0, high - low)
    kept = candidate & ~constant
    mean = scores.sum(dims, keepdim=True) / count.clamp(min=1)
    centred = torch.where(kept, scores - mean, 0.0)
    variance = (centred / spread).square().sum(dims, keepdim=True) / (count - 1).clamp(min=1)
    deviation = spread * torch.where(constant, 1.0, variance).sqrt()
    return centred / (deviation + 1e-8)


def _check(
    temperature: float | Tensor, alpha_kl: float, alpha_mse: float, standardize: str
) -> None:
    check_temperature(temperature)
    check_number("alpha_kl", alpha_kl, minimum=0.0)
    check_number("alpha_mse", alpha_mse, minimum=0.0)
    check_choice("standardize", standardize, ("batch", "row"))


class DistillationLoss(nn.Module):
    """Module of :func:`~sparse_losses.functional.distillation_loss`.

    Example:
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
        standardize: str = "batch",
    ) -> None:
        super().__init__()
        _check(temperature, alpha_kl, alpha_mse, standardize)
        self.temperature = temperature
        self.alpha_kl = alpha_kl
        self.alpha_mse = alpha_mse
        self.standardize = standardize

    def forward(
        self,
        student_scores: Tensor,
        teacher_scores: Tensor,
        *,
        candidate_mask: Tensor | None = None,
    ) -> Tensor:
        """The loss; tensors as in the function."""
        return distillation_loss(
            student_scores,
            teacher_scores,
            temperature=self.temperature,
            alpha_kl=self.alpha_kl,
            alpha_mse=self.alpha_mse,
            standardize=self.standardize,
            candidate_mask=candidate_mask,
        )

    def extra_repr(self) -> str:
        """The hyperparameters."""
        return describe(self, "temperature", "alpha_kl", "alpha_mse", "standardize")
