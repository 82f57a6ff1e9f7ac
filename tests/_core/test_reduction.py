"""Reduction of row values: which rows count, and the divisor, on one rank and several.

The second rank is a stand-in (`monkeypatch`): a real one would need a process.
"""

import pytest
import torch

from sparse_losses._core import reduction
from sparse_losses._core.reduction import reduce

VALUES = torch.tensor([1.0, 2.0, 4.0])
VALID = torch.tensor([True, False, True])
NONE = torch.zeros(3, dtype=torch.bool)


@pytest.fixture
def two_ranks(monkeypatch):
    """Another rank with the same rows, whose values are ten times as large."""
    monkeypatch.setattr(reduction, "num_ranks", lambda: 2)

    def sums(x):
        return torch.stack([11 * x[0], 2 * x[1]]) if x.ndim else 11 * x

    monkeypatch.setattr(reduction, "sum_over_ranks", sums)


@pytest.mark.parametrize("gather", [False, True])
def test_on_one_rank(gather):
    def value(reduction, valid=None):
        return reduce(VALUES, reduction, valid, gather).tolist()

    assert (value("none"), value("sum"), value("mean")) == ([1, 2, 4], 7, pytest.approx(7 / 3))
    assert (value("none", VALID), value("sum", VALID), value("mean", VALID)) == ([1, 0, 4], 5, 2.5)
    assert (value("none", NONE), value("sum", NONE), value("mean", NONE)) == ([0, 0, 0], 0, 0)


def test_on_two_ranks(two_ranks):
    def value(reduction, valid=None):
        return reduce(VALUES, reduction, valid, True).tolist()

    assert (value("none"), value("sum"), value("mean")) == ([1, 2, 4], 77, pytest.approx(77 / 6))
    assert (value("none", VALID), value("sum", VALID), value("mean", VALID)) == (
        [1, 0, 4],
        55,
        55 / 4,
    )
    assert (value("sum", NONE), value("mean", NONE)) == (0, 0)
    assert reduce(VALUES, "sum").item() == 7
    assert reduce(VALUES, "mean", VALID).item() == 2.5


def test_the_only_row_of_all_ranks_is_the_mean(monkeypatch):
    monkeypatch.setattr(reduction, "num_ranks", lambda: 2)
    monkeypatch.setattr(reduction, "sum_over_ranks", lambda sums: sums)  # the other has none
    assert reduce(VALUES[1:2], "mean", gather=True).item() == 2.0
    assert reduce(VALUES, "mean", torch.tensor([False, False, True]), gather=True).item() == 4.0


def test_a_mean_of_one_row_or_none():
    for values, expected in ((VALUES[:1], 1.0), (VALUES[:0], 0.0)):
        values = values.clone().requires_grad_()
        mean = reduce(values, "mean")
        assert mean.item() == expected
        assert torch.autograd.grad(mean, values)[0].tolist() == [1.0] * len(values)


def test_a_nan_shows_where_its_row_is_valid():
    values = torch.tensor([1.0, torch.nan, 4.0])
    assert reduce(values, "mean", VALID).item() == 2.5
    assert reduce(values, "mean", ~VALID).isnan()
    assert reduce(values, "mean").isnan()


def test_rows_that_are_0_already_are_not_copied():
    values = torch.tensor([1.0, 0.0, 4.0])
    assert reduce(values, "none", VALID, zeroed=True) is values
    assert reduce(values, "none", VALID) is not values
    assert reduce(values, "none") is values
    assert reduce(values, "mean", VALID, zeroed=True).item() == 2.5
