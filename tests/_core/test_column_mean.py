"""Column means and their squares, here and over ranks."""

import pytest
import torch

from sparse_losses._core import column_mean
from sparse_losses._core.column_mean import mean_and_square

X = torch.tensor([[1.0, 0.0], [3.0, 5.0]])


@pytest.fixture
def two_ranks(monkeypatch):
    """Another rank with the same rows; what is exchanged is written down."""
    exchanged = []

    def double(sums):
        exchanged.append(sums)
        return 2 * sums

    monkeypatch.setattr(column_mean, "num_ranks", lambda: 2)
    monkeypatch.setattr(column_mean, "sum_over_ranks", double)
    return exchanged


def test_over_two_ranks_only_column_sums_are_exchanged(two_ranks):
    both = X.repeat(2, 1)
    for estimator, rows in (("biased", 1), ("unbiased", 2)):
        expected = mean_and_square(both, estimator, gather=False)
        assert two_ranks == []
        torch.testing.assert_close(mean_and_square(X, estimator, gather=True), expected)
        assert two_ranks.pop().shape == (rows, 2)


def test_one_row_that_holds_nearly_all_leaves_the_digits_of_the_others():
    x = torch.full((64, 1), 1e-3)
    x[0] = 1e4
    mean, square = mean_and_square(x, "unbiased", gather=False)
    wide = x.double()
    pairs = wide.sum().square() - wide.square().sum()
    assert mean.dtype == square.dtype == torch.float32
    assert mean.item() == pytest.approx(wide.mean().item(), rel=1e-6)
    assert square.item() == pytest.approx(pairs.item() / (64 * 63), rel=1e-6)
