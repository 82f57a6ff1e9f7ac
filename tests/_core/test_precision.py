"""The dtype of the computation; autocast does not change it."""

import contextlib

import pytest
import torch

from sparse_losses._core.precision import autocast_off, compute_dtype, widest_dtype

CPU, META = torch.device("cpu"), torch.device("meta")


def test_autocast_is_switched_off_where_it_is_on():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with autocast_off(CPU):
            assert (x @ x).dtype == torch.float32


def test_where_autocast_is_off_no_context_is_entered():
    """It costs as much as a small loss."""
    assert isinstance(autocast_off(CPU), contextlib.nullcontext)
    assert isinstance(autocast_off(META), contextlib.nullcontext)


def test_while_compiling_autocast_is_switched_off_without_a_query(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert isinstance(autocast_off(CPU), torch.autocast)
    assert isinstance(autocast_off(META), contextlib.nullcontext)


def test_one_tensor_in_double_precision_is_enough():
    half, single, double = (torch.ones(2, dtype=d) for d in (torch.half, torch.float, torch.double))
    assert compute_dtype(a=None) == compute_dtype(a=half, b=single) == torch.float32
    assert compute_dtype(a=None, b=double) == torch.float64
    assert compute_dtype(a=double, b=half, c=None) == torch.float64
    with pytest.raises(TypeError, match=r"expected `b` to be floating point, got torch\.int64"):
        compute_dtype(a=double, b=torch.ones(2).long())


def test_long_sums_are_in_fp64_unless_the_device_has_none():
    assert widest_dtype(CPU) == widest_dtype(torch.device("cuda")) == torch.float64
    assert widest_dtype(torch.device("mps")) == torch.float32
