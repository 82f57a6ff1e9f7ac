"""Where checks look, and the bounds and words of what they refuse."""

import math

import pytest
import torch

from sparse_losses._core.checks import (
    check_integer,
    check_number,
    check_zero_one,
    values_can_be_checked,
)


def test_a_bound_is_allowed_unless_it_is_exclusive():
    check_number("a", 0.0, minimum=0.0)
    check_integer("k", 3, minimum=3)
    with pytest.raises(ValueError, match=r"^expected `a` to be a finite number > 0, got 0\.0$"):
        check_number("a", 0.0, minimum=0.0, exclusive=True)
    with pytest.raises(ValueError, match=r"^expected `k` to be an integer >= 3, got 2$"):
        check_integer("k", 2, minimum=3)


def test_without_a_bound_none_is_named():
    with pytest.raises(ValueError, match=r"^expected `a` to be a finite number, got nan$"):
        check_number("a", math.nan)
    with pytest.raises(TypeError, match=r"^expected `a` to be a number, got str$"):
        check_number("a", "1")


class Subclass(torch.Tensor):
    """May have no values, as a DTensor's."""


def test_values_are_read_where_that_is_free_and_possible(monkeypatch):
    x = torch.tensor([0.0, 2.0])
    assert values_can_be_checked(x)
    assert values_can_be_checked(torch.nn.Parameter(x))
    without = [x.to("meta"), x.as_subclass(Subclass)]
    assert not any(map(values_can_be_checked, without))
    for tensor in without:
        check_zero_one("mask", tensor)
    checked = []
    torch.vmap(lambda row: checked.append(values_can_be_checked(row)) or row)(x)
    torch.vmap(lambda row: checked.append(values_can_be_checked(x)) or row)(x)
    assert checked == [False, False]
    with pytest.raises(ValueError, match="expected `mask` to be 0 or 1, got 2"):
        check_zero_one("mask", x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not values_can_be_checked(x)
