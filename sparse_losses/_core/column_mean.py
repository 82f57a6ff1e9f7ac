"""The batch statistics of the FLOPS losses: column means and their squares."""

from typing import Literal

import torch
from torch import Tensor

from sparse_losses._core.precision import widest_dtype
from sparse_losses.distributed import num_ranks, sum_over_ranks

Estimator = Literal["biased", "unbiased"]


def check_rows(estimator: str, num_rows: int, gather: bool) -> None:
    """Raise if an unbiased estimate is requested for fewer than two rows in total."""
    num_rows *= num_ranks() if gather else 1
    if estimator == "unbiased" and num_rows < 2:
        raise ValueError(
            "expected at least 2 rows for estimator='unbiased', which is a mean over pairs of "
            f"rows, got B = {num_rows}"
        )


def mean_and_square(
    x: Tensor, estimator: str, gather: bool, threshold: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the column means ``[V]`` of ``x [B, V]`` and an estimate of their squares.

    With ``gather`` the means are over the rows of all ranks; only column sums are exchanged. Rows
    with at most ``threshold`` entries other than 0 count as rows of zeros.
    """
    if threshold is not None:  # a product: the NaN of a row is not hidden
        x = x * ((x != 0).sum(1, keepdim=True) > threshold)
    count = x.shape[0] * (num_ranks() if gather else 1)
    dtype = x.dtype
    if estimator == "unbiased":
        # If one row holds nearly all of a column, the difference below cancels in fp32.
        x = x.to(widest_dtype(x.device))
    sums = [x.sum(0)] if estimator == "biased" else [x.sum(0), x.square().sum(0)]
    if gather:
        sums = list(sum_over_ranks(torch.stack(sums)))
    mean = sums[0] / max(count, 1)
    if estimator == "biased":
        return mean, mean.square()
    squared_mean = (sums[0].square() - sums[1]) / (count * (count - 1))
    return mean.to(dtype), squared_mean.to(dtype)
