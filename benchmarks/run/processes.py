"""The worker process, and a new one after a variant broke it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["AGAIN", "start"]

ROOT = Path(__file__).resolve().parents[2]
AGAIN = 3  # exit code of a worker that asks for a new process
MOST_PROCESSES = 20


def start(arguments: Sequence[str]) -> int:
    """Run ``python -m benchmarks`` with these arguments as a worker; return its exit code."""
    # Spinning idle threads slow down the busy ones on small machines.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "benchmarks", *arguments, "--worker"]
    for _ in range(MOST_PROCESSES):
        code = subprocess.run(command, env=environment, check=False).returncode
        if code != AGAIN:
            break
        command = [word for word in command if word != "--fresh"]
    return code
