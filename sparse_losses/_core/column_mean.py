"""What the FLOPS family knows of a batch: the mean of every column and its square."""

from typing import Literal

import torch
from torch import Tensor

from sparse_losses._core.precision import widest_dtype
from sparse_losses.distributed import num_ranks, sum_over_ranks

__all__ = ["Estimator", "check_rows", "mean_and_square"]

Estimator = Literal["biased", "unbiased"]


def check_rows(estimator: str, num_rows: int, gather: bool) -> None:
    """Raises for an unbiased estimate of fewer than two rows in all."""
    num_rows *= num_ranks() if gather else 1
    if estimator == "unbiased" and num_rows < 2:
        raise ValueError(
            "expected at least 2 rows for estimator='unbiased', which is a mean over pairs of "
            f"rows, got B = {num_rows}"
        )


def mean_and_square(x: Tensor, estimator: str, gather: bool) -> tuple[Tensor, Tensor]:
    """The column means ``[V]`` of ``[B, V]`` and an estimate of their squares.

    With ``gather`` they are of all ranks' rows: the columns' sums are added up, no row is sent.
    """
    count = x.shape[0] * (num_ranks() if gather else 1)
    dtype = x.dtype
    if estimator == "unbiased":
        # Where one row has nearly all of a column, the difference below is a rounding error.
        x = x.to(widest_dtype(x.device))
    sums = [x.sum(0)] if estimator == "biased" else [x.sum(0), x.square().sum(0)]
    if gather:
        sums = list(sum_over_ranks(torch.stack(sums)))
    mean = sums[0] / max(count, 1)
    if estimator == "biased":
        return mean, mean.square()
    squared_mean = (sums[0].square() - sums[1]) / (count * (count - 1))
    return mean.to(dtype), squared_mean.to(dtype)
