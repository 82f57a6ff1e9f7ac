"""examples/train_ddp.py on two gloo ranks: one process's figures, resumed, killed, compiled.

All runs that end well share two torchrun calls, one of a rank and one of two.
"""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from sparse_losses import SpladeEncoder
from tests.distributed import recipe
from tests.representation import tiny_models

FOLDER = tempfile.TemporaryDirectory()
ENVIRONMENT = {
    **os.environ,
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(recipe.SCRIPT.parents[1]),
}
STEPS = 6  # of an epoch of 48 pairs, 8 pairs a step
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def torchrun(ranks: int, script: Path, *words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script)]
    return subprocess.run(
        [*command, *map(str, words)], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


@functools.cache
def models() -> Path:
    """A folder with a model in fp64 without dropout, one in fp32 with, and pairs of texts."""
    folder = Path(FOLDER.name)
    for name, settings, dtype in (
        ("exact", DROPOUT, torch.float64),
        ("dropout", {}, torch.float32),
    ):
        model, tokenizer = tiny_models.pair("bert", **settings)
        SpladeEncoder(model.to(dtype), tokenizer).save_pretrained(folder / name)
    words = " ".join(tiny_models.TEXTS).split()
    lines = [
        {
            "query": " ".join(words[(i + j) % len(words)] for j in range(2 + i % 3)),
            "document": " ".join(words[(i * 5 + j) % len(words)] for j in range(4 + i % 5)),
        }
        for i in range(48)
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "pairs.jsonl").write_text(text, encoding="utf-8")
    text = '{"query": "a\u2028b", "document": "c"}\n\n{"anchor": "d"}\n'
    (folder / "wrong.jsonl").write_text(text, encoding="utf-8")
    return folder


def arguments(run: str, model: str, batch_size: int, *more: object) -> list[str]:
    folder = models()
    words = ["--data", folder / "pairs.jsonl", "--model", folder / model, "--folder", folder / run]
    words += ["--batch-size", batch_size, "--target-active", 20, "--learning-rate", 1e-3]
    return [str(word) for word in [*words, "--save-every", 2, *more]]


# What a run is told, and what it says.
MISTAKES = {
    "other ranks, batch or data": (["--resume", "--batch-size", 2], "--batch-size': 4"),
    "no checkpoint": (["--resume", "--folder", "nowhere"], "expected a checkpoint to --resume"),
    "too few pairs": (["--batch-size", 64], "expected 64 pairs a rank for one step, got 24"),
    "no pairs": (["--data", "wrong.jsonl"], "in line 3 of"),
}


def runs_of(ranks: int) -> list[dict]:
    """What is run, in this order; a rank has its share of the 8 pairs of a step."""
    share, folder = 8 // ranks, models()
    halves = "exact", share // 2, "--accumulate", 2
    runs = []

    def add(name, words, into=None, **different):
        words = arguments(f"{ranks}-{into or name}", *words)
        runs.append({"arguments": words, "output": f"{folder}/{ranks}-{name}.out", **different})

    add("plain", ("exact", share))
    add("accumulated", halves)
    if ranks == 1:
        return runs
    add("decomposes", ("exact", share), decomposes=True)
    add("decomposes-accumulated", halves, decomposes=True)
    add("compiled", ("exact", share, "--compile"))
    for precision in ("bf16", "fp16"):
        add(precision, ("dropout", share, "--precision", precision))
    longer = "dropout", share, "--epochs", 2
    add("long", longer)
    add("stopped", longer, into="again", stop_at=STEPS + 3)
    add("resumed", (*longer, "--resume"), into="again")
    for name, (more, _) in MISTAKES.items():
        more = [folder / x if str(x).endswith((".jsonl", "nowhere")) else x for x in more]
        add(name, ("exact", share, *more), into="plain", is_mistake=True)
    return runs


@functools.cache
def all_runs(ranks: int) -> subprocess.CompletedProcess:
    file = models() / f"runs-{ranks}.json"
    file.write_text(json.dumps(runs_of(ranks)), encoding="utf-8")
    return torchrun(ranks, Path(recipe.__file__), file)


def done(ranks: int) -> Path:
    assert all_runs(ranks).returncode == 0, all_runs(ranks).stderr
    return models()


def lines(ranks: int, name: str) -> list[dict]:
    text = (done(ranks) / f"{ranks}-{name}.out-0").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def weights(ranks: int, name: str) -> dict[str, torch.Tensor]:
    return torch.load(done(ranks) / f"{ranks}-{name}" / "checkpoint.pt")["training"]


def assert_alike(one, other, tolerance: float) -> None:
    """The same losses at every step, and weights in the end."""
    (ranks, name), (other_ranks, other_name) = one, other
    mine, theirs = lines(ranks, name), lines(other_ranks, other_name)
    assert len(mine) == len(theirs) == STEPS
    for line, expected in zip(mine, theirs, strict=True):
        assert line["total"] == pytest.approx(expected["total"], rel=tolerance), line["step"]
    expected = weights(other_ranks, other_name)
    for key, weight in weights(ranks, name).items():
        torch.testing.assert_close(weight, expected[key], rtol=tolerance, atol=tolerance)


@pytest.mark.works_with("PyTorch", "fp32", "devices")
def test_two_ranks_train_as_one_process_with_the_global_batch():
    assert_alike((2, "plain"), (1, "plain"), 1e-6)
    start = SpladeEncoder.from_pretrained(models() / "exact").state_dict()
    moved = [
        not torch.equal(weight, start[key.removeprefix("encoder.")])
        for key, weight in weights(2, "plain").items()
        if key.startswith("encoder.") and weight.is_floating_point()
    ]
    assert sum(moved) > len(moved) / 2


@pytest.mark.works_with("PyTorch", "fp32", "accumulation", "devices")
def test_accumulated_batches_of_two_ranks_are_those_of_one_process():
    assert_alike((2, "accumulated"), (1, "accumulated"), 1e-6)
    one, other = lines(2, "plain")[0], lines(2, "accumulated")[0]
    assert one["total"] > other["total"] + 0.1, "half as many candidates"


@pytest.mark.works_with("PyTorch", "fp32", "accumulation")
def test_a_loss_of_one_text_at_a_time_is_the_same_accumulated():
    assert_alike((2, "decomposes-accumulated"), (2, "decomposes"), 1e-6)


@pytest.mark.works_with("PyTorch", "compile", "devices")
def test_compiled_two_ranks_train_as_one_process_in_eager_mode():
    assert_alike((2, "compiled"), (1, "plain"), 1e-6)
    assert lines(2, "compiled")[-1]["sparsity"] == lines(1, "plain")[-1]["sparsity"]


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("bf16", marks=pytest.mark.works_with("PyTorch", "bf16", "devices")),
        pytest.param("fp16", marks=pytest.mark.works_with("PyTorch", "fp16", "devices")),
    ],
)
def test_in_half_precision_it_trains_much_as_in_single(precision):
    reference, found = lines(2, "long"), [x for x in lines(2, precision) if not x["skipped"]]
    assert found, "not every step was skipped"
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    for line, expected in zip(found, reference, strict=False):
        assert line["total"] == pytest.approx(expected["total"], rel=0.05), line["step"]
        assert line["total"] != expected["total"], "it was another precision"


@pytest.mark.works_with("PyTorch", "resume", "devices")
def test_a_resumed_run_has_the_same_figures_to_the_bit():
    whole, resumed = lines(2, "long"), lines(2, "resumed")
    assert len(whole) == 2 * STEPS
    assert resumed[0]["step"] == 9, "from the checkpoint of step 8, in the second epoch"
    assert resumed == whole[8:]
    expected = weights(2, "long")
    for key, weight in weights(2, "again").items():
        assert torch.equal(weight, expected[key]), key


@pytest.mark.works_with("PyTorch", "resume", "devices")
def test_killed_in_a_step_the_run_ends_and_goes_on_from_the_checkpoint():
    folder = models()
    words = arguments("killed", "dropout", 4, "--timeout", 20)
    each = {"arguments": words, "output": str(folder / "killed.out"), "kill_at": 6}
    (folder / "killed.json").write_text(json.dumps([each]), encoding="utf-8")
    found = torchrun(2, Path(recipe.__file__), folder / "killed.json")
    assert found.returncode != 0
    assert "SIGKILL" in found.stderr
    resumed = torchrun(2, Path(recipe.__file__), recipe.SCRIPT, *words, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    found_lines = [json.loads(line) for line in resumed.stdout.splitlines() if line[:1] == "{"]
    assert found_lines == lines(2, "long")[4:STEPS]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_and_overwrites_nothing(name):
    """Nothing: the checkpoint that two of the tests above compare is the one they were told."""
    for rank in (0, 1):
        assert MISTAKES[name][1] in (done(2) / f"2-{name}.out-{rank}").read_text(encoding="utf-8")


def test_plain_python_is_told_to_use_torchrun():
    environment = {name: x for name, x in ENVIRONMENT.items() if name != "RANK"}
    command = [sys.executable, str(recipe.SCRIPT)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "torchrun --nproc-per-node 2" in found.stderr


@pytest.mark.parametrize("what", ["kill_at", "hang_at"])
def test_without_torchrun_the_other_rank_ends_with_an_error_in_time(what):
    folder, seconds = models(), 15
    words = arguments(what, "dropout", 4, "--timeout", seconds)
    each = {"arguments": words, "output": str(folder / f"{what}.out"), what: 2}
    file = folder / f"{what}.json"
    file.write_text(json.dumps([each]), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, recipe.__file__, str(file)],
            env={**ENVIRONMENT, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, said = processes[0].communicate(timeout=20 * seconds)
        assert processes[0].returncode != 0
        assert ("Timed out" if what == "hang_at" else "onnection") in said
        assert "--resume" in said
    finally:
        for process in processes:
            process.kill()
            process.communicate()
