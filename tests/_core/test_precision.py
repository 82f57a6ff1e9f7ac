"""The dtype of the computation; autocast does not change it."""

import contextlib

import torch

from sparse_losses._core.precision import autocast_off, widest_dtype

CPU, META = torch.device("cpu"), torch.device("meta")


def test_where_autocast_is_off_no_context_is_entered():
    """It costs as much as a small loss."""
    assert isinstance(autocast_off(CPU), contextlib.nullcontext)
    assert isinstance(autocast_off(META), contextlib.nullcontext)


def test_long_sums_are_in_fp64_unless_the_device_has_none():
    assert widest_dtype(CPU) == widest_dtype(torch.device("cuda")) == torch.float64
    assert widest_dtype(torch.device("mps")) == torch.float32
