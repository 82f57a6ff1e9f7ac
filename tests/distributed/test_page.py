"""The loop of docs/distributed.md, as it stands there, on one rank and on two."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def torchrun(ranks: int, script: Path) -> list[float]:
    """Run a script on some ranks; return the numbers that it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [float(line) for line in run.stdout.split()]


@pytest.mark.works_with("PyTorch", "fp32", "devices")
def test_the_loop_of_the_page_prints_the_same_on_one_rank_and_on_two(tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = [block for block in blocks if "init_process_group" in block]
    script = tmp_path / "loop.py"
    script.write_text(block, encoding="utf-8")
    one, two = torchrun(1, script), torchrun(2, script)
    assert len(one) == 3
    assert two == pytest.approx(one, abs=2e-4)
    assert one[0] != one[1]
