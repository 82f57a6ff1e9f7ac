"""A bound on mutual information from a value of InfoNCE."""

import math

import torch
from torch import Tensor

from sparse_losses._core.checks import check_integer, check_number
from sparse_losses._core.precision import compute_dtype


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
