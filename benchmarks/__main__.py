"""``python -m benchmarks``: measure, write a CSV, and print the results."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
BUDGET = {"tiny": 0.05, "aims": 0.4, "quick": 0.4, "gpu": 0.3, "full": 1.0}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument(
        "--suite",
        choices=list(BUDGET),
        default="quick",
        help="tiny: a smoke test; quick: a few minutes on two cores; full: every size; "
        "aims: the larger sizes that the pages show; gpu: the sizes for a GPU",
    )
    options.add_argument(
        "--only", default="", help="losses, separated by commas, such as info_nce,splade_head"
    )
    options.add_argument("--case", default="", help="only sizes whose name contains this: bf16")
    options.add_argument("--output", type=Path, help="the CSV (default: results/DEVICE-SUITE.csv)")
    options.add_argument("--fresh", action="store_true", help="discard the rows of earlier runs")
    options.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    options.add_argument("--list", action="store_true", help="list the cases and exit")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a suite, or list its cases."""
    args = parser().parse_args(arguments)
    # Spinning idle threads slow down the busy ones on small machines; read when PyTorch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if args.list:
        from benchmarks.losses import cases

        for case in cases(args.suite, [name for name in args.only.split(",") if name], args.case):
            print(f"{case.loss:22}{case.name}")
        return 0
    from benchmarks.run.worker import work

    output = args.output or RESULTS / f"{args.device}-{args.suite}.csv"
    begin = time.perf_counter()
    code = work(args, output, budget=BUDGET[args.suite])
    if output.exists():
        print(f"{output}: {time.perf_counter() - begin:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
