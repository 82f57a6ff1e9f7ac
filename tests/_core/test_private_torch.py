"""Private names of PyTorch: each does what we take it for, and may go when the test says so."""

import re
from pathlib import Path

import pytest
import torch

from sparse_losses._core import private_torch

PACKAGE = Path(private_torch.__file__).parents[1]


def test_no_other_module_uses_a_private_name():
    private = re.compile(r"\btorch\.(?:\w+\.)*_\w+|\btorch\.ops\.aten\b")
    allowed = {"torch.__version__", "torch.utils._pytree"}
    names = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "private_torch.py"
        for name in private.findall(path.read_text(encoding="utf-8"))
        if name not in allowed
    }
    assert names == set()


def test_transforms_and_forward_levels_are_seen_inside_them_only():
    """May go when `torch.func` and `torch.autograd.forward_ad` have public questions."""
    seen = []

    def function(x):
        seen.append(private_torch.transforms_are_active())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    torch.vmap(function)(torch.ones(2, 2))
    function(torch.ones(2))
    assert seen == [True, True, False]
    with torch.autograd.forward_ad.dual_level():
        assert private_torch.forward_level() >= 0
    assert private_torch.forward_level() < 0
    assert not hasattr(torch.func, "is_active")
    assert not hasattr(torch.autograd.forward_ad, "is_active")


def test_is_batched_sees_the_gradients_of_a_vectorised_jacobian():
    """May go when a backward pass is told of batched gradients in a public way."""
    seen = []

    def look(x):
        y = x.clone()
        y.register_hook(lambda upstream: seen.append(private_torch.is_batched(upstream)))
        return y

    for vectorize in (True, False):
        torch.autograd.functional.jacobian(look, torch.ones(2), vectorize=vectorize)
    assert seen == [True, False, False]
    assert not private_torch.is_batched(torch.ones(2))


def test_log_softmax_backward_is_the_gradient_of_log_softmax():
    """May go when a function of this kind is public."""
    x = torch.randn(2, 3, requires_grad=True)
    y, upstream = x.log_softmax(-1), torch.randn(2, 3)
    found = private_torch.log_softmax_backward(upstream, y.detach())
    torch.testing.assert_close(found, torch.autograd.grad(y, x, upstream)[0])


def test_assert_on_device_fails_with_its_message():
    """May go when an assertion that does not wait is public."""
    private_torch.assert_on_device(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="not fine"):
        private_torch.assert_on_device(torch.tensor(False), "not fine")
