"""InfoNCE: its formula, its theorems, its edges."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sparse_losses.functional import false_negative_mask, info_nce_from_scores, info_nce_loss
from tests import oracles
from tests.cases import assert_follows_the_formula
from tests.instruments import value_and_gradients
from tests.strategies import draw, info_nce_problems, seeds, temperatures


@given(info_nce_problems())
def test_value_is_the_formula_for_any_options(problem):
    arrays, options = problem
    assert_follows_the_formula("info_nce", arrays, **options)


@given(info_nce_problems())
def test_it_is_never_negative_with_the_positive_in_the_denominator(problem):
    arrays, options = problem
    assume(not options["decoupled"])
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    rows = info_nce_loss(**tensors, **options, reduction="none")
    assert (rows >= 0).all()
    # With nothing left out, a row with a rival costs something.
    tensors = {k: x for k, x in tensors.items() if k in ("anchor", "positive", "negative")}
    whole = {"temperature": 9.0, "false_negative_margin": None, "false_negative_ratio": None}
    rows = info_nce_loss(**tensors, **{**options, **whole}, reduction="none")
    assert ((rows > 0) == (len(rows) > 1 or "negative" in tensors)).all()


@given(seeds, temperatures)
def test_decoupling_lowers_every_row(seed, temperature):
    a, p = draw(seed, 4, 3), draw(seed + 1, 4, 3)
    options = {"temperature": temperature, "reduction": "none"}
    plain, decoupled = (info_nce_loss(a, p, decoupled=d, **options) for d in (False, True))
    assert (decoupled <= plain).all()
    # exp(plain) = 1 + exp(decoupled): the same odds, with and without the positive
    torch.testing.assert_close(plain, torch.nn.functional.softplus(decoupled, threshold=700))


@given(seeds, st.floats(1e-4, 1e-2))
def test_the_cold_limit_is_the_gap_to_the_hardest_negative(seed, temperature):
    a, p = draw(seed, 5, 3), draw(seed + 1, 5, 3)
    scores = torch.nn.functional.normalize(a) @ torch.nn.functional.normalize(p).T
    hardest = scores.masked_fill(torch.eye(5, dtype=torch.bool), -2).amax(dim=1)
    gap = (hardest - scores.diagonal()).clamp(min=0)
    loss = temperature * info_nce_loss(a, p, temperature=temperature, reduction="none")
    assert (loss >= gap - 1e-12).all()
    assert (loss <= gap + temperature * math.log(5) + 1e-12).all()


@given(seeds, st.integers(1, 6), st.integers(0, 4))
def test_the_hot_limit_is_the_logarithm_of_the_number_of_candidates(seed, batch, extra):
    a, p, n = draw(seed, batch, 3), draw(seed + 1, batch, 3), draw(seed + 2, extra, 3)
    loss = info_nce_loss(a, p, n, temperature=1e7)
    assert loss.item() == pytest.approx(math.log(batch + extra), abs=1e-5)


T = torch.tensor(0.07, dtype=torch.float64)
over_impls = pytest.mark.parametrize("impl", ["definition", "direct", "blocks", "nonzeros"])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", [(3,), (5, 3)], ids=["shared", "per_row"])
@pytest.mark.parametrize("symmetric", [False, True])
@over_impls
def test_what_is_left_out_hides_its_nan_and_has_no_gradient(impl, symmetric, shape, value):
    """A text that misses, as anchor, positive and negative: a batch without it."""
    if impl == "nonzeros" and len(shape) == 2:
        return
    a, p, n = draw(0, 5, 4), draw(1, 5, 4), draw(2, *shape, 4)
    options = {"symmetric": symmetric, "impl": impl}
    negative = n[:2] if len(shape) == 1 else n[:4, :2]
    expected = info_nce_loss(a[:4], p[:4], negative, temperature=T, **options)
    mask = torch.ones(5, 8)
    mask[4], mask[:, 4], mask[:, 7] = 0, 0, 0
    a[4], p[4, 1], n[..., 2, 0] = value, value, value
    options |= {"candidate_mask": mask}
    loss, *gradients, slope = value_and_gradients(
        lambda *x: info_nce_loss(*x[:3], temperature=x[3], **options), a, p, n, T
    )
    torch.testing.assert_close(loss, expected)
    assert slope.isfinite()
    for gradient, row in zip(gradients, (4, 4, 2), strict=True):
        assert gradient.isfinite().all()
        absent = gradient[..., 2, :] if row == 2 else gradient[4]
        assert not absent.any()
        assert gradient[:row].any(-1).sum() >= row


@given(seeds, st.floats(-1, 1) | st.none(), st.floats(0, 1.5) | st.none(), st.sampled_from([4, 6]))
def test_false_negative_mask_is_the_formula(seed, margin, ratio, width):
    assume(margin is not None or ratio is not None)
    rng = np.random.default_rng(seed)
    scores, positives = rng.normal(size=(4, width)), rng.random((4, width)) < 0.3
    for mask in [positives] if width != 4 else [positives, None]:
        expected = oracles.false_negative_mask(scores, mask, margin=margin, ratio=ratio)
        tensors = (x if x is None else torch.from_numpy(x) for x in (scores, mask))
        result = false_negative_mask(*tensors, margin=margin, ratio=ratio)
        assert result.dtype == torch.bool
        np.testing.assert_array_equal(result.numpy(), expected)


def test_false_negative_mask_keeps_what_is_at_the_bound_and_nan():
    scores = torch.tensor([[1.0, 1.5, 1.5001, torch.nan]])
    positive = torch.tensor([[1, 0, 0, 0]])
    for bound in ({"margin": 0.5}, {"ratio": 1.5}, {"margin": 0.5, "ratio": 9.0}):
        assert false_negative_mask(scores, positive, **bound).int().tolist() == [[1, 1, 0, 1]]
    below_zero = false_negative_mask(scores - 2.0, positive, ratio=0.0)
    assert below_zero.all(), "a ratio of a negative score bounds nothing"
    for no_number in (torch.tensor([[0, 0, 0, 1]]), torch.zeros(1, 4)):  # a NaN, none
        assert false_negative_mask(scores, no_number, margin=0.0).all()
    assert false_negative_mask(torch.zeros(0, 0), margin=0.0).shape == (0, 0)


@given(seeds)
def test_a_higher_bound_keeps_more_negatives(seed):
    a, p = draw(seed, 5, 3), draw(seed + 1, 5, 3)
    options = {"temperature": 0.3, "symmetric": True, "reduction": "none"}
    margins = -9.0, -0.2, 0.1, 0.4, 9.0
    rows = [info_nce_loss(a, p, **options, false_negative_margin=m) for m in margins]
    assert not rows[0].any(), "only the positive is left"
    assert all((low <= high).all() for low, high in itertools.pairwise(rows))
    torch.testing.assert_close(rows[-1], info_nce_loss(a, p, **options))


@given(seeds, temperatures)
def test_from_all_of_the_batch_it_is_the_improved_contrastive_loss_of_gte(seed, temperature):
    """Cross-entropy over documents, other queries, and other documents seen from the positive."""
    a, p = (torch.nn.functional.normalize(draw(s, 4, 3)) for s in (seed, seed + 1))
    off = torch.eye(4, dtype=torch.bool)
    both = [(x @ x.T).masked_fill(off, -torch.inf) for x in (a, p)]
    scores = torch.cat([a @ p.T, *both], dim=1) / temperature
    expected = torch.nn.functional.cross_entropy(scores, torch.arange(4))
    sources = ("query", "positive", "document")
    value = info_nce_loss(a, p, temperature=temperature, negatives_from=sources)
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_ids_hide_no_nan_outside_the_batch(similarity):
    a, p, n = draw(0, 3, 4), draw(1, 3, 4), draw(2, 2, 4)
    p[1, 0] = torch.nan
    options = {"in_batch": False, "positive_ids": torch.tensor([0, 1, 1]), "reduction": "none"}
    rows = info_nce_loss(a, p, n, similarity=similarity, **options)
    assert rows.isnan().tolist() == [False, True, False]


OUTSIDE, MASK = {"in_batch": False}, torch.ones(3, 4)
WRONG = [  # the shape of the negatives, other arguments, and what the error says
    (None, {"candidate_mask": MASK}, r"`candidate_mask` of shape \[3, 3\], .* got \[3, 4\]"),
    ((2, 4), {"candidate_mask": MASK}, r"\[3, 5\], columns for 3 positives and 2 negatives"),
    ((3, 2, 4), {"candidate_mask": MASK} | OUTSIDE, "for 1 positives and 2 negatives"),
    ((2, 4), {"positive_mask": torch.eye(3)} | OUTSIDE, "positive_mask"),
    (None, OUTSIDE, "in_batch"),
    (None, {"symmetric": True} | OUTSIDE, "in_batch"),
]


@pytest.mark.parametrize(("shape", "options", "message"), WRONG)
def test_masks_fit_the_candidates_and_outside_the_batch_there_are_negatives(
    shape, options, message
):
    negative = None if shape is None else torch.rand(shape)
    with pytest.raises(ValueError, match=message):
        info_nce_loss(torch.rand(3, 4), torch.rand(3, 4), negative, **options)


def test_false_negative_mask_needs_a_bound_and_positives():
    for size, bounds, name in (((2, 2), {}, "margin"), ((2, 3), {"margin": 0.1}, "positive_mask")):
        with pytest.raises(ValueError, match=name):
            false_negative_mask(torch.zeros(size), **bounds)


def test_vectors_without_a_dimension_are_all_alike():
    nothing = torch.zeros(4, 0)
    assert info_nce_loss(nothing, nothing).item() == pytest.approx(math.log(4))


def test_a_nan_shows_where_the_positive_is_the_only_candidate():
    nan = torch.tensor([[torch.nan]])
    assert info_nce_from_scores(nan, torch.ones(1, 1)).isnan()
    pair = torch.tensor([[torch.nan, 1.0]])
    mask = torch.tensor([[1, 0]])
    assert info_nce_from_scores(pair, mask, candidate_mask=mask).isnan()
