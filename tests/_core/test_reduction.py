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


def test_the_only_row_of_all_ranks_is_the_mean(monkeypatch):
    monkeypatch.setattr(reduction, "num_ranks", lambda: 2)
    monkeypatch.setattr(reduction, "sum_over_ranks", lambda sums: sums)  # the other has none
    assert reduce(VALUES[1:2], "mean", gather=True).item() == 2.0
    assert reduce(VALUES, "mean", torch.tensor([False, False, True]), gather=True).item() == 4.0
