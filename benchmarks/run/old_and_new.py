"""``python -m benchmarks.run.old_and_new FOLDER``: this package and an older one, interleaved.

FOLDER holds the older ``sparse_losses``. Each of the two has a process, which draws the same
inputs; the processes take turns, a forward and a backward pass at a time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 5


def serve(device_name: str, suite: str) -> None:
    """Answer the number of a case with the time of a call and its peak memory, or the error."""
    import torch

    from benchmarks.losses import cases
    from benchmarks.run import memory, timing
    from benchmarks.run.check import ready
    from benchmarks.schema import Maker

    device, all_cases, run, now = torch.device(device_name), cases(suite), None, -1
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        try:
            if int(line) != now:
                run, now, case = None, int(line), all_cases[int(line)]
                own = next(each for each in case.variants() if each.name == "ours")
                run = ready(case, own, [case.inputs(Maker(device))]).train
                run(0)
                answer["peak_bytes"] = memory.peak_bytes(run, device)[0]
            assert run is not None
            taken = timing.interleave({"": run}, device, budget=0.0, min_rounds=1, max_rounds=1)
            answer["seconds"] = taken[""][0]
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:150]
        print(json.dumps(answer), flush=True)


class Side:
    """A process that has one of the two packages."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        path = os.pathsep.join(map(str, (folder, ROOT)))
        words = [sys.executable, "-m", "benchmarks.run.old_and_new", "--serve"]
        words += ["--device", args.device, "--suite", args.suite]
        env = {**os.environ, "PYTHONPATH": path}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(words, env=env, cwd=folder, text=True, **pipes)

    def ask(self, number: int) -> dict[str, Any]:
        """Return the answer for a case."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(number, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "the process ended"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases within the budget, and write a row for each."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.run.old_and_new")
    options.add_argument("folder", type=Path, nargs="?")
    options.add_argument("--device", default="cuda")
    options.add_argument("--suite", default="gpu")
    options.add_argument("--budget", type=float, default=270.0, help="seconds")
    options.add_argument("--output", type=Path)
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args(arguments)
    if args.serve:
        serve(args.device, args.suite)
        return 0
    if not args.folder or not (args.folder / "sparse_losses").is_dir():
        print(f"expected a folder with an older sparse_losses, got {args.folder}", file=sys.stderr)
        return 2
    import torch

    from benchmarks.losses import cases
    from benchmarks.run import timing
    from benchmarks.run.table import circumstances, write

    sides = {"old": Side(args.folder.resolve(), args), "new": Side(ROOT, args)}
    common, rows = circumstances(torch.device(args.device), args.suite), []
    begun, all_cases = time.perf_counter(), cases(args.suite)
    for number, case in enumerate(all_cases):
        end = begun + args.budget * (number + 1) / len(all_cases)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(ROUNDS):
            if time.perf_counter() > end:
                break
            for name, side in sides.items():
                found[name].append(side.ask(number))
        for name, answers in found.items():
            row = {"loss": case.loss, "case": case.name, "variant": name, **common}
            taken = [each["seconds"] for each in answers if "seconds" in each]
            errors = [each["error"] for each in answers if "error" in each]
            row["status"] = errors[0] if errors else "ok" if taken else "skipped: out of time"
            if taken and not errors:
                row |= {"rounds": len(taken), "peak_bytes": answers[0]["peak_bytes"]}
                row |= timing.columns("seconds", taken)
            rows.append(row)
            print(*(row.get(key, "") for key in ("loss", "case", "variant", "status", "seconds")))
        write(args.output or ROOT / "benchmarks" / "results" / f"{args.device}-old-new.csv", rows)
    for side in sides.values():
        side.process.terminate()
        side.process.communicate()
    return int(
        any(x["variant"] == "new" and not x["status"].startswith(("ok", "sk")) for x in rows)
    )


if __name__ == "__main__":
    sys.exit(main())
