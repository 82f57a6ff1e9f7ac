"""The CSV: one row per variant, with everything needed to interpret the figures."""

import csv
import functools
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

import sparse_losses
from benchmarks.run import available
from benchmarks.run.ceilings import Ceilings
from benchmarks.run.measure import Result
from sparse_losses._core.files import replaced_file

__all__ = ["RESULTS", "ROOT", "Row", "Table", "circumstances", "largest_cases", "read"]

Row = dict[str, str]
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# All rows of a file must agree in these, as ratios across machines or commits are meaningless.
IDENTITY = ("device", "capability", "threads", "git_commit", "torch", "suite")


def _git_commit() -> str:
    """Return the commit of package and suite, marked if either was changed since.

    An environment variable may give it if the sources come without git history.
    """
    if given := os.environ.get("SPARSE_LOSSES_COMMIT"):
        return given
    paths = ["sparse_losses", "benchmarks/*.py"]
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", *paths)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("-changed" if changed else "")


def _git(*words: str) -> str:
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


def _capability(device: torch.device) -> str:
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return torch.backends.cpu.get_cpu_capability()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    words = set(next(lines, "").split())
    return " ".join(flag for flag in _FLAGS if flag in words)


@functools.cache
def _versions(device_type: str) -> str:
    return " ".join(
        f"{name}=={version}" for name, version in available.versions(device_type).items()
    )


def circumstances(device: torch.device, suite: str, ceilings: Ceilings | None) -> Row:
    """Return the columns that are the same for all rows of a run."""
    is_cuda = device.type == "cuda"
    row = {
        "suite": suite,
        "device": torch.cuda.get_device_name(device) if is_cuda else _processor(),
        "capability": _capability(device),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "sparse_losses": sparse_losses.__version__,
        "git_commit": _git_commit(),
        "peers": _versions(device.type),
    }
    if is_cuda:
        row |= _gpu(device)
    if ceilings is not None:
        if is_cuda:
            row["bf16_gflop_per_s"] = f"{ceilings.bf16_flops_per_second / 1e9:.4g}"
        row["copy_gb_per_s"] = f"{ceilings.bytes_per_second / 1e9:.4g}"
        row["matmul_gflop_per_s"] = f"{ceilings.flops_per_second / 1e9:.4g}"
    return row


def _gpu(device: torch.device) -> Row:
    """Return further columns for a GPU; the clocks are the present ones."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    names = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")
    words = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is not None:
        words.append(f"--id=GPU-{uuid}")
    try:
        run = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
        driver, *clocks = (word.strip() for word in run.stdout.splitlines()[0].split(","))
    except (OSError, IndexError, subprocess.SubprocessError):
        driver, clocks = "", []
    said = ", ".join(f"{name} {value}" for name, value in zip(names[1:], clocks, strict=False))
    return {
        "cuda": str(torch.version.cuda),
        "triton": triton,
        "driver": driver,
        "clocks": said,
    }


def _identity(row: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns that all rows of a file share."""
    return tuple(row[name] for name in IDENTITY)


def largest_cases(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Return (loss, case) of the largest case of each loss and kind of input."""
    largest: dict[tuple[str, str], tuple[int, str]] = {}
    for row in rows:
        kind, size = (row["loss"], row["group"]), (int(row["elements"]), row["case"])
        largest[kind] = max(largest.get(kind, size), size)
    return [(loss, case) for (loss, _), (_, case) in largest.items()]


def read(path: Path) -> list[Row]:
    """Read all rows of a CSV; return none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


class Table:
    """A CSV that is written after every case, so that an interruption loses one case at most."""

    def __init__(self, path: Path, common: Row, *, fresh: bool = False) -> None:
        self.path, self.common = path, common
        if fresh:
            path.unlink(missing_ok=True)
        self.rows = read(path)
        other = {_identity(row) for row in self.rows} - {_identity(common)}
        if other:
            differ = [
                f"{name} is {theirs!r} there and {ours!r} now"
                for name, theirs, ours in zip(IDENTITY, min(other), _identity(common), strict=True)
                if theirs != ours
            ]
            raise ValueError(
                f"{path} holds rows of another run: {', '.join(differ)}; "
                "choose another --output, or start again with --fresh"
            )

    def rows_of(self, loss: str, case: str) -> list[Row]:
        """Return the rows of a case."""
        return [row for row in self.rows if (row["loss"], row["case"]) == (loss, case)]

    def present(self, loss: str, case: str) -> set[str]:
        """Return the variants of a case that have rows."""
        return {row["variant"] for row in self.rows_of(loss, case)}

    def add(self, results: Iterable[Result]) -> list[Row]:
        """Append rows of variants that have none yet."""
        rows = []
        for result in results:
            row = {key.rstrip("_"): str(value) for key, value in result.row().items()}
            if row["variant"] not in self.present(row["loss"], row["case"]) or any(
                row["variant"] == new["variant"] for new in rows
            ):
                rows.append({**row, **self.common})
        if rows:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.rows = read(self.path) + rows  # another run may have added rows
            with replaced_file(self.path, text=True) as lines:
                writer = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.rows)
        return rows
