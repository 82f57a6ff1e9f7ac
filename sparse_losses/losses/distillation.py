"""Knowledge distillation of scores: softened KL plus z-score MSE."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import (
    check_choice,
    check_flag,
    check_learnable,
    check_number,
    check_shapes,
    describe,
    values_can_be_checked,
)
from sparse_losses._core.fused import can_fuse, fuse
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses._core.token_ids import as_mask
from sparse_losses.distributed import agree_across_ranks, maximum_over_ranks, sum_over_ranks
from sparse_losses.kernels import Impl, check_impl, uses_triton

__all__ = ["DistillationLoss", "distillation_loss"]

# Elements that the fused path works on at once, in all its matrices.
BLOCK_ELEMENTS = 1 << 22


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
    gather: bool = False,
    impl: Impl = "auto",
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
        gather: whether means and deviation are over the rows of all ranks, whose number is the same
            on each (see ``sparse_losses.distributed``); no scores are sent.
        impl: ``"torch"``, ``"triton"`` (a kernel for NVIDIA GPUs) or ``"auto"``, the kernel where
            it was measured to be ahead. It has no ``gather`` over several ranks.

    Returns:
        0-d, fp32 (fp64 for fp64 inputs), >= 0: KL and MSE divide by different counts (rows with
        candidates; candidates), hence no ``reduction``. 0 if there is no candidate.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, a single candidate a row, or fewer
            than three with ``standardize="row"``.
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
    size = check_shapes(
        student_scores=(student_scores, "B C"),
        teacher_scores=(teacher_scores, "B C"),
        candidate_mask=(candidate_mask, "B C, optional"),
    )
    _check(temperature, alpha_kl, alpha_mse, standardize, impl)
    # Before a size is refused, ranks agree on it: none shall wait for one that has left.
    sizes = {"B": size["B"], "C": size["C"]}
    gathers = agree_across_ranks(
        "distillation_loss", gather, student_scores, teacher_scores, **sizes
    )
    fewest = 3 if standardize == "row" else 2
    if size["C"] < fewest:
        raise ValueError(
            f"expected at least {fewest} candidates a row for standardize={standardize!r}, "
            f"got C = {size['C']}"
        )
    dtype = compute_dtype(student_scores=student_scores, teacher_scores=teacher_scores)
    if size["B"] == 0:
        return student_scores.to(dtype).sum()  # 0, and part of the graph
    if candidate_mask is not None:
        candidate_mask = as_mask("candidate_mask", candidate_mask)
    learned = temperature.to(dtype) if isinstance(temperature, Tensor) else None
    fixed = 1.0 if isinstance(temperature, Tensor) else temperature
    options = _Options(fixed, alpha_kl, alpha_mse, standardize, gathers)
    plain = functools.partial(_plain, options)
    given = (student_scores, teacher_scores.detach(), learned)
    needs = {
        "`gather=False`, or a single rank,": not gathers,
        "`alpha_kl` or `alpha_mse` above 0": max(alpha_kl, alpha_mse) > 0,
        "a `temperature` on the device of the scores": (
            learned is None or learned.device == student_scores.device
        ),
    }
    if uses_triton("distillation", impl, *given, elements=student_scores.numel(), needs=needs):
        from sparse_losses.kernels import distillation as kernels
        from sparse_losses.kernels._operators import scale_

        plain = functools.partial(plain, candidate_mask=candidate_mask)
        by_kernel = functools.partial(
            kernels.fused,
            candidate_mask=candidate_mask,
            number=fixed,
            alpha_kl=alpha_kl,
            alpha_mse=alpha_mse,
            by_row=standardize == "row",
        )
        return fuse(plain, by_kernel, *given, scale_=scale_)
    student, teacher = scores = student_scores.to(dtype), teacher_scores.detach().to(dtype)
    # Where looking at values costs nothing, matrices without gaps are worth knowing.
    is_plain = candidate_mask is not None or gathers or not can_fuse(*scores)
    if not is_plain and all(map(values_can_be_checked, scores)):
        with torch.no_grad():
            ranges = _ranges(*scores)
        if _are_moderate(ranges) and max(alpha_kl, alpha_mse) > 0:
            fused = functools.partial(_fused, options, ranges)
            return fuse(plain, fused, student, teacher, learned)
    return plain(student, teacher, learned, candidate_mask)


class _Options(NamedTuple):
    temperature: float  # unless it is learned
    alpha_kl: float
    alpha_mse: float
    standardize: str
    gather: bool


def _ranges(*matrices: Tensor) -> list[Tensor]:
    """The smallest and the largest score of every row ``[2, B, 1]``."""
    return [torch.stack([x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)]) for x in matrices]


def _are_moderate(ranges: list[Tensor]) -> bool:
    """Whether no entry is a NaN or no candidate, and no square overflows."""
    return all(bool(values.abs().amax() < 1e15) for values in ranges)


def _plain(
    options: _Options,
    student: Tensor,
    teacher: Tensor,
    temperature: Tensor | None,
    candidate_mask: Tensor | None = None,
) -> Tensor:
    """The formula, operation by operation."""
    dtype = compute_dtype(student_scores=student, teacher_scores=teacher)
    student, teacher = student.to(dtype), teacher.to(dtype)
    number, alpha_kl, alpha_mse, standardize, gather = options
    everywhere = sum_over_ranks if gather else _unchanged
    t = number if temperature is None else temperature
    candidate = teacher != -torch.inf
    if candidate_mask is not None:
        candidate = candidate & candidate_mask

    student = torch.where(candidate, student, 0.0)
    teacher = torch.where(candidate, teacher, 0.0)

    log_student = _masked_log_softmax(student / t, candidate)
    log_teacher = _masked_log_softmax(teacher / t, candidate)
    rows = everywhere(candidate.any(-1).sum()).clamp(min=1)
    kl = everywhere(_divergence(log_teacher, log_student).sum()) / rows

    z = [_z_scores(x, candidate, standardize == "row", gather) for x in (student, teacher)]
    squares = (z[0] - z[1]).square().sum()
    mse = everywhere(squares) / everywhere(candidate.sum()).clamp(min=1)
    return alpha_kl * t**2 * kl + alpha_mse * mse


def _fused(
    options: _Options,
    ranges: Sequence[Tensor],
    needs: Sequence[bool],
    student: Tensor,
    teacher: Tensor,
    temperature: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Value and gradients of ``_plain`` where every entry is a candidate, in blocks of rows."""
    number, alpha_kl, alpha_mse, standardize, _ = options
    t = student.new_tensor(number) if temperature is None else temperature
    value, d_temperature = student.new_zeros(()), student.new_zeros(())
    gradient = torch.empty_like(student, memory_format=torch.contiguous_format)
    if alpha_mse > 0:
        value = alpha_mse * _squared_error(
            student, teacher, ranges, standardize, gradient, alpha_mse if needs[0] else None
        )
    weight = alpha_kl * t / len(student)
    blocks = _blocks(student, 4) if alpha_kl > 0 else []
    # Made once: the system takes longer to hand out a matrix than an operation to fill it.
    made = 3 if alpha_mse == 0 else 4
    buffer = student.new_empty(made, len(student[blocks[0]]) if blocks else 0, student.shape[1])
    # No ratio of two probabilities overflows, and no probability vanishes.
    spread = torch.stack([(high - low).amax() for low, high in ranges]).sum()
    is_narrow = bool(spread < 40 * t)
    for rows in blocks:
        p, *logarithms, q = (*buffer[:, : len(student[rows])], gradient[rows])[:4]
        largest = [high[rows] / t for _, high in ranges]
        kl, by_log_t = _divergence_block(
            student[rows], teacher[rows], t, largest, is_narrow, needs[2], q, p, logarithms
        )
        value = value + weight * t * kl
        if by_log_t is not None:
            d_temperature = d_temperature + weight * (2 * kl - by_log_t)
        if needs[0]:
            by_student = q.sub_(p).mul_(weight)
            if alpha_mse > 0:
                gradient[rows].add_(by_student)
    return value, [gradient if needs[0] else None, None, d_temperature if needs[2] else None]


def _blocks(scores: Tensor, matrices: int) -> list[slice]:
    """Rows at once, where so many matrices of them are held."""
    size = max(1, BLOCK_ELEMENTS // (matrices * scores.shape[1]))
    return [slice(start, start + size) for start in range(0, len(scores), size)]


def _divergence_block(
    student: Tensor,
    teacher: Tensor,
    t: Tensor,
    largest: Sequence[Tensor],
    is_narrow: bool,
    learned: bool,
    q: Tensor,
    p: Tensor,
    logarithms: Sequence[Tensor],
) -> tuple[Tensor, Tensor | None]:
    """KL of some rows, and its derivative by ``-log t`` if that is learned; fills ``q``, ``p``.

    ``largest`` is the largest softened score of each row, of the student and of the teacher.
    """
    log_q, log_p = logarithms
    torch.softmax(torch.div(student, t, out=log_q), -1, out=q)
    torch.softmax(torch.div(teacher, t, out=log_p), -1, out=p)
    # The largest probability is 1 over the sum of exponentials: a log-softmax made of it is half
    # as much work as another pass of exponentials.
    sum_q, sum_p = (
        high - probability.amax(-1, keepdim=True).log()
        for high, probability in zip(largest, (q, p), strict=True)
    )
    # As in `_divergence`: with x = log(q / p), the term is p (expm1(x) - x).
    x = log_q.sub_(log_p).sub_(sum_q - sum_p)
    if is_narrow and not learned:
        return torch.dot(torch.expm1(x, out=log_p).sub_(x).flatten(), p.flatten()), None
    # Where q is more than e times p, `p expm1(1)` lacks the rest of `q - p`; `where` is slow.
    if learned:
        log_p.sub_(sum_p)
        gap = p * torch.clamp(x, max=1.0).expm1_() + torch.sub(q, p, alpha=math.e).clamp_(min=0.0)
        by_log_t = (gap * x).sum()
        surprise = log_p - torch.linalg.vecdot(p, log_p).unsqueeze(-1)
    terms = torch.clamp(x, max=1.0, out=log_p).expm1_().sub_(x)
    terms = torch.sub(q, p, alpha=math.e, out=x).clamp_(min=0.0).addcmul_(p, terms)
    return terms.sum(), by_log_t + (surprise * terms).sum() if learned else None


def _squared_error(
    student: Tensor,
    teacher: Tensor,
    ranges: Sequence[Tensor],
    standardize: str,
    gradient: Tensor,
    weight: float | None,
) -> Tensor:
    """MSE of the z-scores; ``weight`` times its gradient, if any, goes to ``gradient``."""
    by_row = standardize == "row"
    dims = (-1,) if by_row else (-2, -1)
    count = student.shape[1] if by_row else student.numel()
    mean = [x.sum(dims, keepdim=True) / count for x in (student, teacher)]
    constant = torch.stack(
        [
            low >= high if by_row else (low.amin() >= high.amax()).expand(1, 1)
            for low, high in ranges
        ]
    )
    norm, residue = student.new_empty(2, 2, len(student), 1)
    product = student.new_empty(len(student), 1)
    blocks = _blocks(student, 2)
    buffer = torch.empty_like(student[blocks[0]])
    for rows in blocks:
        of = rows if by_row else slice(None)
        s = torch.sub(student[rows], mean[0][of], out=gradient[rows])
        t = torch.sub(teacher[rows], mean[1][of], out=buffer[: len(s)])
        for index, x in enumerate((s, t)):
            norm[index, rows] = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            if weight is not None:
                residue[index, rows] = x.sum(-1, keepdim=True)
        if weight is not None:
            product[rows] = t.mul_(s).sum(-1, keepdim=True)
    if not by_row:
        norm = torch.linalg.vector_norm(norm, dim=1, keepdim=True)
        product, residue = product.sum(0, keepdim=True), residue.sum(1, keepdim=True)
    deviation = norm / math.sqrt(count - 1)
    # Scores that are all equal have z = 0 and no gradient.
    to_z = torch.where(constant, 0.0, 1 / (deviation + 1e-8))
    if weight is not None:
        # What the difference has of z(s), the deviation takes out of the gradient.
        cosine = torch.where(norm[0] > 0, product / norm[0], 0.0)
        along = (to_z[0] * norm[0] - to_z[1] * cosine) / math.sqrt(count - 1)
        scale = to_z[0] * (2 * weight / student.numel())
        # The mean leaves the gradient too. That of z is 0 but for rounding, which is a lot of
        # scores far from 0.
        z_mean = to_z * residue / count
        level = z_mean[0] - z_mean[1] - along * z_mean[0]
    total = student.new_zeros(())
    for rows in blocks:
        of = rows if by_row else slice(None)
        z = gradient[rows].mul_(to_z[0][of])
        t = torch.sub(teacher[rows], mean[1][of], out=buffer[: len(z)])
        difference = t.mul_(-to_z[1][of]).add_(z)
        total = total + torch.linalg.vector_norm(difference, dim=-1).square().sum()
        if weight is not None:
            z.mul_(-along[of] * scale[of]).addcmul_(difference.sub_(level[of]), scale[of])
    return total / student.numel()


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


def _unchanged(x: Tensor) -> Tensor:
    return x


def _z_scores(scores: Tensor, candidate: Tensor, by_row: bool, gather: bool) -> Tensor:
    """Candidates' scores minus their mean over their unbiased standard deviation; 0 elsewhere.

    Scores are 0 where there is no candidate.
    """
    dims = (-1,) if by_row else (-2, -1)
    of_matrix = gather and not by_row  # all ranks' rows make one matrix
    everywhere = sum_over_ranks if of_matrix else _unchanged
    largest = maximum_over_ranks if of_matrix else _unchanged
    count = everywhere(candidate.sum(dims, keepdim=True))
    with torch.no_grad():
        low = -largest(torch.where(candidate, -scores, -torch.inf).amax(dims, keepdim=True))
        high = largest(torch.where(candidate, scores, -torch.inf).amax(dims, keepdim=True))
        # A row of two always stands at +-0.7071 and says nothing.
        constant = (low >= high) | (count < (3 if by_row else 2))
        # Scaled by the range, squares neither overflow nor underflow (infinite slope of the root).
        spread = torch.where(constant, 1.0, high - low)
    kept = candidate & ~constant
    mean = everywhere(scores.sum(dims, keepdim=True)) / count.clamp(min=1)
    centred = torch.where(kept, scores - mean, 0.0)
    squares = everywhere((centred / spread).square().sum(dims, keepdim=True))
    variance = squares / (count - 1).clamp(min=1)
    deviation = spread * torch.where(constant, 1.0, variance).sqrt()
    return centred / (deviation + 1e-8)


def _check(
    temperature: float | Tensor, alpha_kl: float, alpha_mse: float, standardize: str, impl: str
) -> None:
    check_learnable("temperature", temperature)
    check_impl(impl)
    check_number("alpha_kl", alpha_kl, minimum=0.0)
    check_number("alpha_mse", alpha_mse, minimum=0.0)
    check_choice("standardize", standardize, ("batch", "row"))


class DistillationLoss(nn.Module):
    """Module of ``distillation_loss``.

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
        standardize: str = "batch",
        gather: bool = False,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        _check(temperature, alpha_kl, alpha_mse, standardize, impl)
        check_flag(gather=gather)
        self.temperature = temperature
        self.alpha_kl = alpha_kl
        self.alpha_mse = alpha_mse
        self.standardize = standardize
        self.gather = gather
        self.impl = impl

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
            gather=self.gather,
            impl=self.impl,
        )

    def extra_repr(self) -> str:
        """The hyperparameters."""
        return describe(
            self, "temperature", "alpha_kl", "alpha_mse", "standardize", "gather", "impl"
        )
