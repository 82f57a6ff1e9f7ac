"""The chooser: which way is taken, when it is the definition, and what is said where none can."""

import typing

import pytest
import torch

import sparse_losses
import sparse_losses.functional as F
from sparse_losses._core import implementations as chooser
from sparse_losses._core.implementations import Implementation, always, choose, compute, never
from tests.cases import FIRST, LOSSES


def definition(x, factor, **_):
    return factor * x.square().sum()


def way(name, *, why=None, is_preferred=True):
    """A way that leaves its name in `seen`; its gradient is right, its value tells it apart."""
    seen = []

    def computed(needs, x, factor, **_):
        seen.append(name)
        return factor * x.square().sum(), [2 * factor * x if needs[0] else None, None]

    return Implementation(name, lambda *_: why, lambda *_: pays, computed), seen


def call(ways, impl, x=None, factor=3.0):
    x = torch.arange(3.0, requires_grad=True) if x is None else x
    return compute(definition, ways, impl, (x, factor), {})


def test_auto_takes_the_first_that_can_and_pays():
    (cannot, a), (too_small, b) = (
        way("cannot", why="a miracle"),
        way("too_small", is_preferred=False),
    )
    (first, c), (second, d) = way("first"), way("second")
    x = torch.arange(3.0, requires_grad=True)
    call((cannot, too_small, first, second), "auto", x).backward()
    assert (a, b, c, d) == ([], [], ["first"], [])
    assert x.grad.tolist() == [0, 6, 12]


def test_a_way_is_taken_by_its_name_whether_it_pays_or_not():
    (other, a), (slow, b) = way("other"), way("slow", is_preferred=False)
    call((other, slow), "slow")
    assert (a, b) == ([], ["slow"])


def test_a_way_that_cannot_says_why():
    cannot, seen = way("cannot", why="a miracle")
    with pytest.raises(
        ValueError, match='expected a miracle with impl="cannot"; impl="auto" selects'
    ):
        call((cannot,), "cannot")
    assert call((cannot,), "auto") == 15
    assert seen == []


def test_the_definition_is_taken_by_its_name():
    taken, seen = way("taken")
    assert call((taken,), "definition") == 15
    assert seen == []


def test_transforms_second_derivatives_and_the_compiler_take_the_definition():
    taken, seen = way("taken")
    x = torch.arange(3.0)
    for impl in ("auto", "taken"):
        torch.func.grad(lambda x, impl=impl: call((taken,), impl, x))(x)
        torch.autograd.forward_ad.enter_dual_level()
        call((taken,), impl, torch.autograd.forward_ad.make_dual(x, x))
        torch.autograd.forward_ad.exit_dual_level()
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, impl=impl: call((taken,), impl, x), backend="eager", fullgraph=True
        )
        assert compiled(x) == 15
    assert seen == []
    leaf = torch.arange(3.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(call((taken,), "auto", leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), leaf)
    assert seen == ["taken"]
    assert second.tolist() == [6, 6, 6]


def test_in_a_graph_a_way_that_can_be_traced_is_taken_but_not_under_a_transform(monkeypatch):
    plain, _ = way("plain")
    traced = plain._replace(name="traced", compiles=True)
    assert not plain.compiles
    monkeypatch.setattr(chooser, "can_bring_its_gradient", lambda *_: False)
    for is_transformed in (False, True):
        monkeypatch.setattr(chooser, "is_transformed", lambda answer=is_transformed: answer)
        for impl in ("auto", "traced"):
            taken = choose((plain, traced), impl, (), {})
            assert taken is (None if is_transformed else traced)
        assert choose((plain, traced), "plain", (), {}) is None


def test_where_it_cannot_run_a_way_is_asked_only_by_its_name(monkeypatch):
    monkeypatch.setattr(chooser, "can_bring_its_gradient", lambda *_: False)
    cannot, seen = way("cannot", why="a miracle")
    asked = cannot._replace(unsupported_reason=lambda *_: seen.append("asked") or "a miracle")
    assert choose((asked,), "auto", (), {}) is choose((asked,), "definition", (), {}) is None
    assert seen == []
    with pytest.raises(ValueError, match="expected a miracle"):
        choose((asked,), "cannot", (), {})


def test_some_ways_always_pay_and_some_never():
    first, second = (
        way(name)[0]._replace(is_preferred=pays) for name, pays in (("a", never), ("b", always))
    )
    assert choose((first, second), "auto", (), {}) is second
    assert choose((first,), "auto", (), {}) is None
    assert choose((first,), "a", (), {}) is first


def test_the_gradient_is_averaged_over_ranks_where_their_rows_are_gathered(monkeypatch):
    monkeypatch.setattr(chooser, "average_grad_over_ranks", lambda value: value + 100)
    taken, _ = way("taken")
    x = torch.arange(3.0, requires_grad=True)
    for options, expected in (({}, 15), ({"gather": False}, 15), ({"gather": True}, 115)):
        assert compute(definition, (taken,), "auto", (x, 3.0), options) == expected
        assert compute(definition, (taken,), "definition", (x, 3.0), options) == 15


@pytest.mark.parametrize("loss", [x for x in LOSSES.values() if x.ways], ids=lambda x: x.stem)
def test_impl_lists_what_a_function_has(loss):
    function = getattr(F, loss.function)
    allowed = typing.get_args(typing.get_type_hints(function)["impl"])
    table = typing.get_type_hints(getattr(sparse_losses, loss.module).__init__)["impl"]
    ways = {w.name for w in _table_of(function)}
    assert set(allowed) == {"auto", "definition", *ways}
    assert typing.get_args(table) == allowed
    assert allowed[:2] == ("auto", "definition")
    case = FIRST[loss.stem]
    listed = ", ".join(repr(name) for name in allowed)
    with pytest.raises(ValueError, match=f"expected `impl` to be one of {listed}, got 'fast'"):
        case.function()(**case.tensors(), impl="fast")


def _table_of(function):
    return __import__(function.__module__, fromlist=["IMPLEMENTATIONS"]).IMPLEMENTATIONS
