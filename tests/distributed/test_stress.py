"""Ranks that leave, are silent, are slow or hold a NaN: an error or the value, and in time."""

import functools
import json
import subprocess
import sys

import pytest
import torch

from tests.cases import FIRST, to_tensors
from tests.distributed.leaving import CALLS, IN_BACKWARD, TIMEOUT
from tests.distributed.ranks import run_ranks
from tests.distributed.test_gather import part, whole

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
SLACK = 20  # seconds, for a busy machine: a hang would take for ever


@functools.cache
def found() -> dict[str, list]:
    words = [sys.executable, "-m", "tests.distributed.leaving"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120)
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


def test_a_rank_that_leaves_within_a_step_ends_the_others_backward_pass():
    assert_all_end_in_time("exits before the backward pass", (IN_BACKWARD,), TIMEOUT)


def test_a_silent_rank_is_an_error_after_the_timeout_of_the_group():
    assert_all_end_in_time("is silent", ("info_nce",), TIMEOUT + SLACK)


def nan_on_one(rank: int) -> list[str]:
    hidden = []
    for stem, case in FIRST.items():
        mine = to_tensors(part(case, whole(case, 2, seed=2), rank, 2))
        leaf = mine[case.differentiable[0]]
        leaf[:rank] = torch.nan
        value = case.function()(
            **mine | {case.differentiable[0]: leaf.requires_grad_()}, gather=True
        )
        value.backward()
        if not value.isnan() or leaf.grad.shape != leaf.shape:
            hidden.append(stem)
    return hidden


def test_a_nan_on_one_rank_is_the_value_of_all_and_nobody_waits():
    assert run_ranks(2, nan_on_one) == [[], []]
