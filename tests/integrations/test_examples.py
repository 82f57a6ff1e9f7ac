"""Every example trains, resumes with equal state, logs, and prints held-out active dimensions."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations import setting

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HELD_OUT = re.compile(r"held-out active dimensions: (\d+\.\d)")
ALONE = ["train_with_transformers", "train_with_accelerate", "train_with_lightning"]


# Lightning advises more workers and a logging interval that a tiny data set does not have.
@pytest.mark.filterwarnings("ignore:.*(num_workers|logging interval).*")
@pytest.mark.filterwarnings("ignore:sentence-transformers does not apply thresholds:UserWarning")
@pytest.mark.parametrize("name", ALONE)
def test_example_trains_and_resumes(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    try:
        setting.example(name).main(tmp_path)
    finally:
        setting.forget_accelerator()
    assert 1 < float(HELD_OUT.search(capsys.readouterr().out)[1]) < 4


def test_ddp_example_on_two_ranks(tmp_path):
    assert {path.stem for path in EXAMPLES.glob("train_with_*.py")} == {*ALONE, "train_with_ddp"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += [str(EXAMPLES / "train_with_ddp.py"), str(tmp_path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert 1 < float(HELD_OUT.search(run.stdout)[1]) < 4
