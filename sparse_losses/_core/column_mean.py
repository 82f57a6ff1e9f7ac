"""What the FLOPS family knows of a batch: the mean of every column and its square."""

from typing import Any, Literal

import torch
from torch import Tensor

from sparse_losses._core.checks import check_choice
from sparse_losses._core.fused import can_fuse
from sparse_losses.distributed import num_ranks, sum_over_ranks

__all__ = ["Estimator", "check_estimator", "column_sum", "mean_and_square"]

Estimator = Literal["biased", "unbiased"]


def check_estimator(estimator: str, num_rows: int | None = None) -> None:
    """Raises for an unknown estimator, and for an unbiased one of fewer than two rows in all."""
    check_choice("estimator", estimator, ("biased", "unbiased"))
    if estimator == "unbiased" and num_rows is not None and num_rows < 2:
        raise ValueError(
            "expected at least 2 rows for estimator='unbiased', which is a mean over pairs of "
            f"rows, got B = {num_rows}"
        )


def mean_and_square(x: Tensor, estimator: str, gather: bool) -> tuple[Tensor, Tensor]:
    """The column means ``[V]`` of ``[B, V]`` and an estimate of their squares.

    With ``gather`` they are of all ranks' rows: the columns' sums are added up, no row is sent.
    """
    count = x.shape[0] * (num_ranks() if gather else 1)
    sums = [column_sum(x)] if estimator == "biased" else [column_sum(x), column_sum(x.square())]
    if gather:
        sums = list(sum_over_ranks(torch.stack(sums)))
    mean = sums[0] / max(count, 1)
    if estimator == "biased":
        return mean, mean.square()
    return mean, (sums[0].square() - sums[1]) / (count * (count - 1))


def column_sum(x: Tensor) -> Tensor:
    """``x.sum(0)``; its gradient is one row, which is not written out for every row of ``x``."""
    if can_fuse(x):
        total: Tensor = _ColumnSum.apply(x)  # type: ignore[no-untyped-call]
        return total
    return x.sum(0)


class _ColumnSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.count = x.shape[0]
        # Twice as fast as `sum` on a CPU, which adds row to row through memory.
        return torch.mv(x.T, x.new_ones(ctx.count))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream.expand(ctx.count, -1)
