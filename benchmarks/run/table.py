"""The CSV: one row per variant, with everything needed to interpret the figures."""

import csv
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sparse_losses
from benchmarks.run import available

Row = dict[str, str]
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# All rows of a file must agree in these, as ratios across machines or commits are meaningless.
IDENTITY = ("device", "capability", "threads", "git_commit", "torch", "suite")


def _git_commit() -> str:
    """Return the commit of package and suite, marked if either was changed since.

    An environment variable may name it if the sources come without git history.
    """
    if named := os.environ.get("SPARSE_LOSSES_COMMIT"):
        return named
    about = ("status", "--porcelain", "--", "sparse_losses", "benchmarks/*.py")
    try:
        commit, changed = (
            subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=True)
            for words in (("rev-parse", "--short=12", "HEAD"), about)
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit.stdout.strip() + "-changed" * bool(changed.stdout)


def _cpu() -> tuple[str, str]:
    """Return the processor's name and those of its flags that matter for products."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    parts = (line.partition(":") for line in text.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in parts}
    words = fields.get("flags", fields.get("Features", "")).split()
    flags = [x for x in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd") if x in words]
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, " ".join(flags) or torch.backends.cpu.get_cpu_capability()


def circumstances(device: torch.device, suite: str) -> Row:
    """Return the columns that are the same for all rows of a run."""
    is_cuda = device.type == "cuda"
    name, capability = _cpu()
    if is_cuda:
        name = torch.cuda.get_device_name(device)
        capability = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    row = {
        "suite": suite,
        "device": name,
        "capability": capability,
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "sparse_losses": sparse_losses.__version__,
        "git_commit": _git_commit(),
        "peers": available.versions(),
    }
    return row | ({"cuda": str(torch.version.cuda)} if is_cuda else {})


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


def markdown(heading: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def by_case(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """Return the rows of each (loss, case) by variant."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["loss"], row["case"]), {})[row["variant"]] = row
    return cases


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV; what a row lacks is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = dict.fromkeys(name for row in rows for name in row)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)


class Table:
    """A CSV that is written after every case, so that an interruption loses one case at most."""

    def __init__(self, path: Path, common: Row, *, fresh: bool = False) -> None:
        self.path, self.common = path, common
        if fresh:
            path.unlink(missing_ok=True)
        self.rows = read(path)
        for row in self.rows:
            different = [
                f"{name} is {row[name]!r} there and {common[name]!r} now"
                for name in IDENTITY
                if row[name] != common[name]
            ]
            if different:
                raise ValueError(
                    f"{path} holds rows of another run: {', '.join(different)}; "
                    "choose another --output, or start again with --fresh"
                )

    def rows_of(self, loss: str, case: str) -> list[Row]:
        """Return the rows of a case."""
        return [row for row in self.rows if (row["loss"], row["case"]) == (loss, case)]

    def present(self, loss: str, case: str) -> set[str]:
        """Return the variants of a case that have rows."""
        return {row["variant"] for row in self.rows_of(loss, case)}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> list[Row]:
        """Append rows of variants that have none yet, their numbers with six digits."""
        new = [
            {key: f"{x:.6g}" if isinstance(x, float) else str(x) for key, x in row.items()}
            | self.common
            for row in rows
            if row["variant"] not in self.present(row["loss"], row["case"])
        ]
        if new:
            self.rows = read(self.path) + new  # another run may have added rows
            write(self.path, self.rows)
        return new
