"""The declaration of a loss's arguments: what its body receives and what is refused."""

from contextlib import nullcontext
from typing import Literal

import pytest
import torch

import sparse_losses
import sparse_losses.functional as F
from sparse_losses._core.loss import LossModule, loss
from tests.distributed.threads import run_threads

seen: dict = {}


@loss(
    x="B S, csr",
    other="N S or B N S, optional",
    weight="S, optional, constant",
    mask="B, mask, optional",
    ids="B, integer, optional",
    tokens="B, token ids at mask, optional",
    teacher="B, optional, detached",
    scale="> 0, learnable",
    bias="finite, learnable",
    margin=">= 0",
    k="integer >= 1",
)
def example_loss(
    x: torch.Tensor,
    other: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    teacher: torch.Tensor | None = None,
    scale: float | torch.Tensor = 1.0,
    bias: float | torch.Tensor = 0.0,
    margin: float = 1.0,
    k: int = 1,
    flag: bool = False,
    kind: Literal["a", "b"] = "a",
    gather: bool = False,
    impl: Literal["auto", "one", "another"] = "auto",
) -> torch.Tensor:
    """An example."""
    seen.update(locals(), autocast=torch.is_autocast_enabled("cpu"))
    return x.sum() if x.layout == torch.strided else x.to_dense().sum()


def x(**options):
    return torch.ones(2, 3, **options)


def test_data_decides_the_dtype_and_constants_and_learned_numbers_are_cast_along():
    scale = torch.tensor(2.0, dtype=torch.float16, requires_grad=True)
    example_loss(x(dtype=torch.bfloat16), None, torch.ones(3, dtype=torch.float64), scale=scale)
    assert {seen[name].dtype for name in ("x", "weight", "scale")} == {torch.float32}
    assert seen["scale"].requires_grad
    example_loss(x(), x(dtype=torch.float64), torch.ones(3, dtype=torch.int64), scale=scale)
    assert {seen[name].dtype for name in ("x", "other", "weight", "scale")} == {torch.float64}


SHARED, OF_EACH_ROW = {"other": torch.ones(2, 3)}, {"other": torch.ones(2, 2, 3)}


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        ({"x": torch.ones(3, 3)}, {}, "B on every rank .* 3 on rank 0, 2 on rank 1"),
        (SHARED, {}, "N on every rank .* 2 on rank 0, 0 on rank 1"),
        (SHARED, OF_EACH_ROW, "number of dimensions of `other` .* 2 on rank 0, 3 on rank 1"),
        ({}, {"weight": torch.ones(3)}, "number .* `weight` .* None on rank 0, 1 on rank 1"),
        ({"impl": "one"}, {"impl": "another"}, "`impl` .* 'one' on rank 0, 'another' on rank 1"),
        ({"flag": True}, {}, "`flag` .* True on rank 0, False on rank 1"),
        ({"scale": torch.tensor(0.5)}, {"scale": 0.25}, "`scale` .* 0.5 on rank 0, 0.25 on rank"),
        ({"scale": torch.tensor(0.5)}, {"scale": torch.tensor(0.5)}, ""),
        ({}, {"x": x(dtype=torch.float64)}, "precision, in bytes, .* 4 on rank 0, 8 on rank 1"),
        ({"x": torch.ones(2, 4)}, {}, ""),  # S may differ
        (SHARED, SHARED, ""),
    ],
)
def test_with_gather_the_ranks_make_the_same_call(first, second, wrong):
    def call(own, gather):
        example_loss(**{"x": x(), **(second if own else first)}, gather=gather)

    run_threads(2, call, False)
    expected = pytest.raises(ValueError, match=f"expected the same {wrong}")
    with expected if wrong else nullcontext():
        run_threads(2, call, True)


class ExampleLoss(LossModule):
    def __init__(self, *, scale=1.0, kind="a"):
        super().__init__(example_loss, locals())


def test_a_module_checks_and_shows_its_hyperparameters():
    module = ExampleLoss(scale=torch.nn.Parameter(torch.tensor(2.0)), kind="b")
    assert repr(module) == "ExampleLoss(scale=2.0, kind='b')"
    assert dict(module.named_parameters()).keys() == {"scale"}
    with pytest.raises(ValueError, match="`kind`"):
        ExampleLoss(kind="c")
    with pytest.raises(TypeError, match="expected `gather` to be True or False, got 1"):
        sparse_losses.FlopsLoss(gather=1)


def test_a_learned_number_on_a_third_device_is_refused():
    with pytest.raises(ValueError, match="expected `scale` on cpu, where `x` is, or on the CPU"):
        example_loss(x(), scale=torch.ones((), device="meta"))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_with_what_to_do(layout):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    with pytest.raises(TypeError, match=r"`activations` to be dense, got .*nested.*pad it"):
        F.flops_loss(nested)
