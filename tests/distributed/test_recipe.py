"""train_with_ddp.py and the loop of docs/distributed.md: two gloo ranks train as one process."""

import contextlib
import functools
import itertools
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import as_torchrun_would, example, run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
works_with = pytest.mark.works_with
STEPS = 25
FEW = {"steps": 6}
RUNS = {  # by their name: the options of two ranks with a batch of 4 each
    "plain": FEW,
    "accumulated": {"batch_size": 2, "accumulate": 2} | FEW,
    "compiled": {"compiled": True} | FEW,
    "single": {"exact": False},
    "bf16": {"exact": False, "dtype": torch.bfloat16},
    "fp16": {"exact": False, "dtype": torch.float16},
    "dropout": {"exact": False, "dropout": 0.1},
    "stopped": {"exact": False, "dropout": 0.1, "stop_at": 23},
}
OF_ONE = {"plain": {"batch_size": 8} | FEW}
OF_ONE["accumulated"] = {"batch_size": 4, "accumulate": 2} | FEW


def run(folder, *, dropout=0.0, exact=True, compiled=False, stop_at=None, **options):
    """Train as the example does; return its last state."""
    script = example()
    training = script.start()
    training.encoder = script.tiny.encoder(dropout)
    if exact:
        training.encoder.double()
    if compiled:  # PyTorch's own operations: code for them takes a minute
        torch._dynamo.reset()
        training.compile(backend="aot_eager")
    if stop_at is not None:
        passes = itertools.count(1)

        def stop(*_):
            if next(passes) == stop_at:
                raise InterruptedError

        training.register_forward_pre_hook(stop)
    return script.train(training, folder, **options)


def run_all(rank, folder, runs):
    """Return the last state of every run; of a stopped one, that of the run that resumes it."""
    states = {}
    for name, options in runs.items():
        try:
            states[name] = run(folder / name, **options)
        except InterruptedError:
            last = max((folder / name).glob("step-*.pt"))
            again = {key: value for key, value in options.items() if key != "stop_at"}
            states[name] = run(folder / name, **again, resume=last)
    return states


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """The last state of every run, by the number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    two = {name: {"batch_size": 4, "steps": STEPS} | options for name, options in RUNS.items()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = run_all(0, folder / "1", OF_ONE)
    finally:
        dist.destroy_process_group()
    return {1: alone, 2: run_ranks(2, run_all, folder / "2", two)[0]}


def assert_same(state, other, tolerance):
    """The same loss in the last step, weights, and state of the schedule."""
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(state["training"], other["training"])
    assert state["log"] == pytest.approx(other["log"], rel=10 * tolerance, abs=10 * tolerance)
    assert state["schedule"] == pytest.approx(other["schedule"], rel=10 * tolerance)


@works_with("PyTorch", "fp32", "devices")
def test_two_ranks_train_as_one_process_with_the_global_batch(states):
    assert_same(states[2]["plain"], states[1]["plain"], 1e-6)
    start = example().tiny.encoder().state_dict()
    weights = states[2]["plain"]["training"]
    moved = [not torch.equal(weights[f"encoder.{name}"].float(), x) for name, x in start.items()]
    assert sum(moved) > len(moved) / 2


@works_with("PyTorch", "fp32", "accumulation", "devices")
def test_accumulated_batches_of_two_ranks_are_those_of_one_process(states):
    assert_same(states[2]["accumulated"], states[1]["accumulated"], 1e-6)
    assert states[2]["plain"]["log"] != states[2]["accumulated"]["log"], "half the candidates"


@works_with("PyTorch", "compile", "devices")
def test_compiled_two_ranks_train_as_one_process_in_eager_mode(states):
    assert_same(states[2]["compiled"], states[1]["plain"], 1e-6)


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("bf16", marks=works_with("PyTorch", "bf16", "devices")),
        pytest.param("fp16", marks=works_with("PyTorch", "fp16", "devices")),
    ],
)
def test_half_precision_trains_much_as_single(states, precision):
    half, single = states[2][precision], states[2]["single"]
    taken = half["schedule"]["steps_taken"]
    assert STEPS - 12 < taken <= STEPS, "a few steps of fp16 overflow and are skipped"
    assert half["log"]["info_nce"] == pytest.approx(single["log"]["info_nce"], abs=0.5)
    assert half["log"] != single["log"]


@works_with("PyTorch", "resume", "devices")
def test_a_resumed_run_is_the_same_to_the_bit(states):
    """It was interrupted after the checkpoint of its twentieth step, in a forward pass."""
    whole, resumed = states[2]["dropout"], states[2]["stopped"]
    torch.testing.assert_close(resumed["training"], whole["training"], rtol=0, atol=0)
    for name in ("schedule", "log", "step"):
        assert resumed[name] == whole[name]


def run_page(rank, script, printed):
    with printed.open("a") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.works_with("PyTorch", "fp32", "devices")
def test_the_loop_of_the_page_prints_the_same_on_one_rank_and_on_two(tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = [block for block in blocks if "init_process_group" in block]
    script = tmp_path / "loop.py"
    script.write_text(block, encoding="utf-8")
    numbers = []
    for ranks in (1, 2):
        printed = tmp_path / f"{ranks}.txt"
        as_torchrun_would(run_page, script, printed, processes=ranks)
        numbers.append([float(line) for line in printed.read_text().split()])
    one, two = numbers
    assert len(one) == 3
    assert two == pytest.approx(one, abs=2e-4)
    assert one[0] != one[1]
