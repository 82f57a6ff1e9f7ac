"""Self-reconstruction: its formula, its theorems, its edges."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits

from sparse_losses.functional import self_reconstruction_loss
from tests.cases import assert_follows_the_formula, to_tensors
from tests.instruments import Recorder, value_and_gradients
from tests.strategies import draw, multi_hot, token_problems


@given(token_problems(), st.booleans())
def test_value_is_the_formula_for_any_tokens(problem, balanced):
    arrays, options = problem
    assert_follows_the_formula("self_reconstruction", arrays, balanced=balanced, **options)


@given(token_problems())
def test_it_is_bce_against_the_dense_multi_hot_target(problem):
    inputs = to_tensors(problem[0])
    x, target = inputs["activations"].requires_grad_(), multi_hot(inputs)
    loss = self_reconstruction_loss(**inputs)
    torch.testing.assert_close(loss, binary_cross_entropy_with_logits(x, target))
    (gradient,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(gradient, (x.detach().sigmoid() - target) / x.numel())


@given(token_problems(), st.booleans())
def test_on_activations_it_cannot_fall_below_its_floor(problem, balanced):
    """`(1 - k / V) log 2` with k own tokens; balanced, half of log 2 where there are others."""
    inputs = to_tensors(problem[0])
    others = (multi_hot(inputs) == 0).double()
    floor = math.log(2) * (others.amax(-1) / 2 if balanced else others.mean(-1))
    options = {"balanced": balanced, "reduction": "none"}
    inputs["activations"] = inputs["activations"].abs()
    assert (self_reconstruction_loss(**inputs, **options) >= floor - 1e-12).all()
    inputs["activations"] = multi_hot(inputs) * 800  # the best that activations can do
    torch.testing.assert_close(self_reconstruction_loss(**inputs, **options), floor)


@given(token_problems(), st.booleans())
def test_an_ignored_token_is_as_if_its_column_were_not_there(problem, balanced):
    arrays, _ = problem
    inputs = to_tensors(arrays)
    last = inputs["activations"].shape[1] - 1
    ignored = self_reconstruction_loss(**inputs, ignore_token_ids=[last], balanced=balanced)
    assert ignored > 0
    inputs["attention_mask"] = inputs["attention_mask"] * (inputs["input_ids"] != last)
    inputs["activations"] = inputs["activations"][:, :-1]
    inputs["input_ids"] = inputs["input_ids"].clamp(max=last - 1)
    torch.testing.assert_close(self_reconstruction_loss(**inputs, balanced=balanced), ignored)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("ignored", [[3], [*range(6)]], ids=["one", "all"])
def test_an_ignored_column_hides_its_nan(balanced, ignored):
    x, ids = draw(0, 2, 6), torch.tensor([[0, 1, 3], [3, 4, 4]])
    options = {"ignore_token_ids": ignored, "balanced": balanced}

    def call(x):
        return self_reconstruction_loss(x, ids, torch.ones_like(ids), **options)

    hidden = x.clone()
    hidden[:, ignored] = torch.nan
    loss, gradient = value_and_gradients(call, hidden)
    torch.testing.assert_close([loss, gradient], value_and_gradients(call, x), rtol=0, atol=0)
    assert (loss > 0) == (ignored == [3])
    assert not gradient[:, ignored].any()


@pytest.mark.parametrize("balanced", [False, True])
def test_an_infinite_score_of_a_target_costs_nothing(balanced):
    """``log(1 + exp(-inf))`` is 0, and so is its slope; other infinite scores cost infinity."""
    x, share = torch.tensor([[torch.inf, 1.0, -torch.inf]]), 1 / 4 if balanced else 1 / 3
    right, wrong = (
        value_and_gradients(
            lambda x, i=i: self_reconstruction_loss(x, i, torch.ones(1, 2), balanced=balanced), x
        )
        for i in torch.tensor([[[0, 0]], [[1, 1]]])
    )
    assert right[0].item() == pytest.approx(share * math.log1p(math.e))
    assert right[1][0].tolist() == pytest.approx([0.0, share / (1 + math.exp(-1)), 0.0])
    assert wrong[0] == torch.inf


@pytest.mark.parametrize("options", [{}, {"balanced": True}, {"ignore_token_ids": [1, 2]}], ids=str)
def test_the_dense_target_is_never_built(options):
    batch, length, vocab = 8, 10, 4000
    x = (torch.rand(batch, vocab) + 0.1).requires_grad_()
    ids = torch.randint(0, vocab, (batch, length))
    with Recorder(large=batch * vocab) as seen:
        value = self_reconstruction_loss(x, ids, torch.ones_like(ids), **options)
        built = set(seen.targets)
        value.backward()
    assert x.grad.any()
    assert seen.largest == batch * vocab
    # Bytes: the signs before the targets are written, and where they are negative.
    assert built <= {"aten.ones_like.default", "aten.lt.Scalar"}
