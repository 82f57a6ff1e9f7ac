"""``python -m benchmarks``: measure, write a CSV, draw it, and print what came out."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

AGAIN = 3  # what the worker ends with where another is to go on
RESULTS = Path(__file__).parent / "results"
# With these, glibc keeps what it once got: big tensors are not paged in anew at every call.
WARM = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "20000000000"}
BUDGET = {"tiny": 0.05, "aims": 0.4, "quick": 0.4, "kernels": 0.4, "full": 1.0}
MOST_PROCESSES = 20  # that a variant may break, one after the other
ALLOCATORS = {"both": ["default", "warm"], "default": ["default"], "warm": ["warm"]}


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument(
        "--suite",
        choices=["tiny", "quick", "full", "aims", "kernels"],
        default="quick",
        help="tiny: to see that it runs; quick: under 5 minutes on two cores; full: about 25; "
        "aims: what the aims speak of; kernels: both implementations, on a GPU",
    )
    options.add_argument(
        "--only", default="", help="losses, separated by commas: info_nce,splade_head"
    )
    options.add_argument(
        "--allocator",
        choices=list(ALLOCATORS),
        default="default",
        help="default: memory as it comes; warm: kept by the process; both: one after the other",
    )
    options.add_argument("--output", type=Path, help="the CSV (default: results/DEVICE-SUITE.csv)")
    options.add_argument("--fresh", action="store_true", help="forget the rows of an earlier run")
    options.add_argument(
        "--training-only", action="store_true", help="leave the forward pass alone out"
    )
    options.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options.add_argument("--no-plots", action="store_true", help="leave the SVGs out")
    options.add_argument("--threads", type=int, help="of PyTorch (default: its own choice)")
    options.add_argument("--list", action="store_true", help="name the cases and stop")
    options.add_argument("--worker", help=argparse.SUPPRESS)  # the allocator's setting
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts one process for each setting of the allocator, then draws."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = parser().parse_args(arguments)
    output = args.output or RESULTS / f"{args.device}-{args.suite}.csv"
    if args.worker:
        from benchmarks.worker import work

        return work(args, output, budget=BUDGET[args.suite])
    if args.list:
        from benchmarks.cases import cases

        for case in cases(args.suite, _names(args.only)):
            print(f"{case.loss:22}{case.name}")
        return 0
    allocator = args.allocator
    if args.device == "cuda":
        allocator = "default"  # the GPU's allocator is always warm
    start = time.perf_counter()
    failed = 0
    for number, setting in enumerate(ALLOCATORS[allocator]):
        # Idle threads that spin starve the busy ones on small machines.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        environment |= WARM if setting == "warm" else {}
        words = [word for word in arguments if word != "--fresh" or number == 0]
        command = [sys.executable, "-m", "benchmarks", *words, "--worker", setting]
        path = os.pathsep.join(
            filter(None, [str(RESULTS.parents[1]), os.environ.get("PYTHONPATH")])
        )
        environment["PYTHONPATH"] = path
        for _ in range(MOST_PROCESSES):
            code = subprocess.run(command, env=environment, check=False).returncode
            if code != AGAIN:
                break
            command = [word for word in command if word != "--fresh"]
        if code not in (0, 1):
            return code
        failed |= code
    if not args.no_plots:
        from benchmarks.plots import draw

        for picture in draw(output):
            print(picture)
    if output.exists():
        print(f"{output}: {time.perf_counter() - start:.0f} s")
    return failed


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
