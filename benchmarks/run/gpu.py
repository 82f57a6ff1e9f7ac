"""``python -m benchmarks.run.gpu``: all tests and measurements on a GPU, within 25 minutes.

The parts are the tests on the device, every loss at the sizes for a GPU, and a training step. Each
has a time limit. Results are kept, and a second run continues where the first stopped. A part whose
packages are missing is skipped with a message.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Outcome", "Part", "main", "parts", "run", "why_left_out"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GRACE = 15  # seconds for an interrupted process to save its results
TESTED = ("tests/losses", "tests/representation", "tests/objective")


@dataclass(frozen=True)
class Part:
    """One command."""

    name: str
    command: tuple[str, ...]
    seconds: float  # time limit
    modules: tuple[str, ...] = ()  # required; without them the part is skipped


@dataclass(frozen=True)
class Outcome:
    """The result of a part."""

    part: str
    said: str
    seconds: float = 0.0
    is_good: bool = True


def parts(output: Path, device: str = "cuda") -> list[Part]:
    """Return all parts in order: correctness first, then speed."""
    python = sys.executable
    # Versions of pytest and PyTorch may differ from the pinned ones, so warnings are not errors.
    test = (python, "-m", "pytest", "-q", "--device", device, "-p", "no:cacheprovider")
    test += ("-o", "minversion=7", "-W", "default", "--tb=short", "--maxfail=40")
    if importlib.util.find_spec("xdist"):
        test += ("-n", str(max(1, min(8, (os.cpu_count() or 2) // 2))))
    suite = "gpu" if device == "cuda" else "tiny"
    bench = (python, "-m", "benchmarks", "--device", device, "--suite", suite)
    bench += ("--training-only",)  # a separate forward pass would double the time to compile
    step = (python, "-m", "benchmarks.studies.training_step", "--device", device)
    step += () if device == "cuda" else ("--tiny",)
    losses, training = (str(output / f"{device}-{name}.csv") for name in ("gpu", "training"))
    return [
        Part("tests", (*test, *TESTED), 320, ("pytest", "hypothesis")),
        Part("losses", (*bench, "--output", losses), 880, ("rich",)),
        Part("training", (*step, "--output", training), 240, ("rich", "transformers")),
    ]


def why_left_out(part: Part) -> str:
    """Return which required modules are missing, or an empty string."""
    missing = [name for name in part.modules if importlib.util.find_spec(name) is None]
    return f"left out: no {', '.join(missing)}" if missing else ""


def run(part: Part, log: Path, seconds: float) -> Outcome:
    """Run a part, print and log its output, and stop it at its time limit."""
    if reason := why_left_out(part):
        return Outcome(part.name, reason)
    if seconds < 1:
        return Outcome(part.name, "left out: no time")
    start = time.monotonic()
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    reader = threading.Thread(target=_copy, args=(process, log), daemon=True)
    reader.start()
    said = ""
    try:
        code = process.wait(seconds)
        said = "done" if code == 0 else f"FAILED, code {code}"
    except subprocess.TimeoutExpired:
        said = "out of time; what it had is kept"
        _stop(process)
    except BaseException:
        _stop(process)
        raise
    reader.join(GRACE)
    return Outcome(part.name, said, time.monotonic() - start, not said.startswith("FAILED"))


def _copy(process: subprocess.Popen[str], log: Path) -> None:
    assert process.stdout is not None
    with process.stdout as source, log.open("w", encoding="utf-8") as target:
        for line in source:
            print(line, end="", flush=True)
            target.write(line)
            target.flush()


def _stop(process: subprocess.Popen[str]) -> None:
    """Stop the process and its children, first by SIGINT, then by SIGKILL."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    with contextlib.suppress(ProcessLookupError):  # remaining children
        os.killpg(process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1", **os.environ}
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if one failed."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.run.gpu", description=__doc__)
    options.add_argument("--parts", default="", help="parts to run, such as tests,losses")
    options.add_argument("--minutes", type=float, default=25.0, help="total time (default: 25)")
    options.add_argument(
        "--output", type=Path, default=RESULTS, help="folder of the CSVs (benchmarks/results)"
    )
    options.add_argument(
        "--logs",
        type=Path,
        default=ROOT / "build" / "gpu",
        help="folder for the logs of the parts (build/gpu)",
    )
    options.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda", help="cpu: a smoke test"
    )
    options.add_argument("--list", action="store_true", help="show the commands and exit")
    args = options.parse_args(arguments)
    todo = parts(args.output.resolve(), args.device)
    names = [part.name for part in todo]
    wanted = [name for name in args.parts.split(",") if name] or names
    if unknown := [name for name in wanted if name not in names]:
        options.error(f"expected --parts of {', '.join(names)}, got {', '.join(unknown)}")
    todo = [part for part in todo if part.name in wanted]
    if args.list:
        for part in todo:
            print(f"{part.name} ({part.seconds:.0f} s): {' '.join(part.command)}")
        return 0
    args.logs.mkdir(parents=True, exist_ok=True)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is available; --device cpu runs a smoke test")
    args.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    outcomes = []
    for part in todo:
        left = end - time.monotonic() - GRACE
        print(f"== {part.name}, at most {max(0, min(part.seconds, left)):.0f} s", flush=True)
        log = args.logs / f"{part.name}.log"
        outcomes.append(run(part, log, min(part.seconds, left)))
        print(f"== {part.name}: {outcomes[-1].said}", flush=True)
    print("\n| part | seconds | |\n| --- | --- | --- |")
    for outcome in outcomes:
        print(f"| {outcome.part} | {outcome.seconds:.0f} | {outcome.said} |")
    return int(not all(outcome.is_good for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
