"""Positive activation: its formula, its theorems, its edges."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import positive_activation_loss
from tests.cases import assert_follows_the_formula, to_tensors
from tests.instruments import Recorder, value_and_gradients
from tests.strategies import multi_hot, token_problems

problems = token_problems(prefix="positive_")
weighted = token_problems(weight=True, prefix="positive_")


@given(weighted, st.booleans())
def test_value_is_the_formula_for_any_tokens(problem, saturating):
    arrays, options = problem
    assert_follows_the_formula("positive_activation", arrays, saturating=saturating, **options)


@given(problems, st.floats(0.1, 10.0))
def test_it_is_linear_and_unbounded_below(problem, scale):
    inputs = to_tensors(problem[0])
    plain = positive_activation_loss(**inputs)
    inputs["activations"] = inputs["activations"] * scale
    torch.testing.assert_close(positive_activation_loss(**inputs), plain * scale)
    inputs["activations"] = multi_hot(inputs, "positive_") * 1e6
    value = positive_activation_loss(**inputs).item()
    assert value == (pytest.approx(-1e6) if inputs["positive_attention_mask"].any() else 0.0)


@given(problems)
def test_saturating_is_positive_and_fades(problem):
    inputs = to_tensors(problem[0])
    some = multi_hot(inputs, "positive_").any(-1)
    rows = positive_activation_loss(**inputs, saturating=True, reduction="none")
    assert (rows[some] > 0).all()
    assert not rows[~some].any()
    inputs["activations"] = (multi_hot(inputs, "positive_") * 800).requires_grad_()
    loss = positive_activation_loss(**inputs, saturating=True)
    loss.backward()
    assert loss.item() == 0.0
    assert not inputs["activations"].grad.any()


@given(problems, st.booleans(), st.floats(0.01, 100.0))
def test_a_constant_weight_changes_nothing(problem, saturating, weight):
    inputs = to_tensors(problem[0])
    plain = positive_activation_loss(**inputs, saturating=saturating, reduction="none")
    inputs["token_weight"] = torch.full((inputs["activations"].shape[1],), weight).double()
    torch.testing.assert_close(
        positive_activation_loss(**inputs, saturating=saturating, reduction="none"), plain
    )
    assert not saturating or torch.equal(plain > 0, multi_hot(inputs, "positive_").any(-1))


@given(problems, st.booleans())
def test_a_token_of_weight_zero_is_an_ignored_token(problem, saturating):
    arrays, _ = problem
    inputs = to_tensors(arrays)
    ignored = positive_activation_loss(**inputs, ignore_token_ids=[0], saturating=saturating)
    assert not saturating or (ignored > 0) == multi_hot(inputs, "positive_")[:, 1:].any()
    inputs["token_weight"] = (torch.arange(inputs["activations"].shape[1]) > 0).double()
    torch.testing.assert_close(positive_activation_loss(**inputs, saturating=saturating), ignored)


def test_weights_of_any_ratio_are_those_of_the_formula():
    """The smallest and nearly the largest number of fp32, in one row and in different rows."""
    ids, weight = torch.tensor([[0, 1, 0], [0, 2, 2], [3, 0, 3]]), [1e-45, 3e38, 1e-45, 1.0]
    call, options = (ids, torch.ones_like(ids), torch.tensor(weight)), {"reduction": "none"}
    x = torch.tensor([[1.0, 2.0, 4.0, 8.0]]).repeat(3, 1).requires_grad_()
    loss = positive_activation_loss(x, *call, **options)
    assert loss.tolist() == pytest.approx([-2.0, -2.5, -8.0])
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    expected = torch.tensor([[0.0, -1, 0, 0], [-0.5, 0, -0.5, 0], [0, 0, 0, -1]])
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("saturating", [True, False])
def test_only_the_gradient_is_as_large_as_the_activations(saturating):
    batch, length, vocab = 8, 10, 4000
    x = torch.rand(batch, vocab, requires_grad=True)
    ids, weight = torch.randint(0, vocab, (batch, length)), torch.rand(vocab)
    with Recorder() as seen:
        ones = torch.ones_like(ids)
        value = positive_activation_loss(x, ids, ones, weight, saturating=saturating)
        assert 0 < seen.largest < batch * vocab
        value.backward()
    assert x.grad.any()
    assert seen.largest == batch * vocab


@pytest.mark.parametrize(("saturating", "slopes"), [(False, [0.0, 0.5, -0.5]), (True, None)])
def test_weights_are_learned_but_not_from_a_row_without_weight(saturating, slopes):
    """The weighted mean of 3 and 5 moves by half of its distance to each."""
    x, ids = torch.tensor([[7.0, 3.0, 5.0]] * 2), torch.tensor([[1, 2, 2], [0, 0, 0]])
    _, slope = value_and_gradients(
        lambda w: positive_activation_loss(x, ids, torch.ones(2, 3), w, saturating=saturating),
        torch.tensor([0.0, 1.0, 1.0]),
    )
    assert slopes is None or slope.tolist() == pytest.approx(slopes)
    assert slope[1:].all()
    assert slope[0] == 0
    assert slope.isfinite().all()
