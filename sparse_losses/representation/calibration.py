"""The threshold at which texts keep a given number of dimensions."""

import math
import sys

import torch
from torch import Tensor

from sparse_losses._core.checks import check_number, check_rows

__all__ = ["calibrate_threshold", "threshold", "threshold_of_rounded"]

LARGEST = math.log(sys.float_info.max)  # of an activation: the logarithm of the largest number


def calibrate_threshold(activations: Tensor, target_active: float) -> float:
    r"""Find the threshold that leaves ``target_active`` dimensions per text, on average.

    Activations are $x = \log(1 + \max(0, z))$ of pooled logits $z$. The threshold $t$ is in units
    of $z$, so it can be subtracted from a bias: $e^x - 1 > t$ holds for that many entries per row.

    Args:
        activations: pooled vectors ``[..., V]``, without idf weights or gate.
        target_active: mean number of entries to keep per row, > 0.

    Returns:
        $t \ge 0$, halfway between the smallest entry that is kept and the largest that is not; 0 if
        all are kept. Equal entries are kept or dropped together, whichever is nearer the target.

    Raises:
        ValueError: if fewer entries are active (no threshold adds any), or if an activation is not
            finite or is above 709.78, the logarithm of the largest float.
        TypeError: if ``activations`` is not a dense tensor.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import calibrate_threshold
        >>> logits = torch.tensor([[1.0, 2.0, 0.0], [4.0, 6.0, 8.0]])
        >>> t = calibrate_threshold(logits.log1p(), target_active=1.5)
        >>> round(t, 4), (logits > t).sum().item()
        (3.0, 3)
    """
    check_number("target_active", target_active, minimum=0.0, exclusive=True)
    check_rows("activations", activations)
    rows = activations.detach().flatten(0, -2)
    if not bool(rows.isfinite().all()):
        raise ValueError("expected finite `activations`, got a NaN or an infinity")
    values = rows[rows > 0].double().cpu().sort(descending=True).values
    if len(values) and values[0] > LARGEST:
        raise ValueError(
            f"expected `activations` log(1 + z) of logits z, at most {LARGEST:.2f}, got "
            f"{values[0].item():g}"
        )
    values = values.expm1()
    kept = round(target_active * len(rows))
    if kept > len(values):
        active = len(values) / len(rows)
        raise ValueError(
            f"expected `target_active` of at most {active:.4g}, the mean that are active, got "
            f"{target_active}"
        )
    if kept == 0:
        raise ValueError(f"expected enough rows to keep at least one entry, got {len(rows)}")
    return max(threshold(values, kept), 0.0)


def threshold(values: Tensor, kept: int) -> float:
    """Return the middle of the gap below the first ``kept`` of the descending ``values``.

    Equal entries are kept or dropped together, whichever is nearer to ``kept``; at least one is
    kept. If all are kept the threshold is minus infinity.
    """
    edge = values[kept - 1]
    more, fewer = int((values >= edge).sum()), int((values > edge).sum())
    kept = more if more - kept <= kept - fewer or fewer == 0 else fewer
    if kept == len(values):
        return -math.inf
    return values[kept - 1].item() / 2 + values[kept].item() / 2  # the sum could overflow


def threshold_of_rounded(values: Tensor, kept: int, exact: float, bias: Tensor) -> float:
    """Return the threshold next to ``exact`` that keeps nearest to ``kept`` of the ``values``.

    Each of the ``values`` contains its entry of ``bias``; the threshold is subtracted from that,
    and the difference is rounded to the dtype of ``bias``.
    """

    def missed(t: float) -> int:
        change = (bias - t).double() - bias.double()
        return abs(int((values + change > 0).sum()) - kept)

    step = torch.finfo(bias.dtype).eps / 4  # half of the least distance of two numbers
    nearest_first = sorted(range(-4, 5), key=abs)
    return min((exact * (1 + k * step) for k in nearest_first), key=missed)
