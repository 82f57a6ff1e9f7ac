"""The script for a GPU, as far as a CPU can run it."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("rich")

from benchmarks import __main__ as command
from benchmarks.studies import training_step
from tests.on_device import on_device

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, python: str, *parts: str) -> subprocess.CompletedProcess[str]:
    """The parts of benchmarks/gpu.sh, with another program in place of Python."""
    words = [str(ROOT / "benchmarks" / "gpu.sh"), *parts]
    env = {**os.environ, "PYTHON": python, "LOGS": str(folder)}
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


def test_every_part_is_a_valid_command(tmp_path: Path):
    ran = run(tmp_path, "echo")
    assert ran.returncode == 0
    is_done = {
        part: f"== {part}: done" in ran.stdout for part in ("training", "losses", "ranks", "tests")
    }
    assert all(is_done.values())
    calls = {part: (tmp_path / f"{part}.log").read_text().split() for part in is_done}
    for part, parser in (("losses", command.parser()), ("training", training_step.parser())):
        assert parser.parse_args(calls[part][2:]).device == "cuda"
    assert calls["losses"][1] == "benchmarks"
    assert calls["training"][1] == training_step.__name__
    files = [word for part in calls for word in calls[part] if word.startswith("tests/")]
    assert len(files) == 4
    assert all((ROOT / file).exists() for file in files)


def test_named_parts_run_and_a_failure_is_reported(tmp_path: Path):
    ran = run(tmp_path, "false", "losses")
    assert ran.returncode == 1
    assert "== losses: FAILED" in ran.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["losses.log"]
    ran = run(tmp_path, "echo", "five")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "got five" in ran.stderr


def test_code_for_the_cpu_runs_on_a_device():
    with on_device("meta"):
        generator = torch.Generator("cpu")
        assert isinstance(generator, torch.Generator)
        assert torch.Generator | None  # an annotation somewhere
        assert torch.ones(2).device.type == torch.from_numpy(np.ones(2)).device.type == "meta"
    with on_device("cpu"):
        x = torch.rand(3, generator=torch.Generator().manual_seed(0))
        assert torch.from_numpy(x.numpy()).equal(x)
        np.testing.assert_array_equal(np.asarray(x, dtype=np.float64), x.double().numpy())
    assert torch.ones(1).device.type == "cpu"
    assert torch.Generator is type(generator)
