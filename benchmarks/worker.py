"""The process that measures: one setting of the allocator, all cases, a bar and a table."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Screen

from benchmarks import ceilings, peers
from benchmarks.__main__ import AGAIN
from benchmarks.cases import Case, cases
from benchmarks.measure import (
    FORWARD,
    TRAINING,
    Broken,
    Limits,
    Result,
    expected,
    is_broken,
    measure,
)
from benchmarks.table import Row, Table, circumstances

__all__ = ["work"]

BROKE = "failed, and what was running with it: "  # how the status of such a variant begins


def work(args: argparse.Namespace, output: Path, *, budget: float) -> int:
    """Measures what is missing in the CSV; 1 if a variant was not what it should be.

    ``AGAIN`` if one left the GPU unusable: it has its rows, and a new process can go on.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is available")
    if device.type == "cpu" and args.suite == "kernels":
        raise SystemExit("the kernels' suite needs --device cuda; on a CPU it would take hours")
    if args.threads:
        torch.set_num_threads(args.threads)
    only = [name for name in args.only.split(",") if name]
    for package in peers.PACKAGES:
        if reason := peers.why_missing(package, device.type):
            console.print(f"{package}: {reason}, left out")

    rates = ceilings.measure(device, copy_mib=16 if args.suite == "tiny" else 256)
    common = circumstances(device, args.suite, args.worker, rates)
    console.print(
        f"{common['device']} ({common['capability']}), {common['threads']} threads, allocator "
        f"{args.worker}: copies {common['copy_gb_per_s']} GB/s, multiplies "
        f"{common['matmul_gflop_per_s']} GFLOP/s"
        + (f" in fp32, {common['bf16_gflop_per_s']} in bf16" if device.type == "cuda" else "")
    )
    try:
        table = Table(output, common, fresh=args.fresh)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    todo = cases(args.suite, only)
    bad: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("", total=len(todo))
        for case in todo:
            label = f"{case.loss} {case.name}"

            def say(what: str, label: str = label) -> None:
                progress.update(bar, description=f"{label}: {what}")

            missing = set(expected(case, device, compiled=not args.no_compile))
            present = table.present(case.loss, case.name)
            missing -= present
            passes = (TRAINING,) if args.training_only else (FORWARD, TRAINING)
            if missing:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # the compiler's and the peers' own
                        results = measure(
                            case,
                            device,
                            rates,
                            # What the aims speak of is run five times over.
                            Limits(budget, min_rounds=2 if args.suite == "aims" else 3),
                            compiled=not args.no_compile,
                            passes=passes,
                            without={row["variant"] for row in _broken(table, case)},
                            say=say,
                        )
                except Broken as broken:
                    table.add(_without_figures(case, passes, [broken.variant], broken.status))
                    console.print(escape(f"{label}, {broken.variant}: {broken.status}"))
                    return AGAIN
                except Exception as error:
                    line = (str(error).splitlines() or [""])[0][:150]
                    said = f"{type(error).__name__}: {line}"
                    results = _without_figures(case, passes, sorted(missing), said)
                    if is_broken():
                        table.add(results)
                        return AGAIN
                rows = table.add(results)
                bad += [row for row in rows if not row["status"].startswith(("ok", "skipped"))]
            else:  # an earlier, interrupted run measured it
                rows = table.rows_of(case.loss, case.name)
            _show(progress.console, label, rows)
            progress.advance(bar)
    wrong = {f"{row['loss']}, {row['case']}, {row['variant']}: {row['status']}" for row in bad}
    for line in sorted(wrong):
        console.print(escape(line), style="bold red")
    return 1 if any(": MISMATCH" in line or ", ours" in line for line in wrong) else 0


def _without_figures(
    case: Case, passes: Sequence[str], variants: Sequence[str], why: str
) -> list[Result]:
    about = case.loss, case.name, case.group, case.elements
    return [
        Result(*about, each, variant, "ours" if "ours" in variant else "", f"{BROKE}{why}")
        for each in passes
        for variant in variants
    ]


def _broken(table: Table, case: Case) -> list[Row]:
    """The rows of what broke an earlier process."""
    rows = table.rows_of(case.loss, case.name)
    return [row for row in rows if row["status"].startswith(BROKE)]


def _show(console: Console, title: str, rows: Sequence[Row]) -> None:
    """The training pass of one case; the CSV has the rest."""
    screen = Screen(title=title, title_justify="left", box=None, pad_edge=False)
    screen.add_column("forward + backward", width=24, no_wrap=True)
    replayed = any(row.get("graph_status") for row in rows)
    headings = ["time", "x eager", "quartiles", "memory", "- gradients", "of ceiling"]
    for heading in [*headings, *(["replayed"] if replayed else [])]:
        screen.add_column(heading, justify="right", no_wrap=True, min_width=10)
    trouble = []
    for row in rows:
        if row["pass"] != TRAINING:
            continue
        if not row["status"].startswith("ok"):
            trouble.append(f"{row['variant']}: {row['status']}")
            continue
        quartiles = (
            f"{float(row['speedup_q1']):.2f}-{float(row['speedup_q3']):.2f}"
            if row["speedup"]
            else ""
        )
        screen.add_row(
            row["variant"],
            _time(float(row["seconds"])),
            f"{float(row['speedup']):.2f}" if row["speedup"] else "",
            quartiles,
            _memory(float(row["peak_bytes"])),
            _memory(float(row["peak_bytes_without_gradients"])),
            f"{100 * float(row['share_of_ceiling']):.0f}%",
            *([_replayed(row)] if replayed else []),
        )
    console.print(screen)
    for line in trouble:
        console.print(escape(line))


def _replayed(row: Row) -> str:
    """Why it cannot be is in the CSV."""
    return _time(float(row["graph_seconds"])) if row["graph_seconds"] else "no"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _memory(num_bytes: float) -> str:
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**10:.3g} KiB"
