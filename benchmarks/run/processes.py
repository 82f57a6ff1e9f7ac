"""Worker processes: one per allocator setting, and a new one after a variant broke one."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["AGAIN", "ALLOCATORS", "start"]

ROOT = Path(__file__).resolve().parents[2]
AGAIN = 3  # exit code of a worker that asks for a new process
# With these, glibc keeps freed memory, so that large tensors are not paged in at every call.
WARM = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "20000000000"}
ALLOCATORS = {"both": ["default", "warm"], "default": ["default"], "warm": ["warm"]}
MOST_PROCESSES = 20  # per allocator setting


def start(arguments: Sequence[str], allocators: Sequence[str]) -> int:
    """Run ``python -m benchmarks`` with these arguments as a worker, once per allocator setting.

    Returns:
        The exit code of the first worker that could not start, else 1 if one found an error.
    """
    failed = 0
    for number, allocator in enumerate(allocators):
        # Spinning idle threads slow down the busy ones on small machines.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        environment |= WARM if allocator == "warm" else {}
        paths = [str(ROOT), os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        words = [word for word in arguments if word != "--fresh" or number == 0]
        command = [sys.executable, "-m", "benchmarks", *words, "--worker", allocator]
        for _ in range(MOST_PROCESSES):
            code = subprocess.run(command, env=environment, check=False).returncode
            if code != AGAIN:
                break
            command = [word for word in command if word != "--fresh"]
        if code not in (0, 1):
            return code
        failed |= code
    return failed
