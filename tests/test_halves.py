"""Products of halves as an accelerator takes them: of the halves as they are, summed in fp32.

A CPU cannot return such a product in fp32. The products of two halves are exact in fp32, so a
product of the cast matrices stands in for it here; all other code is the accelerator's.
"""

import itertools
from collections import Counter
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.losses import nws as plain_nws
from benchmarks.run.launches import Launches
from benchmarks.schema import Maker
from sparse_losses._core import products
from sparse_losses.fast import head, head_tiles
from sparse_losses.functional import info_nce_loss, nws_loss, splade_head
from tests.representation.test_head import EXACT, example, gradients, watch, weigh, with_gate

EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
CPU = torch.device("cpu")
LEARNED = ("anchor", "positive", "negative", "query", "prototype")


@pytest.fixture(params=EPS, ids=str)
def dtype(request):
    return request.param


@contextmanager
def halves_multiplied(returns_fp32: bool = True):
    halves = Counter()

    def returning_fp32(multiply):
        def function(a, b, *, out_dtype=None, **options):
            if out_dtype is None:
                return multiply(a, b, **options)
            halves[a.dtype] += 1
            return multiply(a.to(out_dtype), b.to(out_dtype))

        return function

    known = {(CPU, dtype): returns_fp32 for dtype in EPS}
    patched = {name: returning_fp32(getattr(torch, name)) for name in ("mm", "bmm")}
    with (
        mock.patch.dict(products._returns_fp32, known),
        mock.patch.multiple(torch, **patched),
        Launches("cpu") as counted,
    ):
        yield Multiplied(halves, counted)


class Multiplied(NamedTuple):
    halves: Counter  # products of halves that return fp32, by dtype
    counted: Launches

    @property
    def singles(self) -> int:
        """Number of products of fp32 matrices that stand in for no product of halves."""
        operations = self.counted.operations
        total = sum(each.flops > 0 and each.dtype == torch.float32 for each in operations)
        return total - self.halves.total()


def in_fp64(tensors):
    return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}


def distance(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def value_and_gradients(loss, tensors, **options):
    """Return the value and its gradients in fp64, and what was multiplied."""
    tensors = dict(tensors)
    leaves = watch(tensors, *(name for name in tensors if name in LEARNED))
    with halves_multiplied() as seen:
        value = loss(**tensors, **options)
        value.backward(torch.full_like(value, 4096.0))  # as a scaler does: fp16 ends at 6e-8
    results = [value.detach(), *(x.grad for x in leaves.values())]
    return [x.double() for x in results], seen


# ------------------------------------------------------------------------------------------------
# InfoNCE


def pairs(dtype, negatives="none"):
    anchor = torch.randn(7, 16)
    tensors = {"anchor": anchor, "positive": 0.7 * anchor + 0.6 * torch.randn(7, 16)}
    if negatives != "none":
        tensors["negative"] = torch.randn(*{"shared": (3, 16), "each": (7, 3, 16)}[negatives])
    return {name: x.to(dtype) for name, x in tensors.items()}


def assert_rounded_once(actual, expected, dtype):
    assert distance(actual[0], expected[0]) < 3e-6
    for rounded, exact in zip(actual[1:], expected[1:], strict=True):
        assert distance(rounded, exact) < 2 * EPS[dtype]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("negatives", ["none", "shared", "each"])
@pytest.mark.parametrize("impl", ["direct", "blocks"])
def test_info_nce_is_rounded_once(dtype, similarity, negatives, impl):
    tensors = pairs(dtype, negatives)
    for symmetric, ids in itertools.product([False, True], repeat=2):
        options = {"temperature": 0.05 if similarity == "cosine" else 2.0, "impl": impl}
        options |= {"similarity": similarity, "symmetric": symmetric}
        if ids:
            options["positive_ids"] = torch.tensor([0, 1, 2, 3, 4, 0, 1])
        actual, multiplied = value_and_gradients(info_nce_loss, tensors, **options)
        options["impl"] = "definition"
        expected, _ = value_and_gradients(info_nce_loss, in_fp64(tensors), **options)
        assert_rounded_once(actual, expected, dtype)
        assert multiplied.halves[dtype]


def test_rows_of_zero_and_of_any_length(dtype):
    largest = 2.0**100 if dtype == torch.bfloat16 else 2.0**11
    tensors = pairs(dtype)
    tensors["anchor"][0] *= largest
    tensors["positive"][1] /= largest
    tensors["anchor"][3] = 0
    expected, _ = value_and_gradients(info_nce_loss, in_fp64(tensors))
    actual, _ = value_and_gradients(info_nce_loss, tensors)
    assert distance(actual[0], expected[0]) < 3e-6
    assert not actual[1][3].any()
    for row, exact in zip(actual[1], expected[1], strict=True):
        assert distance(row, exact) < 4 * EPS[dtype] or not exact.any()


def test_every_product_is_of_halves_but_the_gradient_in_fp16(dtype):
    _, multiplied = value_and_gradients(info_nce_loss, pairs(dtype))
    # In fp16 the products of the gradient stay in fp32, as small slopes underflow.
    assert (multiplied.halves[dtype], multiplied.singles) == (
        (3, 0) if dtype == torch.bfloat16 else (1, 2)
    )


# ------------------------------------------------------------------------------------------------
# NWS


def labelled(dtype):
    made = plain_nws.inputs({"B": 7, "K": 5, "Q": 9, "F": 16, "L": 6}, Maker(CPU))
    features = ("query", "prototype", "key", "queue")
    return {name: x.to(dtype) if name in features else x for name, x in made.items()}


@pytest.mark.parametrize("aggregation", ["mean", "max"])
@pytest.mark.parametrize("impl", ["auto", "definition"])
def test_nws_is_rounded_once(dtype, aggregation, impl):
    tensors = labelled(dtype)
    tensors["queue"][2] = torch.nan
    options = {"aggregation": aggregation, "queue_mask": torch.arange(9) != 2}
    for options["decoupled"], options["eps"] in itertools.product([True, False], [0.0, 1e-8]):
        actual, multiplied = value_and_gradients(nws_loss, tensors, impl=impl, **options)
        expected, _ = value_and_gradients(nws_loss, in_fp64(tensors), **options)
        assert_rounded_once(actual, expected, dtype)
        assert impl == "definition" or multiplied.halves[dtype]  # the definition casts them


# ------------------------------------------------------------------------------------------------
# The head


@pytest.fixture
def like_an_accelerator(monkeypatch):
    """On a CPU the head casts its operands to fp32 first."""
    monkeypatch.setattr(head, "operand_type", lambda hidden, weight, _: hidden.dtype)
    monkeypatch.setattr(head_tiles, "_tile_height", lambda *_: 7)


@pytest.mark.usefixtures("like_an_accelerator")
def test_head_multiplies_halves_and_sums_scores_in_fp32(dtype):
    tensors = with_gate(example(dtype))
    exact_tensors = in_fp64(tensors)
    exact_leaves, leaves = watch(exact_tensors), watch(tensors)
    exact = EXACT(**exact_tensors)[0]
    expected = gradients(weigh(exact), exact_leaves)
    with halves_multiplied() as seen:
        out = splade_head(**tensors, impl="tiles")
        actual = gradients(weigh(out), leaves)
    assert seen.halves[dtype] > seen.singles == 0
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-7)
    for name, gradient in actual.items():
        assert gradient.dtype == dtype
        error = (gradient.double() - expected[name]).abs().max()
        assert error <= torch.finfo(dtype).eps * expected[name].abs().max()


@pytest.mark.usefixtures("like_an_accelerator")
def test_head_multiplies_halves_where_the_device_returns_halves():
    tensors = example(torch.bfloat16)
    leaves = watch(tensors)
    with halves_multiplied(returns_fp32=False) as seen:
        rounded = splade_head(**tensors, impl="tiles")
        actual = gradients(weigh(rounded), leaves)
    assert set(seen.counted.flops) == {torch.bfloat16}
    exact = splade_head(**tensors, impl="definition")
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=1e-2)
    assert all(gradient.isfinite().all() for gradient in actual.values())


def test_copies_of_an_attended_state_hand_their_gradient_to_it(monkeypatch):
    """An accelerator may take any of equal maxima: here the last of all, which is masked."""

    def last_of_equal(scores, dim):
        highest = scores.amax(dim, keepdim=True)
        flipped = (scores == highest).flip(dim).to(torch.uint8).argmax(dim)
        return highest.squeeze(dim), scores.shape[dim] - 1 - flipped

    class LastMaximum(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.max and args[0].ndim == 3:
                return last_of_equal(*args)
            return function(*args, **(kwargs or {}))

    hidden = torch.randn(2, 6, 3, requires_grad=True)
    weight, mask = torch.randn(7, 3), torch.tensor([[1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]])
    with LastMaximum():
        _, logits = splade_head(hidden, weight, None, mask, return_logits=True, impl="tiles")
    logits.sum().backward()
    assert hidden.grad.any(-1).sum() == 2
    torch.testing.assert_close(hidden.grad[0, 0], weight.sum(0))
    torch.testing.assert_close(hidden.grad[1, 3], weight.sum(0))
