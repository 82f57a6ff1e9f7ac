"""A mask of candidates that score too high to be negatives."""

import torch
from torch import Tensor

from sparse_losses._core.loss import loss
from sparse_losses._core.softmax import false_negative_limit, largest_positive


@loss(scores="B C, detached", positive_mask="B C, mask, optional", margin="finite", ratio=">= 0")
def false_negative_mask(
    scores: Tensor,
    positive_mask: Tensor | None = None,
    *,
    margin: float | None = None,
    ratio: float | None = None,
) -> Tensor:
    r"""Mask that leaves out candidates that score too high to be negatives.

    Candidate $c$ of row $i$ is left out if $s_{ic} > s_i + m$ or, where $s_i > 0$, if
    $s_{ic} > \rho s_i$, with the largest score $s_i$ of the row's positives, the margin $m$ and the
    ratio $\rho$. A candidate at the bound, a positive and a NaN stay. The scores may be those of a
    guide, a second model; ``info_nce_loss`` itself applies margin and ratio to its own.

    Args:
        scores: ``[B, C]`` floating, of any model; detached.
        positive_mask: ``[B, C]`` bool, int or float 0/1; by default the diagonal of square scores.
            A row without a positive keeps all candidates.
        margin: ``m``, finite, in units of the scores.
        ratio: ``rho``, >= 0.

    Returns:
        ``[B, C]`` bool, False for candidates that are left out: a ``candidate_mask`` for a loss.

    Raises:
        ValueError: for wrong shapes or bounds, without any bound, or without ``positive_mask`` if
            the scores are not square.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import false_negative_mask
        >>> guide = torch.tensor([[0.8, 0.95, 0.1], [0.2, 0.9, 0.7], [0.0, 0.6, 0.5]])
        >>> false_negative_mask(guide, margin=0.1)
        tensor([[ True, False,  True],
                [ True,  True,  True],
                [ True,  True,  True]])

    References:
        GISTEmbed: Guided In-sample Selection of Training Negatives. NV-Retriever: Improving text
        embedding models with effective hard-negative mining (``ratio``). Qwen3 Embedding
        (``margin``).
    """
    if margin is None and ratio is None:
        raise ValueError("expected `margin` or `ratio`, got neither")
    rows, columns = scores.shape
    if positive_mask is None:
        if rows != columns:
            raise ValueError(
                "expected `positive_mask` unless `scores` are square, "
                f"got `scores` of shape {list(scores.shape)}"
            )
        positive_mask = torch.eye(rows, dtype=torch.bool, device=scores.device)
    limit = false_negative_limit(largest_positive(scores, positive_mask), margin, ratio)
    return ~(scores > limit[:, None]) | positive_mask
