"""Products of halves as an accelerator takes them: of the halves as they are, summed in fp32.

A CPU cannot return such a product in fp32. The products of two halves are exact in fp32, so a
product of the cast matrices stands in for it here; all other code is the accelerator's.
"""

from collections import Counter
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

import sparse_losses.functional as F
from benchmarks.run.launches import Launches
from sparse_losses._core import products
from sparse_losses.fast import head, head_tiles
from sparse_losses.functional import info_nce_loss, splade_head
from tests.cases import CASES, to_arrays, to_tensors
from tests.instruments import gradients, weigh
from tests.representation.test_head import EXACT, example, watch, with_gate

EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
CPU = torch.device("cpu")


@pytest.fixture(params=EPS, ids=str)
def dtype(request):
    return request.param


@contextmanager
def halves_multiplied(can: bool = True):
    halves = Counter()

    def returning_fp32(multiply):
        def function(a, b, *, out_dtype=None, **options):
            if out_dtype is None:
                return multiply(a, b, **options)
            if not can:
                raise RuntimeError
            halves[a.dtype] += 1
            return multiply(a.to(out_dtype), b.to(out_dtype))

        return function

    patched = {name: returning_fp32(getattr(torch, name)) for name in ("mm", "bmm")}
    with mock.patch.multiple(torch, **patched):
        products.returns_fp32.cache_clear()
        assert [products.returns_fp32(CPU, dtype) for dtype in (*EPS, *EPS)] == [can] * 4
        assert halves == (dict.fromkeys(EPS, 1) if can else {}), "a device is asked once a dtype"
        halves.clear()
        with Launches("cpu") as counted:
            yield Multiplied(halves, counted)
    products.returns_fp32.cache_clear()


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
    return to_tensors(to_arrays(tensors))


def distance(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def value_and_gradients(call, leaves):
    """Return the value and its gradients in fp64, and what was multiplied."""
    with halves_multiplied() as seen:
        value = call()
        value.backward(torch.full_like(value, 4096.0))  # as a scaler does: fp16 ends at 6e-8
    return [x.double() for x in (value.detach(), *(x.grad for x in leaves))], seen


# The losses ---------------------------------------------------------------------------------------


# The package's own declaration says which keep their halves: no list here forgets one.
HALVED = [c for c in CASES if "halves" in str(getattr(F, c.loss.function).declaration.tensors)]


@pytest.mark.parametrize("case", HALVED, ids=lambda case: case.id)
def test_a_loss_is_rounded_once(dtype, case):
    """As in the contract's test of every dtype, with an accelerator's products."""
    tensors = case.tensors(dtype=dtype)
    exact = in_fp64(tensors)
    leaves, references = watch(tensors, *case.differentiable), watch(exact, *case.differentiable)
    found, multiplied = value_and_gradients(lambda: case.function()(**tensors), leaves.values())
    exact |= {"impl": "definition"} if case.implementations else {}
    expected, _ = value_and_gradients(lambda: case.function()(**exact), references.values())
    assert distance(found[0], expected[0]) < 3e-6
    for rounded, truth in zip(found[1:], expected[1:], strict=True):
        assert distance(rounded, truth) < 2 * EPS[dtype]
    takes_halves = case.stem == "n_pair" or (case.implementations and case.impl == "auto")
    assert bool(multiplied.halves[dtype]) == bool(takes_halves)


def test_rows_of_zero_and_of_any_length(dtype):
    largest = 2.0**100 if dtype == torch.bfloat16 else 2.0**11
    anchor, noise = torch.randn(2, 7, 16)
    tensors = {"anchor": anchor.to(dtype), "positive": (0.7 * anchor + 0.6 * noise).to(dtype)}
    tensors["anchor"][0] *= largest
    tensors["positive"][1] /= largest
    tensors["anchor"][3] = 0
    exact = in_fp64(tensors)
    leaves, references = watch(tensors, *tensors), watch(exact, *exact)
    expected, _ = value_and_gradients(lambda: info_nce_loss(**exact), references.values())
    found, multiplied = value_and_gradients(lambda: info_nce_loss(**tensors), leaves.values())
    assert distance(found[0], expected[0]) < 3e-6
    assert not found[1][3].any()
    for row, truth in zip(found[1], expected[1], strict=True):
        assert distance(row, truth) < 4 * EPS[dtype] or not truth.any()
    # In fp16 the products of the gradient stay in fp32, as small slopes underflow.
    products_made = multiplied.halves[dtype], multiplied.singles
    assert products_made == ((3, 0) if dtype == torch.bfloat16 else (1, 2))


# The head -----------------------------------------------------------------------------------------


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
    with halves_multiplied(can=False) as seen:
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
