"""One table of scores from several teachers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_losses._core.checks import check_integer, check_number, check_shapes
from sparse_losses._core.precision import compute_dtype, widest_dtype
from sparse_losses._core.token_ids import as_mask


def mix_teachers(
    scores: Sequence[Tensor],
    *,
    weights: Sequence[float] | None = None,
    reference: int | tuple[float, float] = 0,
    candidate_mask: Tensor | None = None,
) -> Tensor:
    r"""Mix the scores of several teachers into one table, on the scale of one of them.

    $$t_{ic} = \mu_i + \sigma_i \, \mathrm{z}\Bigl(
    \frac{\sum_k w_k \, \mathrm{z}(s^k_i)_c}{\sum_k w_k}\Bigr)$$

    $s^k_i$ are the scores of teacher $k$ for the candidates of row $i$, $w$ the ``weights``. Both
    sums are over the teachers that scored candidate $c$. $\mathrm{z}$ subtracts the mean of a row's
    candidates and divides by their standard deviation (0 for equal scores). $\mu_i$ and $\sigma_i$
    are mean and standard deviation of the reference: only its shift and scale count.

    Args:
        scores: one tensor ``[B, C]`` for each teacher, floating; ``-inf`` marks a candidate that
            the teacher did not score.
        weights: a number >= 0 for each teacher; default: all equal.
        reference: the number of the teacher whose mean and spread each row gets (in a row that it
            did not score, the means of both over its rows), or both numbers themselves.
        candidate_mask: ``[B, C]`` bool, int or float 0/1; marks the candidates that count.

    Returns:
        ``[B, C]``, fp32 (fp64 for fp64 scores), without a gradient; ``-inf`` where no teacher with
        a weight above 0 scored the candidate. Of one teacher: its scores.

    Raises:
        ValueError: for wrong shapes, devices, weights or reference.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import mix_teachers
        >>> logits = torch.tensor([[8.0, 2.0, -1.0]])
        >>> cosines = torch.tensor([[0.9, 0.2, 0.7]])
        >>> mix_teachers([logits, cosines])  # mean 3 and spread 3.74, as the logits have
        tensor([[ 8.1681, -0.5678,  1.3996]])

    References:
        SPLADE-v3: New baselines for SPLADE (scores of several rerankers, normalised and mixed).
    """
    if not isinstance(scores, Sequence) or not scores:
        raise TypeError(f"expected `scores` to be a list of tensors [B, C], got {scores!r}")
    weights = [1.0] * len(scores) if weights is None else list(weights)
    for number, weight in enumerate(weights):
        check_number(f"weights[{number}]", weight, minimum=0.0)
    if len(weights) != len(scores) or not any(weights):
        raise ValueError(
            f"expected `weights` for {len(scores)} teachers, one above 0 at least, got {weights}"
        )
    named = {f"scores[{number}]": each for number, each in enumerate(scores)}
    shapes = {name: (each, "B C") for name, each in named.items()}
    check_shapes(**shapes, candidate_mask=(candidate_mask, "B C, mask, optional"))
    like = scores[0]
    dtype, wide = compute_dtype(**named), widest_dtype(like.device)

    def scored(each: Tensor) -> tuple[Tensor, Tensor]:
        each = each.detach().to(wide)
        present = each != -torch.inf
        if candidate_mask is not None:
            present = present & as_mask("candidate_mask", candidate_mask)
        return each, present

    if like.numel() == 0:
        return like.detach().to(dtype)
    total, weight_sum = torch.zeros_like(like, dtype=wide), torch.zeros_like(like, dtype=wide)
    for each, weight in zip(scores, weights, strict=True):
        if weight > 0:
            each, present = scored(each)
            total += weight * _z_scores(each, present)
            weight_sum += weight * present.to(wide)
    present = weight_sum > 0
    mixed = _z_scores(total / weight_sum.masked_fill(~present, 1.0), present)
    if isinstance(reference, tuple):
        check_number("reference[0]", reference[0])
        check_number("reference[1]", reference[1], minimum=0.0)
        moments: tuple[Tensor | float, ...] = reference
    else:
        check_integer("reference", reference, minimum=0)
        if reference >= len(scores):
            raise ValueError(f"expected `reference` below {len(scores)}, got {reference}")
        each, known = scored(scores[reference])
        rows = known.any(1, keepdim=True)
        moments = tuple(
            torch.where(rows, x, torch.where(rows, x, 0.0).sum() / rows.sum().clamp(min=1))
            for x in _moments(each, known)
        )
    mean, spread = moments
    return (mixed * spread + mean).masked_fill(~present, -torch.inf).to(dtype)


def _moments(scores: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation ``[B, 1]`` of the entries of a row that are present."""
    count = present.sum(1, keepdim=True).clamp(min=1)
    mean = torch.where(present, scores, 0.0).sum(1, keepdim=True) / count
    variance = torch.where(present, scores - mean, 0.0).square().sum(1, keepdim=True) / count
    # Equal scores may differ from their mean by its rounding.
    largest = torch.where(present, scores, -torch.inf).amax(1, keepdim=True)
    smallest = torch.where(present, scores, torch.inf).amin(1, keepdim=True)
    return mean, torch.where(largest == smallest, 0.0, variance.sqrt())


def _z_scores(scores: Tensor, present: Tensor) -> Tensor:
    """Return the z-scores of the entries of a row that are present, and 0 elsewhere."""
    mean, spread = _moments(scores, present)
    return torch.where(present, scores - mean, 0.0) / torch.where(spread == 0.0, torch.inf, spread)
