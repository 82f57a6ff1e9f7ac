"""`gather=True`: value on every rank, and gradients after averaging, of one process with all rows.

For 2 ranks every case of the losses' table, by every way, and for 3 one case a loss, in fp64. The
ranks work through all of it in one go; each test looks up one line of what they found.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.cases import CASES, FIRST, Case, to_tensors
from tests.distributed.ranks import run_ranks

ROWS = 3  # of each rank
BY_RANKS = {2: CASES, 3: tuple(FIRST.values())}  # one rank is the contract's
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
    return arrays


def part(case: Case, arrays: dict[str, np.ndarray], rank: int, world: int) -> dict:
    mine = dict(arrays)
    for name, array in arrays.items():
        if array is not None and is_split(case, name, array):
            size = len(array) // world
            mine[name] = array[rank * size : (rank + 1) * size]
    return mine


def variants(case: Case, world: int):
    """Reductions that a case is tried with, and InfoNCE's ring, which is there for this."""
    reductions = ("mean", "sum", "none") if world == 2 else ("mean",)
    for reduction in reductions if case.loss.reduces else (None,):
        yield reduction, None
        if case.stem == "info_nce" and case.impl == "auto" and reduction != "none":
            yield reduction, "ring"


def key_of(case: Case, reduction: str | None, impl: str | None) -> str:
    return f"{case.id}-{reduction}-{impl}"


def evaluate(case: Case, arrays: dict, reduction: str | None, learned: bool, **options: Any):
    """Value, and gradients by everything that has one; the temperature too where there is one."""
    tensors = to_tensors(arrays)
    leaves = {name: tensors[name].requires_grad_() for name in case.differentiable}
    if learned:
        number = case.kwargs.get("temperature", 0.07)
        leaves["temperature"] = torch.tensor(number, dtype=torch.float64, requires_grad=True)
        options["temperature"] = leaves["temperature"]
    if reduction:
        options["reduction"] = reduction
    value = case.function()(**tensors, **options)
    found = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    return value.detach(), dict(zip(leaves, found, strict=True))


def compare(rank: int, world: int) -> dict[str, str]:
    """What went wrong, by variant; an empty text where nothing did."""
    found = {}
    for case in BY_RANKS[world]:
        arrays = whole(case, world, seed=3)
        mine = part(case, arrays, rank, world)
        learned = "temperature" in case.loss.signature
        for reduction, impl in variants(case, world):
            try:
                check(case, arrays, mine, rank, world, reduction, impl, learned)
                wrong = ""
            except AssertionError as error:
                wrong = str(error)
            found[key_of(case, reduction, impl)] = wrong
    return found


def check(case, arrays, mine, rank, world, reduction, impl, learned) -> None:
    expected, expected_gradients = evaluate(case, arrays, reduction, learned)
    by = {} if impl is None else {"impl": impl}
    value, gradients = evaluate(case, mine, reduction, learned, gather=True, **by)
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
    assert any(gradient.any() for gradient in gradients.values())


@functools.cache
def results(world: int) -> list[dict[str, str]]:
    return run_ranks(world, compare, world)


TRIED = [
    (world, key_of(case, *variant))
    for world, cases in BY_RANKS.items()
    for case in cases
    for variant in variants(case, world)
]


@pytest.mark.parametrize(("world", "name"), TRIED)
def test_value_and_averaged_gradients_are_those_of_one_process(world, name):
    assert [found[name] for found in results(world)] == [""] * world
