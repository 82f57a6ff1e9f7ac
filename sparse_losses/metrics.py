"""Measures: recall, how far texts with the same words differ, and what InfoNCE tells."""

import math

import torch
from torch import Tensor

from sparse_losses._core.checks import check_integer, check_number, check_shapes
from sparse_losses._core.precision import compute_dtype
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
    return (a & b).sum(1) / (a | b).sum(1).clamp(min=1)


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


def mutual_information_lower_bound(loss: Tensor | float, num_candidates: int) -> Tensor:
    r"""Lower bound in nats on the mutual information of anchor and positive, from an InfoNCE value.

    $$I \ge \log n - \ell$$

    Each row has $n$ candidates: one positive and $n - 1$ independent draws from the marginal. The
    bound holds for plain InfoNCE only, without ``decoupled``, several positives, ids or mined
    negatives.

    Args:
        loss: value of InfoNCE, a floating tensor of any shape or a number.
        num_candidates: ``n`` >= 1; ``B`` in batch, ``B + N`` with ``N`` shared negatives.

    Returns:
        The bound in nats, in the shape of ``loss``, at most ``log(num_candidates)``.

    Raises:
        ValueError: if ``num_candidates`` is below 1.
        TypeError: if ``loss`` is neither a floating tensor nor a number.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import mutual_information_lower_bound
        >>> mutual_information_lower_bound(torch.tensor(1.0), num_candidates=64)
        tensor(3.1589)

    References:
        Representation Learning with Contrastive Predictive Coding, eq. 6.
    """
    check_integer("num_candidates", num_candidates, minimum=1)
    if not isinstance(loss, Tensor):
        check_number("loss", loss)
        loss = torch.tensor(loss, dtype=torch.float64)
    loss = loss.to(compute_dtype(loss=loss))
    return math.log(num_candidates) - loss.clamp(min=0.0)
