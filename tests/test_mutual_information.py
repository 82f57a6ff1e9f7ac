"""The lower bound on mutual information that InfoNCE gives."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import info_nce_loss, mutual_information_lower_bound
from tests import oracles
from tests.strategies import seeds


@given(st.floats(-100.0, 50.0), st.integers(1, 10**6))
def test_it_is_the_logarithm_of_the_candidates_minus_the_loss(loss, candidates):
    bound = mutual_information_lower_bound(torch.tensor(loss, dtype=torch.float64), candidates)
    expected = oracles.mutual_information_lower_bound(loss, candidates)
    assert float(bound) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert float(bound) <= math.log(candidates)


def information(joint):
    """The mutual information of a table of probabilities, by enumeration, in nats."""
    apart = joint.sum(1, keepdim=True) * joint.sum(0)
    return float((joint * (joint / apart).log()).nansum())


def loss_of(x, y, scores, **options):
    """InfoNCE of symbols `x` sent and `y` received whose similarity is `scores[x, y]`."""
    anchor = torch.eye(len(scores), dtype=scores.dtype)[x]
    options = {"temperature": 1.0, "similarity": "dot"} | options
    return info_nce_loss(anchor, scores.T[y], **options)


@given(seeds, st.sampled_from([2, 3]), st.booleans(), st.booleans())
def test_over_all_batches_it_is_at_most_the_information(seed, size, symmetric, is_best):
    """Exactly: every batch of two or three pairs there is, weighed by its probability."""
    rng = np.random.default_rng(seed)
    joint = torch.from_numpy(rng.dirichlet(np.full(4, 0.5)).reshape(2, 2)).clamp(min=1e-9)
    joint = joint / joint.sum()
    if is_best:
        scores = (joint / (joint.sum(1, keepdim=True) * joint.sum(0))).log()
    else:
        scores = torch.from_numpy(rng.normal(size=(2, 2), scale=3.0))
    expected = 0.0
    for batch in itertools.product(itertools.product(range(2), repeat=2), repeat=size):
        x, y = (list(side) for side in zip(*batch, strict=True))
        expected += float(joint[x, y].prod() * loss_of(x, y, scores, symmetric=symmetric))
    bound = float(mutual_information_lower_bound(expected, size))
    assert bound <= information(joint) + 1e-9


@pytest.mark.parametrize("broken", ["mined negatives", "ids", "decoupled"])
def test_other_forms_of_info_nce_give_no_bound(broken):
    """A fair coin that comes through tells log 2 and no more."""
    scores = 20 * torch.eye(2, dtype=torch.float64)
    bounds = {}
    for name in ("plain", broken):
        losses = []
        for bits in itertools.product([0, 1], repeat=8):
            x = torch.tensor(bits)
            options = {}
            if name == "mined negatives":  # from the texts known to be wrong, not from all
                options = {"negative": scores.T[1 - x][:, None].expand(-1, 7, -1)}
                options["in_batch"] = False
            elif name == "ids":
                options = {"positive_ids": x}
            elif name == "decoupled":
                options = {"decoupled": True}
            losses.append(loss_of(x, x, scores, **options))
        bounds[name] = float(mutual_information_lower_bound(torch.stack(losses).mean(), 8))
    assert 0.8 * math.log(2) < bounds["plain"] <= math.log(2) + 1e-9
    assert bounds[broken] > 1.2 * math.log(2)


@pytest.mark.parametrize("count", [0, -3])
def test_without_candidates_it_is_refused(count):
    with pytest.raises(ValueError, match="num_candidates"):
        mutual_information_lower_bound(torch.tensor(1.0), count)


def test_a_number_counts_as_double_precision_and_a_half_is_computed_in_single():
    assert mutual_information_lower_bound(0.5, 8).dtype == torch.float64
    assert mutual_information_lower_bound(torch.tensor(0.5).half(), 8).dtype == torch.float32
    with pytest.raises(TypeError, match="expected `loss` to be a number, got list"):
        mutual_information_lower_bound([0.5], 8)
