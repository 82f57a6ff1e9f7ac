"""Distillation with its gradient in closed form; student and teacher share one tensor."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_losses._core.precision import widest_dtype

__all__ = ["direct_distillation"]


def direct_distillation(
    needs: Sequence[bool],
    student: Tensor,
    teacher: Tensor,
    absent: Tensor | None,
    temperature: float,
    *,
    alpha_kl: float,
    alpha_mse: float,
    by_row: bool,
    gather: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss and its gradient with respect to the student's scores."""
    scores = torch.stack([student, teacher])
    if alpha_kl > 0:
        weight = alpha_kl * temperature
        kl, gradient, divisor = _divergence(scores / temperature, absent, weight)
        gradient.div_(divisor)
        if alpha_mse == 0:
            return (kl / divisor).mul_(temperature), [gradient, None, None, None]
    mse, change, inverse = _squared_difference(scores, absent, by_row)
    total = mse.mul_(alpha_mse)
    if alpha_kl == 0:
        return total, [change.mul_(alpha_mse * inverse), None, None, None]
    total.addcdiv_(kl, divisor, value=temperature)
    gradient.addcmul_(change, inverse, value=alpha_mse)
    return total, [gradient, None, None, None]


def _divergence(
    logits: Tensor, absent: Tensor | None, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the KL over rows, its gradient ``q - p``, and the number of rows / weight.

    With ``x = log(q / p)`` both use ``p expm1(x)``, which is accurate where the distributions are
    nearly equal. A row without candidates is uniform on both sides.
    """
    limits = torch.finfo(logits.dtype)
    if absent is not None:
        logits.masked_fill_(absent, limits.min)
    both = logits.log_softmax(-1)
    log_q, log_p = both
    # p is at least the smallest normal number, so that q / p does not overflow.
    log_p.clamp_(min=math.log(limits.tiny))
    x = log_q - log_p
    if absent is not None:
        x.masked_fill_(absent, 0.0)
    q, p = both.exp_()
    change = p * x.expm1()
    kl = torch.addcmul(change, p, x, value=-1).sum()
    # The changes sum to 0. If one entry has nearly all of the probability, its own change is a
    # rounding error, so it is replaced by minus the sum of the others.
    change.addcmul_(q, change.sum(-1, keepdim=True), value=-1)
    if absent is None:
        return kl, change, x.new_full((), x.shape[0] / weight)
    num_absent = absent.all(-1).sum(dtype=x.dtype)
    divisor = torch.rsub(num_absent, x.shape[0] / weight, alpha=1 / weight)
    return kl, change, divisor.clamp_(min=1 / weight)


def _squared_difference(
    scores: Tensor, absent: Tensor | None, by_row: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the MSE of the z-scores and two factors whose product is its gradient."""
    dims = (-1,) if by_row else (-2, -1)
    scores.mul_(0.5)  # else a range may be beyond the dtype; half a score has half the slope
    dtype, wide, scale = scores.dtype, widest_dtype(scores.device), None
    if dtype == wide or scores.device.type == "cpu":
        # With the largest score 0 and the range 1, equal scores are 0 and squares stay in range.
        # Sums in fp64 achieve the same in one launch, but on a CPU they copy the scores.
        wide = dtype
        if absent is not None:
            scores.masked_fill_(absent, torch.finfo(dtype).min)
        scores.sub_(scores.amax(dims, keepdim=True))
    if absent is not None:
        scores.masked_fill_(absent, 0.0)
    if dtype == wide:
        scale = scores.amin(dims, keepdim=True).neg_()
        scores.div_(scale.add_(scale == 0).clamp_(min=1e-30))
    size = scores.shape[-1] if by_row else scores[0].numel()
    if absent is None:
        num_absent = scores.new_zeros(1, 1)
    else:
        num_absent = absent.sum(dims, keepdim=True, dtype=dtype)
    # The offset avoids 0 / 0 in the deviation of a single score.
    count = (size - num_absent).clamp_(min=1 + 2 * torch.finfo(dtype).eps)
    freedom = count - 1

    mean = scores.sum(dims, keepdim=True, dtype=wide)
    centred = scores.sub_(torch.div(mean, count, out=mean.new_empty(mean.shape, dtype=dtype)))
    if absent is not None:
        centred.masked_fill_(absent, 0.0)
    norm = torch.linalg.vector_norm(centred, dim=dims, keepdim=True, dtype=wide)
    # Equal scores carry no information, nor does a row of two, whose z are always +-0.7071.
    says_something = norm > 0
    if by_row:
        says_something &= count > 2.5
    deviation = norm.new_empty(norm.shape, dtype=dtype)
    torch.mul(norm, freedom.rsqrt(), out=deviation).add_(1e-36)
    divisor = deviation + (0.5e-8 if scale is None else 0.5e-8 / scale)
    inverse = says_something / divisor
    z = centred.mul_(inverse)

    difference = z[0] - z[1]
    if by_row:
        count = (size - num_absent).expand(scores.shape[1], 1).sum().clamp_(min=1)
    share = difference / count
    mse = (difference * share).sum()
    # The gradient of the student's deviation is parallel to its z-scores.
    along = (share * z[0]).sum(dims, keepdim=True) * (divisor[0] / deviation[0] / freedom)
    inverse = inverse[0] if scale is None else inverse[0] / scale[0]
    return mse, share.addcmul_(z[0], along, value=-1), inverse
