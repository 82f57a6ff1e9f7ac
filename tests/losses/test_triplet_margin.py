"""Triplet margin: its formula, its theorems, its edges."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import triplet_margin_loss
from tests.cases import assert_follows_the_formula
from tests.strategies import draw, seeds, sizes, vectors

kinds = st.sampled_from(["cosine", "dot", "euclidean"])
margins = st.floats(0.0, 4.0)


@given(st.data(), sizes, st.integers(0, 3), kinds, margins)
def test_value_is_the_formula_for_any_negatives(data, batch, count, kind, margin):
    arrays = {name: data.draw(vectors(batch, 3)) for name in ("anchor", "positive")}
    flat = data.draw(vectors(batch * max(count, 1), 3))
    arrays["negative"] = flat if count == 0 else flat.reshape(batch, count, 3)
    if count and data.draw(st.booleans()):
        arrays["candidate_mask"] = np.random.default_rng(batch).random((batch, count)) < 0.6
    assert_follows_the_formula("triplet_margin", arrays, similarity=kind, margin=margin)


def test_a_mask_is_of_several_negatives():
    with pytest.raises(ValueError, match="candidate_mask"):
        triplet_margin_loss(*draw(0, 3, 3, 4), candidate_mask=torch.ones(3, 1))


@given(seeds, st.floats(0.01, 4.0))
def test_euclidean_is_torchs_triplet_loss_on_squared_distances(seed, margin):
    a, p, n = draw(seed, 4, 3), draw(seed + 1, 4, 3), draw(seed + 2, 4, 3)
    expected = torch.nn.functional.triplet_margin_with_distance_loss(
        a, p, n, distance_function=lambda x, y: (x - y).square().sum(-1), margin=margin
    )
    loss = triplet_margin_loss(a, p, n, similarity="euclidean", margin=margin)
    torch.testing.assert_close(loss, expected)


@given(seeds, kinds, margins)
def test_it_is_zero_without_gradient_once_the_gap_exceeds_the_margin(seed, kind, margin):
    a, p, n = draw(seed, 6, 3).requires_grad_(), draw(seed + 1, 6, 3), draw(seed + 2, 6, 3)
    rows = triplet_margin_loss(a, p, n, similarity=kind, margin=margin, reduction="none")
    rows.sum().backward()
    assert not a.grad[rows == 0].any()
    assert (a.grad[rows > 1e-9].abs().sum(-1) > 0).all()
