"""Ranks that leave, are silent, are slow or hold a NaN: an error or the value, and in time."""

import functools
import json
import subprocess
import sys

import pytest
import torch

from sparse_losses import Diagnostics, LabelQueue
from tests.cases import FIRST, to_tensors
from tests.distributed.leaving import CALLS, IN_BACKWARD, TIMEOUT
from tests.distributed.ranks import run_ranks
from tests.distributed.test_edges import caught
from tests.distributed.test_gather import part, whole

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
SLACK = 20  # seconds, for a busy machine: a hang would take for ever


@functools.cache
def found() -> dict[str, list]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.distributed.leaving"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def assert_all_end_in_time(scenario: str, names: tuple[str, ...], seconds: float) -> None:
    *stayed, (status, said_nothing) = found()[scenario]
    assert status != 0
    assert said_nothing is None
    for status, calls in stayed:
        assert status == 0
        assert tuple(calls) == names
        for name, (said, took) in calls.items():
            assert said.startswith(("RuntimeError", "DistBackendError")), (name, said)
            assert took < seconds, (name, took)


def test_every_call_is_an_error_once_a_rank_has_left():
    assert_all_end_in_time("exits", tuple(CALLS), TIMEOUT)


@pytest.mark.parametrize("name", IN_BACKWARD)
def test_a_rank_that_leaves_within_a_step_ends_the_others_backward_pass(name):
    assert_all_end_in_time(f"exits before the backward pass of {name}", (name,), TIMEOUT)


def test_a_silent_rank_is_an_error_after_the_timeout_of_the_group():
    silent = [name for name in found() if name.startswith("is silent in ")]
    assert len(silent) == 5
    for scenario in silent:
        name = scenario.removeprefix("is silent in ")
        assert_all_end_in_time(scenario, (name,), TIMEOUT + SLACK)


# What all ranks can still do ---------------------------------------------------------------------


def nan_on_one(rank: int, world: int) -> dict[str, bool]:
    said = {}
    for stem, case in FIRST.items():
        arrays = whole(case, world, seed=2)
        mine = to_tensors(part(case, arrays, rank, world))
        name = case.differentiable[0]
        if rank == 1:
            mine[name][0] = torch.nan
        leaf = mine[name].requires_grad_()
        value = case.function()(**mine, gather=True)
        value.backward()
        said[stem] = bool(value.isnan()) and leaf.grad.shape == leaf.shape
    return said


def test_a_nan_on_one_rank_is_the_value_of_all_and_nobody_waits():
    for rank, said in enumerate(run_ranks(2, nan_on_one, 2)):
        assert said == dict.fromkeys(FIRST, True), rank


def other_sizes(rank: int) -> dict[str, str]:
    x = torch.rand(3, 5 + rank)
    queue = LabelQueue(8, 5 + rank, 2, gather=True)
    labels = LabelQueue(8, 5, 2 + rank, gather=True)
    seen = Diagnostics(5 + rank)
    seen.update(x)
    said = {
        "D": caught(queue.enqueue, x, torch.ones(3, 2)),
        "L": caught(labels.enqueue, torch.rand(3, 5), torch.ones(3, 2 + rank)),
        "V": caught(seen.all_reduce),
    }
    same = Diagnostics(5)
    same.update(torch.rand(3, 5))
    said["after"] = caught(same.all_reduce)  # nothing is left in the pipes
    return said


def test_widths_that_differ_are_errors_on_every_rank_and_no_hang():
    for said in run_ranks(2, other_sizes):
        for name in ("D", "V"):
            assert f"the same {name} on every rank" in said[name]
            assert "5 on rank 0, 6 on rank 1" in said[name]
        assert "the same L on every rank" in said["L"]
        assert said["after"] == ""
