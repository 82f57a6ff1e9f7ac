"""The lower bound on mutual information that InfoNCE gives."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import mutual_information_lower_bound
from tests import oracles


@given(st.floats(-100.0, 50.0), st.integers(1, 10**6))
def test_it_is_the_logarithm_of_the_candidates_minus_the_loss(loss, candidates):
    bound = mutual_information_lower_bound(torch.tensor(loss, dtype=torch.float64), candidates)
    expected = oracles.mutual_information_lower_bound(loss, candidates)
    assert float(bound) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert float(bound) <= math.log(candidates)


def test_a_number_counts_as_double_precision_and_a_half_is_computed_in_single():
    assert mutual_information_lower_bound(0.5, 8).dtype == torch.float64
    assert mutual_information_lower_bound(torch.tensor(0.5).half(), 8).dtype == torch.float32
    with pytest.raises(TypeError, match="expected `loss` to be a number, got list"):
        mutual_information_lower_bound([0.5], 8)
    with pytest.raises(ValueError, match="num_candidates"):
        mutual_information_lower_bound(torch.tensor(1.0), 0)
