"""Measures of retrieval: recall, and how far texts with the same words differ."""

import torch
from torch import Tensor

from sparse_losses._core.checks import check_integer, check_shapes
from sparse_losses._core.token_ids import as_mask


def context_overlap(one: Tensor, other: Tensor) -> Tensor:
    r"""Jaccard overlap $|A_i \cap B_i| / |A_i \cup B_i|$ of the active tokens of paired rows.

    For pairs that share a keyword but not its context, 1 minus the mean overlap is the context
    discrimination of the notes on V28.

    Args:
        one: ``[B, V]``; a token is active where it is > 0.
        other: ``[B, V]``.

    Returns:
        ``[B]``, fp32; 0 where both rows are empty.

    Raises:
        ValueError: for other shapes.

    Examples:
        >>> import torch
        >>> from sparse_losses import context_overlap
        >>> context_overlap(torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[0.0, 3.0, 1.0]]))
        tensor([0.3333])
    """
    check_shapes(one=(one, "B V"), other=(other, "B V"))
    a, b = one > 0, other > 0
    union = (a | b).sum(1)
    return (a & b).sum(1) / union.clamp(min=1)


def recall_at_k(scores: Tensor, positive: Tensor, k: int) -> Tensor:
    """Share of a query's positives among its ``k`` best candidates, averaged over queries.

    Args:
        scores: ``[Q, C]``.
        positive: ``[Q]``, the column of each query's positive; or ``[Q, C]`` 0/1.
        k: 1 to ``C``.

    Returns:
        0-d, fp32. Queries without positives are left out. Half of the tied candidates rank above
        the positive, so that a constant score gains nothing.

    Raises:
        ValueError: for other shapes, a ``k`` outside its range, or positives that are not 0/1.

    Examples:
        >>> import torch
        >>> from sparse_losses import recall_at_k
        >>> recall_at_k(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]), k=1)
        tensor(0.5000)
    """
    size = check_shapes(scores=(scores, "Q C"), positive=(positive, "Q or Q C"))
    check_integer("k", k, minimum=1)
    if k > size["C"]:
        raise ValueError(f"expected `k` of at most C = {size['C']}, got {k}")
    if positive.ndim == 1:
        columns = torch.arange(size["C"], device=scores.device)
        positive = positive[:, None] == columns
    positive = as_mask("positive", positive)
    scores = scores.contiguous()  # searchsorted warns of a transposed tensor
    ordered = scores.sort(1).values
    not_above = torch.searchsorted(ordered, scores, right=True)
    below = torch.searchsorted(ordered, scores)
    rank = 1 + (size["C"] - not_above) + (not_above - below - 1) / 2
    hits, total = (positive & (rank <= k)).sum(1), positive.sum(1)
    valid = total > 0
    return ((hits / total.clamp(min=1)) * valid).sum() / valid.sum().clamp(min=1)
