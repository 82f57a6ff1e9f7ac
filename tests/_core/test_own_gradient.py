"""A value computed together with its gradient: when, scaled how, and how often.

Uses ``with_own_gradient`` itself, with functions made for the test.
"""

import weakref

import pytest
import torch

from sparse_losses._core.own_gradient import with_own_gradient
from tests.cases import FIRST


class Squares:
    """The sum of ``factor * x ** 2``, and the needs of each computation."""

    def __init__(self):
        self.needs = []

    def definition(self, x, factor):
        return (factor * x.float().square()).sum()

    def compute(self, needs, x, factor):
        self.needs.append(set(needs))
        assert not torch.is_autocast_enabled("cpu")
        value = self.definition(x, factor)
        return value, {"x": 2 * factor * x.float() if "x" in needs else None}

    def __call__(self, x, factor):
        return with_own_gradient(self.definition, self.compute, {"x": x, "factor": factor})


def leaf(*shape, dtype=torch.float32):
    x = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape).to(dtype)
    return x.requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_gradient_is_scaled_and_computed_again_only_for_a_second_backward(dtype, factor):
    x, squares = leaf(2, 3, dtype=dtype), Squares()
    value = factor * squares(x, 0.7)
    (first,) = torch.autograd.grad(value, x, retain_graph=True)
    assert squares.needs == [{"x"}]
    with torch.autocast("cpu", torch.bfloat16):
        (second,) = torch.autograd.grad(value, x)
    assert squares.needs == [{"x"}] * 2
    for gradient in (first, second):
        assert gradient.dtype == dtype
        assert torch.equal(gradient, (factor * (2 * 0.7 * x.detach().float())).to(dtype))


def test_a_leaf_keeps_the_tensor_itself():
    made = []

    def compute(needs, x):
        gradient = torch.ones(2)
        made.append(gradient.data_ptr())
        return x.detach().sum(), {"x": gradient}

    for factor in (1.0, 2.0):
        x = leaf(2)
        (factor * with_own_gradient(lambda x: x.sum(), compute, {"x": x})).backward()
        assert x.grad.data_ptr() == made.pop()
        assert x.grad.tolist() == [factor, factor]


def test_arguments_are_freed_after_backward():
    x = leaf(2, 3)
    argument = x * 1
    value, gone = Squares()(argument, 2.0), weakref.ref(argument)
    del argument
    value.backward()
    assert gone() is None
    assert value.requires_grad


def test_the_second_derivative_is_the_definitions():
    x = leaf(2, 3)
    y, unused = 2 * x, torch.ones(1, requires_grad=True)
    # One input depends on the other: that path is autograd's to add, once.
    value = with_own_gradient(
        lambda x, y, unused: (x * y.square()).sum(),
        lambda needs, x, y, unused: ((x * y.square()).sum(), {"x": y.square(), "y": 2 * x * y}),
        {"x": x, "y": y, "unused": unused},
    )
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    torch.testing.assert_close(gradient, 12 * x.square())
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, 24 * x)


def test_a_temperature_beyond_single_precision_is_left_to_the_definition():
    case, tensors = FIRST["info_nce"], FIRST["info_nce"].tensors()
    for temperature, impl in ((1e-31, "auto"), (1e31, "auto"), (1e-30, "direct"), (1e30, "direct")):
        tensors["temperature"] = temperature
        found, expected = (case.function()(**tensors, impl=x) for x in (impl, "definition"))
        torch.testing.assert_close(found, expected, equal_nan=True)
        if impl == "auto":
            with pytest.raises(ValueError, match="`temperature` from 1e-30 to 1e30, got 1e"):
                case.function()(**tensors, impl="direct")
