"""InfoNCE: its formula, its theorems, its edges."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sparse_losses.functional import info_nce_from_scores, info_nce_loss
from tests.cases import assert_follows_the_formula
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
    tensors.pop("positive_ids", None)  # without duplicates, a row with a rival costs something
    tensors.pop("positive_mask", None)
    rows = info_nce_loss(**tensors, **{**options, "temperature": 9.0}, reduction="none")
    assert ((rows > 0) == (len(rows) > 1 or "negative" in tensors)).all()


@given(seeds, temperatures)
def test_it_is_cross_entropy_with_the_diagonal_as_label(seed, temperature):
    a, p = draw(seed, 5, 4), draw(seed + 1, 5, 4)
    scores = torch.nn.functional.normalize(a) @ torch.nn.functional.normalize(p).T / temperature
    expected = torch.nn.functional.cross_entropy(scores, torch.arange(5))
    torch.testing.assert_close(info_nce_loss(a, p, temperature=temperature), expected)


@given(seeds, temperatures)
def test_decoupling_lowers_every_row(seed, temperature):
    a, p = draw(seed, 4, 3), draw(seed + 1, 4, 3)
    options = {"temperature": temperature, "reduction": "none"}
    plain, decoupled = (info_nce_loss(a, p, decoupled=d, **options) for d in (False, True))
    assert (decoupled <= plain).all()
    # exp(plain) = 1 + exp(decoupled): the same odds, with and without the positive
    torch.testing.assert_close(plain, torch.nn.functional.softplus(decoupled, threshold=700))


@given(seeds, st.floats(1e-3, 1e3))
def test_cosine_does_not_see_the_length_of_a_vector(seed, scale):
    a, p, n = draw(seed, 4, 3), draw(seed + 1, 4, 3), draw(seed + 2, 2, 3)
    stretched = info_nce_loss(a * scale, p / scale, n * scale**0.5)
    torch.testing.assert_close(stretched, info_nce_loss(a, p, n))
    assert stretched > 0


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


@given(seeds)
def test_the_gradients_of_all_candidates_of_a_row_cancel(seed):
    a, p, n = draw(seed, 4, 3), draw(seed + 1, 4, 3), draw(seed + 2, 2, 3)
    p.requires_grad_()
    n.requires_grad_()
    info_nce_loss(a, p, n, similarity="dot", temperature=0.7, reduction="sum").backward()
    torch.testing.assert_close(
        p.grad.sum(0) + n.grad.sum(0), torch.zeros(3).double(), rtol=0, atol=1e-12
    )
    assert p.grad.any()


# Symmetry


@given(seeds)
def test_symmetric_is_the_mean_of_both_directions(seed):
    a, p, n = draw(seed, 4, 3), draw(seed + 1, 4, 3), draw(seed + 2, 2, 3)
    both = (info_nce_loss(a, p, n) + info_nce_loss(p, a, n)) / 2
    assert both > 0
    torch.testing.assert_close(info_nce_loss(a, p, n, symmetric=True), both)
    torch.testing.assert_close(info_nce_loss(p, a, n, symmetric=True), both)


# Several positives and false negatives


def test_a_duplicate_of_the_positive_is_not_a_negative():
    a, p = draw(0, 3, 4), draw(1, 3, 4)
    p[1] = p[0]
    rows = info_nce_loss(a, p, positive_ids=torch.tensor([5, 5, 6]), reduction="none")
    alone = info_nce_loss(a[[0, 2]], p[[0, 2]], reduction="none")
    torch.testing.assert_close(rows[0], alone[0])
    assert info_nce_loss(a, p, reduction="none")[0] > rows[0]


# Decoupled


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_decoupled_raw_dots_are_unbounded_below(scale):
    x = torch.eye(3, dtype=torch.float64) * scale
    loss = info_nce_loss(x, x, similarity="dot", temperature=1.0, decoupled=True)
    assert loss.item() == pytest.approx(math.log(2) - scale**2)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_ids_hide_no_nan_outside_the_batch(similarity):
    a, p, n = draw(0, 3, 4), draw(1, 3, 4), draw(2, 2, 4)
    p[1, 0] = torch.nan
    options = {"in_batch": False, "positive_ids": torch.tensor([0, 1, 1]), "reduction": "none"}
    rows = info_nce_loss(a, p, n, similarity=similarity, **options)
    assert rows.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"positive_mask": torch.eye(3)}])
def test_outside_the_batch_there_are_negatives_and_no_positive_mask(options):
    a, p, n = draw(0, 3, 4), draw(1, 3, 4), draw(2, 2, 4)
    name = "positive_mask" if "positive_mask" in options else "in_batch"
    with pytest.raises(ValueError, match=name):
        info_nce_loss(a, p, n if name == "positive_mask" else None, in_batch=False, **options)


def test_vectors_without_a_dimension_are_all_alike():
    nothing = torch.zeros(4, 0)
    assert info_nce_loss(nothing, nothing).item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("temperature", [1e39, 1e-40])
def test_a_temperature_beyond_single_precision_is_left_to_the_definition(temperature):
    a, p = draw(0, 3, 4).float().requires_grad_(), draw(1, 3, 4).float()
    with pytest.raises(ValueError, match=r"expected `temperature` from .+ to .+, got"):
        info_nce_loss(a, p, temperature=temperature, impl="direct")
    torch.testing.assert_close(
        info_nce_loss(a, p, temperature=temperature),
        info_nce_loss(a, p, temperature=temperature, impl="definition"),
        equal_nan=True,
    )


def test_what_is_no_candidate_hides_its_nan_from_a_decoupled_row():
    scores = torch.tensor([[1.0, 2.0, torch.nan]], requires_grad=True)
    positive, candidates = torch.tensor([[1, 0, 0]]), torch.tensor([[1, 1, 0]])
    value = info_nce_from_scores(scores, positive, candidates, decoupled=True)
    value.backward()
    assert value == 1.0
    assert scores.grad.tolist() == [[-1.0, 1.0, 0.0]]
