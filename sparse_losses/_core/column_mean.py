"""The batch statistics of the FLOPS losses: column means and their squares."""

from typing import Literal

import torch
from torch import Tensor

from sparse_losses._core.entries import entries_of
from sparse_losses._core.precision import widest_dtype
from sparse_losses.distributed import num_ranks, sum_over_ranks

Estimator = Literal["biased", "unbiased"]


def mean_and_square(
    x: Tensor, estimator: str, gather: bool, threshold: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the column means ``[V]`` of ``x [B, V]`` and an estimate of their squares.

    With ``gather`` only column sums are exchanged. Rows with at most ``threshold`` entries other
    than 0 count as rows of zeros.
    """
    num_rows, vocab_size = x.shape
    count = num_rows * (num_ranks() if gather else 1)
    if estimator == "unbiased" and count < 2:
        raise ValueError(
            "expected at least 2 rows for estimator='unbiased', which is a mean over pairs of "
            f"rows, got B = {count}"
        )
    dtype = x.dtype
    # If one row holds nearly all of a column, a difference of squares cancels in fp32.
    wide = dtype if estimator == "biased" else widest_dtype(x.device)
    if x.layout == torch.sparse_csr:
        entries = entries_of(x)
        value = entries.value
        if threshold is not None:
            active = entries.sum_rows(num_rows, (value != 0).to(dtype))
            value = value * (active > threshold)[entries.row]
        value = value.to(wide)
        sums = [entries.sum_columns(vocab_size, value)]
        if estimator == "unbiased":
            sums.append(entries.sum_columns(vocab_size, value.square()))
    else:
        if threshold is not None:  # a product: the NaN of a row is not hidden
            x = x * ((x != 0).sum(1, keepdim=True) > threshold)
        x = x.to(wide)
        sums = [x.sum(0)] if estimator == "biased" else [x.sum(0), x.square().sum(0)]
    if gather:
        sums = list(sum_over_ranks(torch.stack(sums)))
    mean = sums[0] / max(count, 1)
    if estimator == "biased":
        return mean, mean.square()
    squared_mean = (sums[0].square() - sums[1]) / (count * (count - 1))
    return mean.to(dtype), squared_mean.to(dtype)
