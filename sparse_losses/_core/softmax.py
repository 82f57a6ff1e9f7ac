"""Log-sum-exp functions that are accurate in value and gradient."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

__all__ = ["contrastive_rows", "masked_logsumexp", "negative_log_softmax", "softplus"]


def contrastive_rows(
    scores: Tensor,
    positive_mask: Tensor,
    negative_mask: Tensor,
    *,
    decoupled: bool = False,
    one_positive: bool = False,
) -> Tensor:
    """Return InfoNCE per row of ``scores [B, C]``: the mean over the row's positives.

    With ``decoupled`` the denominator has no positives. ``one_positive`` promises that no row has
    more than one positive, which saves operations.
    """
    if decoupled or one_positive:
        if one_positive:
            own = torch.where(positive_mask, scores, 0.0).sum(-1)
        else:
            own = _mean_where(positive_mask, scores)
        gap = masked_logsumexp(scores, negative_mask) - own
        return gap if decoupled else softplus(gap)
    return _mean_where(positive_mask, negative_log_softmax(scores, positive_mask | negative_mask))


def _mean_where(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def softplus(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return ``log(1 + exp(x))`` to full precision (PyTorch's default returns ``x`` from 20)."""
    if out is None:
        return nnf.softplus(x, threshold=50.0)
    return nnf.softplus(x, 1, 50.0, out=out)  # type: ignore[call-arg]  # torch's stub lacks it


def masked_logsumexp(scores: Tensor, mask: Tensor) -> Tensor:
    """Return ``log(sum(exp(scores)))`` over the last dimension where ``mask``; ``-inf`` if none."""
    # The gradient of a log-sum-exp is NaN if all scores are -inf, so use the lowest number.
    lowest = torch.finfo(scores.dtype).min
    total = torch.where(mask, scores, lowest).logsumexp(-1)
    return torch.where(total == lowest, -torch.inf, total)


def negative_log_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Return ``-log softmax`` over the last dimension where ``mask``; undefined elsewhere.

    ``logsumexp(scores) - score`` cancels if a candidate has nearly all of the probability. Only
    the largest can, so its term is computed as ``softplus(logsumexp(the others) - score)``.
    """
    if scores.shape[-1] == 0:  # an empty batch has no largest candidate
        return scores
    some = mask.any(-1, keepdim=True)
    scores = torch.where(mask, scores, torch.where(some, -torch.inf, 0.0).to(scores.dtype))
    largest = torch.zeros_like(mask).scatter(-1, scores.detach().argmax(-1, keepdim=True), True)
    top = torch.where(largest, scores, 0.0).sum(-1, keepdim=True)
    rest = masked_logsumexp(scores, mask & ~largest).unsqueeze(-1)
    excess = softplus(rest - top)
    return torch.where(largest, excess, (top - scores) + excess)  # in the order that cancels least
