"""The choice of an implementation: which one is taken, and what is said where none supports a call.

Uses the dispatcher itself, with implementations made for the test.
"""

import typing

import pytest
import torch

import sparse_losses
import sparse_losses.functional as F
from sparse_losses import explain
from sparse_losses._core import implementations as module
from sparse_losses._core.implementations import Implementation, choose, compute
from tests.cases import FIRST, LOSSES
from tests.instruments import Recorder


def definition(x, factor, gather=False):
    return factor * x.square().sum()


def implementation(name, *, reason=None, is_preferred=True, compiles=False):
    """Return an implementation, and a list to which each computation adds its name."""
    calls = []

    def computed(needs, x, factor, gather=False):
        calls.append(name)
        return factor * x.square().sum(), {"x": 2 * factor * x if "x" in needs else None}

    made = Implementation(name, lambda _: reason, lambda _: is_preferred, computed, compiles)
    return made, calls


def call(implementations, impl, x=None):
    x = torch.arange(3.0, requires_grad=True) if x is None else x
    return compute(definition, implementations, impl, {"x": x, "factor": 3.0})


def test_auto_takes_the_first_that_is_supported_and_preferred():
    unsupported, a = implementation("unsupported", reason="a miracle")
    slow, b = implementation("slow", is_preferred=False)
    (first, c), (second, d) = implementation("first"), implementation("second")
    x = torch.nn.Parameter(torch.arange(3.0))
    call((unsupported, slow, first, second), "auto", x).backward()
    assert (a, b, c, d) == ([], [], ["first"], [])
    assert x.grad.tolist() == [0, 6, 12]


def test_transforms_second_derivatives_and_the_compiler_take_the_definition():
    taken, calls = implementation("taken")
    x = torch.arange(3.0)
    for impl in ("auto", "taken"):
        torch.func.grad(lambda x, impl=impl: call((taken,), impl, x))(x)
        with torch.autograd.forward_ad.dual_level():
            call((taken,), impl, torch.autograd.forward_ad.make_dual(x, x))
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, impl=impl: call((taken,), impl, x), backend="eager", fullgraph=True
        )
        assert compiled(x) == 15
    assert calls == []
    leaf = torch.arange(3.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(call((taken,), "auto", leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), leaf)
    assert calls == ["taken"]
    assert second.tolist() == [6, 6, 6]


def test_compiled_only_an_implementation_that_compiles_is_taken(monkeypatch):
    plain, _ = implementation("plain")
    traced, _ = implementation("traced", compiles=True)
    # As in a graph, where a test could not look at what is chosen.
    monkeypatch.setattr(module, "can_bring_its_gradient", lambda *_: False)
    for is_transformed in (False, True):
        monkeypatch.setattr(module, "is_transformed", lambda value=is_transformed: value)
        for impl in ("auto", "traced"):
            assert choose((plain, traced), impl, {}) is (None if is_transformed else traced)
        assert choose((plain, traced), "plain", {}) is None
    unsupported, _ = implementation("unsupported", reason="a miracle")
    assert choose((unsupported,), "auto", {}) is None
    with pytest.raises(ValueError, match="expected a miracle"):
        choose((unsupported,), "unsupported", {})


@pytest.mark.parametrize(
    "loss", [x for x in LOSSES.values() if x.implementations], ids=lambda x: x.stem
)
def test_impl_lists_the_implementations_of_a_loss(loss):
    function = getattr(F, loss.function)
    allowed = typing.get_args(typing.get_type_hints(function)["impl"])
    module_impl = typing.get_type_hints(getattr(sparse_losses, loss.module).__init__)["impl"]
    table = __import__(function.__module__, fromlist=["IMPLEMENTATIONS"]).IMPLEMENTATIONS
    assert allowed[:2] == ("auto", "definition")
    assert set(allowed[2:]) == {x.name for x in table} == set(loss.implementations)
    assert typing.get_args(module_impl) == allowed
    listed = ", ".join(repr(name) for name in allowed)
    with pytest.raises(ValueError, match=f"expected `impl` to be one of {listed}, got 'fast'"):
        FIRST[loss.stem].function()(**FIRST[loss.stem].tensors(), impl="fast")


def test_explain_names_the_implementation_and_what_speaks_against_those_before_it():
    dense = torch.randn(64, 8)
    sparse = dense.to_sparse_csr()
    assert explain(F.info_nce_loss, sparse, dense) == 'info_nce_loss takes "nonzeros"'
    lines = explain(sparse_losses.InfoNCELoss(), dense, dense).splitlines()
    assert lines[0] == 'InfoNCELoss takes "direct"'
    assert lines[1].startswith('  not "nonzeros": it is for CSR tensors')
    assert lines[2].startswith('  not "blocks": it is for more scores than')
    lines = explain(F.info_nce_loss, dense, dense, reduction="none").splitlines()
    assert lines[0] == 'info_nce_loss takes "definition"'
    assert lines[3].startswith('  not "direct": it takes reduction=')
    assert explain(F.flops_loss, dense) == 'flops_loss takes "definition", which it has alone'
    with pytest.raises(ValueError, match='expected reduction="mean" or "sum" with impl="direct"'):
        explain(F.info_nce_loss, dense, dense, reduction="none", impl="direct")
    assert explain(F.n_pair_loss, dense, dense).startswith('n_pair_loss takes "direct"')


def test_explain_computes_no_choice():
    x = torch.randn(4, 8)
    with Recorder() as seen:
        explain(F.info_nce_loss, x, x, impl="direct")
    assert seen.largest == 0
    F.info_nce_loss(x, x)  # nothing stays behind
