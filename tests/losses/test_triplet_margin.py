"""Triplet margin: its formula, its theorems, its edges."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import triplet_margin_loss
from tests.cases import assert_follows_the_formula, cases_of
from tests.strategies import seeds, sizes, vectors

kinds = st.sampled_from(["cosine", "dot", "euclidean"])
margins = st.floats(0.0, 4.0)


@pytest.mark.parametrize("case", cases_of("triplet_margin"), ids=lambda c: c.name)
def test_value_is_the_formula(case):
    assert_follows_the_formula("triplet_margin", case.arrays(), **case.kwargs)


@given(st.data(), sizes, st.integers(0, 3), kinds, margins)
def test_value_is_the_formula_for_any_negatives(data, batch, count, kind, margin):
    arrays = {name: data.draw(vectors(batch, 3)) for name in ("anchor", "positive")}
    flat = data.draw(vectors(batch * max(count, 1), 3))
    arrays["negative"] = flat if count == 0 else flat.reshape(batch, count, 3)
    assert_follows_the_formula("triplet_margin", arrays, similarity=kind, margin=margin)


def draw(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


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

    def similarity(x, y):
        if kind == "euclidean":
            return -(x - y).square().sum(-1)
        if kind == "cosine":
            return torch.nn.functional.cosine_similarity(x, y)
        return (x * y).sum(-1)

    gap = (similarity(a, p) - similarity(a, n)).detach()
    rows = triplet_margin_loss(a, p, n, similarity=kind, margin=margin, reduction="none")
    torch.testing.assert_close(rows, (margin - gap).clamp(min=0))
    rows.sum().backward()
    satisfied = gap > margin + 1e-9
    assert not rows[satisfied].any()
    assert not a.grad[satisfied].any()
    assert (a.grad[gap < margin - 1e-9].abs().sum(-1) > 0).all()


@given(seeds, kinds, margins, st.floats(0.01, 2.0))
def test_it_is_monotone_and_one_lipschitz_in_the_margin(seed, kind, margin, more):
    a, p, n = draw(seed, 4, 3), draw(seed + 1, 4, 3), draw(seed + 2, 4, 2, 3)
    low, high = (
        triplet_margin_loss(a, p, n, similarity=kind, margin=m, reduction="none")
        for m in (margin, margin + more)
    )
    assert (high >= low).all()
    assert (high <= low + more + 1e-12).all()
    wide = triplet_margin_loss(a, p, n, similarity=kind, margin=1000.0, reduction="none")
    assert (wide > 500).all()


@given(seeds, kinds)
def test_several_negatives_average_their_hinges_not_their_similarities(seed, kind):
    a, p, n = draw(seed, 4, 3), draw(seed + 1, 4, 3), draw(seed + 2, 4, 3, 3)
    each = [triplet_margin_loss(a, p, n[:, k], similarity=kind, reduction="none") for k in range(3)]
    rows = triplet_margin_loss(a, p, n, similarity=kind, reduction="none")
    torch.testing.assert_close(rows, torch.stack(each).mean(0))
    wide = triplet_margin_loss(a, p, n, similarity=kind, margin=1e3, reduction="none")
    assert (wide > 500).all()


@given(seeds)
def test_positive_and_negative_alike_cost_the_margin(seed):
    a, p = draw(seed, 4, 3), draw(seed + 1, 4, 3)
    assert triplet_margin_loss(a, p, p.clone(), margin=0.7).item() == pytest.approx(0.7)


def test_without_negatives_no_row_is_valid():
    a, p = draw(0, 3, 4).requires_grad_(), draw(1, 3, 4)
    loss = triplet_margin_loss(a, p, torch.zeros(3, 0, 4).double())
    loss.backward()
    assert loss.item() == 0.0
    assert not a.grad.any()
    assert triplet_margin_loss(a, p, draw(2, 3, 1, 4), margin=5.0).item() > 0


def test_shared_negatives_are_not_guessed():
    with pytest.raises(ValueError, match="negative"):
        triplet_margin_loss(draw(0, 3, 4), draw(1, 3, 4), draw(2, 2, 4))
