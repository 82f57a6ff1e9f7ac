"""Log-sum-exp functions that are accurate in value and gradient."""

import functools

import torch
import torch.nn.functional as nnf
from torch import Tensor

__all__ = ["contrastive_rows", "masked_logsumexp", "negative_log_softmax", "softplus"]

# `log(1 + exp(x))` to full precision; PyTorch's default returns `x` from 20.
softplus = functools.partial(nnf.softplus, threshold=50.0)


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
    if not (decoupled or one_positive):
        terms = negative_log_softmax(scores, positive_mask | negative_mask)
        return _mean_where(positive_mask, terms)
    # The log-sum-exp is of differences: large scores that differ little keep their digits.
    if one_positive:
        own = torch.where(positive_mask, scores, 0.0).sum(-1)
        shift = own.detach()
        # The last difference is 0. It has the gradient of the positive, and its NaN.
        gap = masked_logsumexp(scores - shift[:, None], negative_mask) + (shift - own)
    else:
        if scores.shape[-1]:
            scores = scores - _finite(scores.detach().amax(-1, keepdim=True))
        gap = masked_logsumexp(scores, negative_mask) - _mean_where(positive_mask, scores)
    return gap if decoupled else softplus(gap)


def _mean_where(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def masked_logsumexp(scores: Tensor, mask: Tensor) -> Tensor:
    """Return ``log(sum(exp(scores)))`` over the last dimension where ``mask``.

    If there is none it is about the lowest finite number. The gradient of ``torch.logsumexp`` is
    ``exp(scores - result)``, which loses the digits of large scores and is NaN if all are ``-inf``;
    here the largest score is subtracted in both directions.
    """
    lowest = torch.finfo(scores.dtype).min
    if scores.shape[-1] == 0:
        return scores.sum(-1) + lowest
    scores = torch.where(mask, scores, lowest)
    largest = _finite(scores.detach().amax(-1, keepdim=True))
    return (scores - largest).exp().sum(-1).log() + largest.squeeze(-1)


def _finite(largest: Tensor) -> Tensor:
    """Bound what is subtracted: infinity minus infinity is NaN."""
    return largest.clamp(max=torch.finfo(largest.dtype).max)


def negative_log_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Return ``-log softmax`` over the last dimension where ``mask``; undefined elsewhere.

    ``logsumexp(scores) - score`` cancels if a candidate has nearly all of the probability. Only
    the largest can; its term is ``log(1 + sum(exp(other - largest)))``, and it is kept out of what
    has a gradient through the differences.
    """
    if scores.shape[-1] == 0:  # an empty batch has no largest candidate
        return scores
    lowest = torch.finfo(scores.dtype).min
    largest, index = torch.where(mask, scores, lowest).max(-1, keepdim=True)
    others, gaps = mask.scatter(-1, index, False), scores - largest
    excess = torch.where(others, gaps, -torch.inf).exp().sum(-1, keepdim=True).log1p()
    return excess - torch.where(others, gaps, 0.0)
