"""What an InfoNCE value says about mutual information."""

import math

import torch
from torch import Tensor

from sparse_losses._core.checks import check_integer, check_number
from sparse_losses._core.precision import compute_dtype

__all__ = ["mutual_information_lower_bound"]


def mutual_information_lower_bound(loss: Tensor | float, num_candidates: int) -> Tensor:
    r"""What an InfoNCE value says about the mutual information of anchor and positive, in nats.

    $$I \ge \log n - \ell$$

    $n$ candidates a row: one positive and $n - 1$ independent draws from the marginal. The bound
    cannot exceed $\log n$, however much the two share: small batches cannot show much. It holds for
    plain InfoNCE only, not for decoupled, several positives, ids, mined negatives or weights.

    Args:
        loss: an InfoNCE value, a floating tensor of any shape or a number.
        num_candidates: ``n``; ``B`` for in-batch negatives alone, ``B + N`` with shared ones.

    Returns:
        The bound in nats, shape of ``loss``, at most ``log(num_candidates)``.

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
