"""Where checks look at values."""

import pytest
import torch

from sparse_losses._core.checks import check_zero_one, values_can_be_checked


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
