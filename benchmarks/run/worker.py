"""The run of a suite: it measures all cases and shows the results."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Screen

from benchmarks.losses import cases
from benchmarks.run import available, ceilings
from benchmarks.run.measure import FORWARD, TRAINING, Limits, Result, measure
from benchmarks.run.table import Row, Table, circumstances
from benchmarks.schema import Case

__all__ = ["work"]


def work(args: argparse.Namespace, output: Path, *, budget: float) -> int:
    """Measure what the CSV lacks; return 1 if a variant differs or ours failed."""
    console = Console(width=None if Console().is_terminal else 120)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is available")
    if device.type == "cpu" and args.suite == "gpu":
        raise SystemExit("--suite gpu needs --device cuda; on a CPU it would take hours")
    if args.threads:
        torch.set_num_threads(args.threads)
    for package in available.PACKAGES:
        if reason := available.missing_reason(package):
            console.print(f"{package}: {reason}, skipped")
    rates = ceilings.measure(device, copy_mib=16 if args.suite == "tiny" else 256)
    common = circumstances(device, args.suite, rates)
    console.print(", ".join(f"{name} {value}" for name, value in common.items() if value))
    try:
        table = Table(output, common, fresh=args.fresh)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    limits = Limits(budget)
    passes = (TRAINING,) if args.training_only else (FORWARD, TRAINING)
    options: dict[str, Any] = {"compiled": not args.no_compile, "passes": passes}
    todo = cases(args.suite, [name for name in args.only.split(",") if name])
    wrong = set()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("", total=len(todo))
        for case in todo:
            label = f"{case.loss} {case.name}"
            variants = available.variants(case, compiled=not args.no_compile)
            missing = {each.name for each in variants} - table.present(case.loss, case.name)
            if missing:

                def say(what: str, label: str = label) -> None:
                    progress.update(bar, description=f"{label}: {what}")

                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # of the compiler and the peers
                        results = measure(case, device, rates, limits, **options, say=say)
                except Exception as error:
                    results = _failed(case, passes, sorted(missing), error)
                rows = table.add(results)
                wrong |= {
                    f"{row['loss']}, {row['case']}, {row['variant']}: {row['status']}"
                    for row in rows
                    if not row["status"].startswith(("ok", "skipped"))
                }
            else:  # an earlier, interrupted run measured it
                rows = table.rows_of(case.loss, case.name)
            show(progress.console, label, rows)
            progress.advance(bar)
            if device.type == "cuda":
                torch.cuda.synchronize()  # ends here if a kernel broke the GPU's context
    for line in sorted(wrong):
        console.print(escape(line), style="bold red")
    return 1 if any(": MISMATCH" in line or ", ours" in line for line in wrong) else 0


def _failed(
    case: Case, passes: Sequence[str], variants: Sequence[str], error: Exception
) -> list[Result]:
    line = (str(error).splitlines() or [""])[0][:150]
    status = f"failed: {type(error).__name__}: {line}"
    about = case.loss, case.name, case.group, case.elements
    return [
        Result(*about, each, variant, "ours" if "ours" in variant else "", status)
        for each in passes
        for variant in variants
    ]


def show(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print one line per variant for the training pass, and then the failures."""
    screen = Screen(title=title, title_justify="left", box=None, pad_edge=False)
    screen.add_column("forward + backward", width=24, no_wrap=True)
    for heading in ("ms", "x eager", "quartiles", "MiB", "- gradients", "of ceiling"):
        screen.add_column(heading, justify="right", no_wrap=True, min_width=10)
    rows = [row for row in rows if row["pass"] == TRAINING]
    for row in rows:
        if row["status"].startswith("ok"):
            low, ratio, high = (
                f"{float(row[f'speedup{end}'] or 'nan'):.2f}" for end in ("_q1", "", "_q3")
            )
            kept = (row["peak_bytes"], row["peak_bytes_without_gradients"])
            screen.add_row(
                row["variant"],
                f"{1e3 * float(row['seconds']):.3g}",
                *(ratio, f"{low}-{high}"),
                *(f"{float(size) / 2**20:.3g}" for size in kept),
                f"{100 * float(row['share_of_ceiling']):.0f}%",
            )
    console.print(screen)
    for row in rows:
        if not row["status"].startswith("ok"):
            console.print(escape(f"{row['variant']}: {row['status']}"))
