"""What is reported beside the losses: recall, overlap of contexts, a bound on information."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import mutual_information_lower_bound
from sparse_losses.metrics import context_overlap, recall_at_k


def test_the_overlap_of_contexts():
    one = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4, [2.0, 0, 0, 1.0]])
    other = torch.tensor([[0.0, 3.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0] * 4, [1.0, 0, 0, 9.0]])
    torch.testing.assert_close(context_overlap(one, other), torch.tensor([0.25, 0.0, 0.0, 1.0]))


def recall(scores, positive, k):
    """Loops over the positives of each query; half of the tied candidates rank above."""
    shares = []
    for row, wanted in zip(scores, positive, strict=True):
        hits = 0
        for own in (score for score, is_wanted in zip(row, wanted, strict=True) if is_wanted):
            above, tied = sum(s > own for s in row), sum(s == own for s in row) - 1
            hits += 1 + above + tied / 2 <= k
        if any(wanted):
            shares.append(hits / sum(wanted))
    return sum(shares) / len(shares) if shares else 0.0


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_recall_counts_positives_among_the_best(seed, k):
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.rand(5, 6, generator=generator) * 4).round()  # with ties
    positive = torch.randint(0, 2, (5, 6), generator=generator)
    positive[0] = 0
    expected = recall(scores.tolist(), positive.tolist(), k)
    assert recall_at_k(scores, positive, k).item() == pytest.approx(expected, abs=1e-6)


def test_recall_of_one_positive_a_query():
    scores = torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.3, 0.9], [0.1, 0.2, 0.3]])
    positive = torch.tensor([0, 1, 0])
    recalls = [recall_at_k(scores, positive, k).item() for k in (1, 2, 3)]
    assert recalls == pytest.approx([1 / 3, 2 / 3, 1.0])
    with pytest.raises(ValueError, match="at most C = 3, got 4"):
        recall_at_k(scores, positive, 4)


@given(st.floats(-100.0, 50.0), st.integers(1, 10**6))
def test_the_bound_is_the_logarithm_of_the_candidates_minus_the_loss(loss, candidates):
    bound = mutual_information_lower_bound(torch.tensor(loss, dtype=torch.float64), candidates)
    most = math.log(candidates)
    assert float(bound) == pytest.approx(min(most - loss, most), rel=1e-12, abs=1e-12)
    assert float(bound) <= most


def test_a_number_counts_as_double_precision_and_a_half_is_computed_in_single():
    assert mutual_information_lower_bound(0.5, 8).dtype == torch.float64
    assert mutual_information_lower_bound(torch.tensor(0.5).half(), 8).dtype == torch.float32
    for arguments, name in ((([0.5], 8), "`loss`"), ((0.5, 0), "num_candidates")):
        with pytest.raises((TypeError, ValueError), match=name):
            mutual_information_lower_bound(*arguments)
