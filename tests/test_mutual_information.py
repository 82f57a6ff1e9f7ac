"""The lower bound on mutual information that InfoNCE gives."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparse_losses
from sparse_losses.functional import info_nce_loss, mutual_information_lower_bound
from tests import oracles


@given(st.floats(0.0, 50.0), st.integers(1, 10**6))
def test_it_is_the_logarithm_of_the_candidates_minus_the_loss(loss, candidates):
    bound = mutual_information_lower_bound(torch.tensor(loss, dtype=torch.float64), candidates)
    expected = oracles.mutual_information_lower_bound(loss, candidates)
    assert float(bound) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert float(bound) <= math.log(candidates)


def test_perfect_pairs_reach_the_cap_and_random_ones_tell_nothing():
    x = torch.eye(64, dtype=torch.float64)
    loss = info_nce_loss(x, x, temperature=0.01)
    assert float(mutual_information_lower_bound(loss, 64)) == pytest.approx(4.158883, abs=1e-6)
    same = torch.ones(64, 2, dtype=torch.float64)
    assert float(mutual_information_lower_bound(info_nce_loss(same, same), 64)) == pytest.approx(
        0.0
    )


def test_a_loss_below_zero_is_capped():
    assert float(mutual_information_lower_bound(torch.tensor(-95.0), 64)) == pytest.approx(
        math.log(64)
    )


def test_one_candidate_tells_nothing():
    assert float(mutual_information_lower_bound(torch.tensor(0.0), 1)) == 0.0


@pytest.mark.parametrize("count", [0, -3])
def test_without_candidates_it_is_refused(count):
    with pytest.raises(ValueError, match="num_candidates"):
        mutual_information_lower_bound(torch.tensor(1.0), count)


def test_a_nan_is_not_hidden():
    assert math.isnan(float(mutual_information_lower_bound(torch.tensor(math.nan), 8)))


def test_it_lives_in_functional_beside_the_losses():
    assert "mutual_information_lower_bound" in sparse_losses.functional.__all__
