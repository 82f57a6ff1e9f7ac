"""`gather=True`: value on every rank, and gradients after averaging, of one process with all rows.

In fp64, for the plainest case of every loss on 2 ranks that are processes; test_in_threads.py has
all cases. Compiled it is one graph, and as in eager mode.
"""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.cases import BASE_CASES, CASES, FIRST, Case, to_tensors
from tests.distributed.ranks import run_ranks

ROWS = 3  # of each rank
PLAINEST = [case for case in CASES if replace(case, impl=None) in FIRST.values()]
PARTS = {"key": 0, "key_labels": 0}  # split over the ranks though they are no rows of the batch


def is_split(case: Case, name: str, array: np.ndarray) -> bool:
    shared_negative = name == "negative" and name not in case.rows
    return name in case.rows or name in case.square or name in PARTS or shared_negative


def whole(case: Case, world: int, seed: int) -> dict[str, np.ndarray]:
    """The batch of all ranks: rows from one call, shared negatives and keys from one a rank."""
    arrays = case.arrays(world * ROWS, seed)
    others = [case.arrays(world * ROWS, seed + 100 + r) for r in range(world)]
    for name in arrays:
        if is_split(case, name, arrays[name]) and name not in case.rows + case.square:
            arrays[name] = np.concatenate([other[name] for other in others])
    if "candidate_mask" in case.square:
        keys = world * ROWS
        more = [other["candidate_mask"][:, keys:] for other in others]
        is_shared = "negative" in case.dims and "negative" not in case.rows
        columns = [arrays["candidate_mask"][:, :keys], *more[: world if is_shared else 1]]
        arrays["candidate_mask"] = np.concatenate(columns, axis=1)
    return arrays


def part(case: Case, arrays: dict[str, np.ndarray], rank: int, world: int) -> dict:
    mine = dict(arrays)
    for name, array in arrays.items():
        if array is not None and is_split(case, name, array):
            size = len(array) // world
            mine[name] = array[rank * size : (rank + 1) * size]
    return mine


def evaluate(
    case: Case,
    arrays: dict,
    reduction: str | None = None,
    learned: bool = False,
    call: Any = None,
    **options: Any,
):
    """Value, and gradients by everything that has one; where ``learned`` by the temperature."""
    tensors = to_tensors(arrays)
    leaves = {name: tensors[name].requires_grad_() for name in case.differentiable}
    if learned:
        number = case.kwargs.get("temperature", 0.07)
        leaves["temperature"] = torch.tensor(number, dtype=torch.float64, requires_grad=True)
        options["temperature"] = leaves["temperature"]
    if reduction:
        options["reduction"] = reduction
    value = (call or case.function())(**tensors, **options)
    grads = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    return value.detach(), dict(zip(leaves, grads, strict=True))


def compare(rank: int, world: int) -> dict[str, str]:
    """What differs, by case and reduction."""
    wrong = {}
    for case in PLAINEST:
        for reduction in case.loss.reductions:
            try:
                check(case, rank, world, reduction)
            except AssertionError as error:
                wrong[f"{case.id}-{reduction}"] = repr(error)
    return wrong


def check(
    case: Case, rank: int, world: int, reduction: str | None, arrays: Any = None, call: Any = None
) -> None:
    """Compare a rank's call with one process; with a learned temperature by default."""
    is_voided = arrays is not None  # a rank without valid rows may have no gradient
    learned = not is_voided and "temperature" in case.loss.hyperparameters
    arrays = arrays or whole(case, world, seed=3)
    mine = part(case, arrays, rank, world)
    expected, expected_gradients = evaluate(case, arrays, reduction, learned, call)
    value, gradients = evaluate(case, mine, reduction, learned, call, gather=True)
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    close(value, expected[rows] if reduction == "none" else expected, msg=lambda m: f"value: {m}")
    # Every rank's backward pass starts from the whole loss, and DDP averages; with "none" from its
    # own rows alone, and the sum over ranks is the whole.
    share = 1 if reduction == "none" else world
    for name, gradient in gradients.items():
        whole_gradient = expected_gradients[name]
        if name in arrays and is_split(case, name, arrays[name]):
            size = len(whole_gradient) // world
            whole_gradient = whole_gradient[rank * size : (rank + 1) * size]
            gradient = gradient / share
        else:  # a parameter that every rank holds
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            gradient = gradient / share
        close(gradient, whole_gradient, msg=lambda m, name=name: f"gradient by {name}: {m}")
    assert is_voided or any(gradient.any() for gradient in expected_gradients.values())


def test_value_and_averaged_gradients_are_those_of_one_process():
    assert run_ranks(2, compare, 2) == [{}, {}]


# A loss for each way to communicate, and InfoNCE with all that its options gather. The contract
# table compiles every loss and option on one rank.
GATHERED = ("info_nce-shared", "info_nce-positives_ids_symmetric_decoupled")
COMPILED = [FIRST[stem] for stem in ("nws", "flops", "distillation")]
COMPILED += [case for case in BASE_CASES if case.id in GATHERED]


def compare_compiled(rank: int) -> dict[str, str]:
    """What differs from eager mode, by case."""
    wrong = {}
    for case in COMPILED:
        torch._dynamo.reset()
        arrays = part(case, whole(case, 2, seed=3), rank, 2)
        # By PyTorch's own operations: code for them takes minutes.
        compiled = torch.compile(case.function(), fullgraph=True, backend="aot_eager")
        try:
            expected = evaluate(case, arrays, gather=True)
            found = evaluate(case, arrays, call=compiled, gather=True)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        except Exception as error:  # the other rank is told by its own
            wrong[case.id] = f"{type(error).__name__}: {error}"[:2000]
    return wrong


@pytest.mark.works_with("PyTorch", "compile", "devices")
def test_a_loss_over_two_ranks_is_one_graph_and_the_same():
    assert run_ranks(2, compare_compiled) == [{}, {}]
