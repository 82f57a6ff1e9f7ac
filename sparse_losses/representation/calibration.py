"""The threshold at which texts keep as many dimensions as an index may hold."""

import math

from torch import Tensor

from sparse_losses._core.checks import check_number

__all__ = ["calibrate_threshold", "threshold"]


def calibrate_threshold(activations: Tensor, target_active: float) -> float:
    r"""Finds the threshold that leaves ``target_active`` dimensions per text, on average.

    Activations are $x = \log(1 + \max(0, z))$ of pooled logits $z$. The threshold $t$ is in units
    of $z$, where it can be subtracted from a bias: $e^x - 1 > t$ holds for as many entries a row.

    Args:
        activations: pooled vectors ``[..., V]``, without idf weights or gate.
        target_active: entries to keep of a row, on average, > 0.

    Returns:
        $t \ge 0$, in the middle of the gap between the smallest entry that stays and the largest
        that goes; 0 where all stay. Entries that are equal stay or go together, whichever comes
        nearer.

    Raises:
        ValueError: if fewer are active: a threshold of 0 leaves them all, and none adds any.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import calibrate_threshold
        >>> logits = torch.tensor([[1.0, 2.0, 0.0], [4.0, 6.0, 8.0]])
        >>> t = calibrate_threshold(logits.log1p(), target_active=1.5)
        >>> round(t, 4), (logits > t).sum().item()
        (3.0, 3)
    """
    check_number("target_active", target_active, minimum=0.0, exclusive=True)
    if activations.ndim < 2:
        raise ValueError(f"expected `activations` of shape [..., V], got {list(activations.shape)}")
    rows = activations.detach().flatten(0, -2)
    if not bool(rows.isfinite().all()):
        raise ValueError("expected finite `activations`, got a NaN or an infinity")
    values = rows[rows > 0].double().cpu().expm1().sort(descending=True).values
    kept = round(target_active * len(rows))
    if kept > len(values):
        active = len(values) / len(rows)
        raise ValueError(
            f"expected `target_active` of at most {active:.4g}, as many as are active, got "
            f"{target_active}"
        )
    if kept == 0:
        raise ValueError(f"expected rows to keep something of, got {len(rows)} of them")
    return max(threshold(values, kept), 0.0)


def threshold(values: Tensor, kept: int) -> float:
    """The middle of the gap below ``kept`` of ``values``, which come in descending order.

    Entries that are equal stay or go together, whichever comes nearer to ``kept``; one at least
    stays. Where all stay it is minus infinity.
    """
    edge = values[kept - 1]
    more, fewer = int((values >= edge).sum()), int((values > edge).sum())
    kept = more if more - kept <= kept - fewer or fewer == 0 else fewer
    if kept == len(values):
        return -math.inf
    return (values[kept - 1].item() + values[kept].item()) / 2
