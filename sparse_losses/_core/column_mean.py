"""What the FLOPS family knows of a batch: the mean of every column and its square."""

from typing import Literal

from torch import Tensor

from sparse_losses._core.checks import check_choice

__all__ = ["Estimator", "check_estimator", "mean_and_square"]

Estimator = Literal["biased", "unbiased"]


def check_estimator(estimator: str, num_rows: int | None = None) -> None:
    """Raises for an unknown estimator, and for an unbiased one of fewer than two rows."""
    check_choice("estimator", estimator, ("biased", "unbiased"))
    if estimator == "unbiased" and num_rows is not None and num_rows < 2:
        raise ValueError(
            "expected at least 2 rows for estimator='unbiased', which is a mean over pairs of "
            f"rows, got B = {num_rows}"
        )


def mean_and_square(x: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """The column means ``[V]`` of ``[B, V]`` and an estimate of their squares."""
    count = x.shape[0]
    total = x.sum(0)
    mean = total / max(count, 1)
    if estimator == "biased":
        return mean, mean.square()
    return mean, (total.square() - x.square().sum(0)) / (count * (count - 1))
