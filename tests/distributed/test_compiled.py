"""Losses under torch.compile on two ranks: with gather in one graph, as eager."""

import functools

import pytest
import torch

from tests.cases import BASE_CASES, FIRST, to_tensors
from tests.distributed.ranks import run_ranks
from tests.distributed.test_gather import part, whole

# A loss for each way to communicate, and InfoNCE with each kind of tensor that its options gather.
# The contract table compiles every loss and option on one rank.
LOSSES = "info_nce", "nws", "flops", "distillation", "margin_mse"
GATHERED = ("info_nce-shared", "info_nce-per_row", "info_nce-positives_ids_symmetric_decoupled")
BY_ID = {case.id: case for case in BASE_CASES}
COMPILED = [*(FIRST[stem] for stem in LOSSES), *(BY_ID[name] for name in GATHERED)]


def value_and_gradients(function, tensors: dict, names) -> list[torch.Tensor]:
    leaves = {n: tensors[n].detach().clone().requires_grad_() for n in names}
    value = function(**{**tensors, **leaves}).sum()
    return [value.detach(), *torch.autograd.grad(value, list(leaves.values()))]


def compare(rank: int) -> dict[str, str]:
    """What differs from eager mode, by case."""
    wrong = {}
    for case in COMPILED:
        torch._dynamo.reset()
        function = functools.partial(case.function(), gather=True)
        tensors = to_tensors(part(case, whole(case, 2, seed=3), rank, 2))
        # By PyTorch's own operations: code for them takes minutes.
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        try:
            expected = value_and_gradients(function, tensors, case.differentiable)
            found = value_and_gradients(compiled, tensors, case.differentiable)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        except Exception as error:  # the other rank is told by its own
            wrong[case.id] = f"{type(error).__name__}: {error}"[:2000]
    return wrong


@pytest.mark.works_with("PyTorch", "compile", "devices")
def test_a_loss_over_two_ranks_is_one_graph_and_the_same():
    assert run_ranks(2, compare) == [{}, {}]
