"""Log-sum-exp functions that are accurate in value and gradient. An infinite score gives NaN."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor

# `log(1 + exp(x))` to full precision; PyTorch's default returns `x` from 20.
softplus = functools.partial(nnf.softplus, threshold=50.0)


def false_negative_limit(own: Tensor, margin: float | Tensor | None, ratio: float | None) -> Tensor:
    """Return the score ``[B]`` above which a candidate is a false negative; NaN limits nothing."""
    limits = [] if margin is None else [own + margin]
    if ratio is not None:
        limits.append(torch.where(own > 0, own * ratio, torch.inf))
    return limits[0] if len(limits) == 1 else torch.minimum(*limits)


def largest_positive(scores: Tensor, is_positive: Tensor) -> Tensor:
    """Return each row's largest score of a positive ``[B]``, infinity without one; detached."""
    if scores.shape[1] == 0:
        return scores.sum(1)
    largest = scores.detach().masked_fill(~is_positive, -torch.inf).amax(1)
    return torch.where(is_positive.any(1), largest, torch.inf)


def diagonal(scores: Tensor, first: int = 0) -> Tensor:
    """Return ``scores[i, first + i]`` of every row."""
    if not torch.compiler.is_compiling():
        return scores.diagonal(first)
    # The compiler of PyTorch 2.13 warns of a deprecated call of its own in `diagonal`.
    index = torch.arange(first, first + len(scores), device=scores.device)
    return scores.gather(1, index[:, None])[:, 0]


def one_positive_rows(
    scores: Tensor, own: Tensor, absent: Tensor | None, *, decoupled: bool = False
) -> Tensor:
    """Return InfoNCE per row, of a positive's score ``own [B]`` and the negatives not absent."""
    # The log-sum-exp is of differences: large scores that differ little keep their digits.
    shift = own.detach()
    # `shift - own` is 0; it carries the positive's gradient, and its NaN.
    gap = masked_logsumexp(scores - shift[:, None], absent) + (shift - own)
    return gap if decoupled else softplus(gap)


def one_positive_rows_and_gradient(
    scores: Tensor, own_of: Callable[[Tensor], Tensor], dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Return ``one_positive_rows``, and its gradient; ``own_of`` returns a view of positives."""
    log_probabilities = scores.log_softmax(dim)
    gradient = log_probabilities.exp()
    own = own_of(gradient)
    own.zero_()
    others = gradient.sum(dim)
    own.sub_(others)
    # In an easy row `others` is accurate, in a hard one the positive's logarithm is.
    return softplus(others.log() - own_of(log_probabilities)), gradient


def contrastive_rows(
    scores: Tensor, is_positive: Tensor, absent: Tensor, *, decoupled: bool = False
) -> Tensor:
    """Return InfoNCE per row, the mean over its positives; ``absent`` marks what is no negative."""
    other = absent & ~is_positive  # neither
    if decoupled:
        if scores.shape[-1]:
            largest = scores.detach().masked_fill(other, torch.finfo(scores.dtype).min)
            scores = scores - largest.amax(-1, keepdim=True)
        return masked_logsumexp(scores, absent) - _mean_where(is_positive, scores)
    return _mean_where(is_positive, negative_log_softmax(scores, other))


def _mean_where(mask: Tensor, values: Tensor) -> Tensor:
    return values.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def masked_logsumexp(scores: Tensor, absent: Tensor | None) -> Tensor:
    """Return the log-sum-exp of what is not absent; of nothing, about the lowest number."""
    lowest = torch.finfo(scores.dtype).min
    if scores.shape[-1] == 0:
        return scores.sum(-1) + lowest
    # Not even `-inf` is below the lowest number: a row without any would have a NaN gradient.
    scores = scores.clamp(min=lowest) if absent is None else scores.masked_fill(absent, lowest)
    # The gradient of `torch.logsumexp` loses the digits of large scores: it subtracts the result.
    largest = scores.detach().amax(-1, keepdim=True)
    return (scores - largest).exp().sum(-1).log() + largest.squeeze(-1)


def negative_log_softmax(scores: Tensor, absent: Tensor) -> Tensor:
    """Return ``-log softmax`` over the last dimension, except where ``absent``; undefined there."""
    if scores.shape[-1] == 0:  # an empty batch has no largest candidate
        return scores
    # `logsumexp(scores) - score` cancels if a candidate has nearly all of the probability. Only the
    # largest can: its term is `log(1 + sum(exp(other - largest)))`, and has no other gradient.
    lowest = torch.finfo(scores.dtype).min
    largest, index = scores.masked_fill(absent, lowest).max(-1, keepdim=True)
    no_others, gaps = absent.scatter(-1, index, True), scores - largest
    excess = gaps.masked_fill(no_others, -torch.inf).exp().sum(-1, keepdim=True).log1p()
    excess = excess + largest.detach() * 0.0  # a NaN shows without others, and infinity is NaN
    return excess - gaps.masked_fill(no_others, 0.0)
