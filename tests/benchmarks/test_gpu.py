"""The script for a GPU, as far as a CPU can run it."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("rich")

from benchmarks import losses
from benchmarks.run import old_and_new
from benchmarks.run.table import read
from benchmarks.studies import training_step

ROOT = Path(__file__).resolve().parents[2]
PARTS = "tests", "compare", "training-0.01", "training-1", "graphs"


def test_every_part_is_a_valid_command(tmp_path: Path):
    """With another program in place of Python."""
    env = {**os.environ, "PYTHON": "echo", "LOGS": str(tmp_path)}
    script = str(ROOT / "benchmarks" / "gpu.sh")
    ran = subprocess.run([script], env=env, capture_output=True, text=True, check=True)
    assert all(f"== {part}: done" in ran.stdout for part in PARTS)
    calls = {part: (tmp_path / f"{part}.log").read_text().split() for part in PARTS}
    for active in ("0.01", "1"):
        _, module, *words = calls[f"training-{active}"]
        assert module == training_step.__name__
        assert training_step.parser().parse_args(words).active == float(active)
    for part in ("compare", "graphs"):
        assert importlib.util.find_spec(calls[part][1])
    files = [word for word in calls["tests"] if word.startswith("tests/")]
    assert [file for file in files if not (ROOT / file).exists()] == []
    failed = subprocess.run([script, "graphs"], env={**env, "PYTHON": "false"}, check=False)
    assert failed.returncode == 1


def test_old_and_new_are_measured_in_two_processes(tmp_path: Path, monkeypatch):
    """This package against itself, with the first small case on a CPU."""
    first = losses.cases("tiny")[:1]
    monkeypatch.setattr(losses, "cases", lambda suite: first)
    (tmp_path / "sparse_losses").symlink_to(ROOT / "sparse_losses")
    output = tmp_path / "rows.csv"
    words = ["--device", "cpu", "--suite", "tiny", "--output", str(output)]
    assert old_and_new.main([str(tmp_path), *words]) == 0
    rows = read(output)
    assert [(row["variant"], row["status"]) for row in rows] == [("old", "ok"), ("new", "ok")]
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert old_and_new.main([str(tmp_path / "none"), *words]) == 2
