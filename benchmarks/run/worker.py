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

from benchmarks.losses import cases
from benchmarks.run import available, ceilings
from benchmarks.run.measure import (
    FORWARD,
    TRAINING,
    Broken,
    Limits,
    Result,
    is_broken,
    measure,
)
from benchmarks.run.processes import AGAIN
from benchmarks.run.screen import show
from benchmarks.run.table import Row, Table, circumstances
from benchmarks.schema import Case

__all__ = ["BROKE", "work"]

BROKE = "failed, and what was running with it: "  # how the status of such a variant begins


def work(args: argparse.Namespace, output: Path, *, allocator: str, budget: float) -> int:
    """Measures what is missing in the CSV; 1 if a variant was not what it should be.

    ``AGAIN`` if one left the GPU unusable: it has its rows, and a new process can go on.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is available")
    if device.type == "cpu" and args.suite == "gpu":
        raise SystemExit("the suite for a GPU needs --device cuda; on a CPU it would take hours")
    if args.threads:
        torch.set_num_threads(args.threads)
    for package in available.PACKAGES:
        if reason := available.why_missing(package, device.type):
            console.print(f"{package}: {reason}, left out")

    rates = ceilings.measure(device, copy_mib=16 if args.suite == "tiny" else 256)
    common = circumstances(device, args.suite, allocator, rates)
    console.print(
        f"{common['device']} ({common['capability']}), {common['threads']} threads, allocator "
        f"{allocator}: copies {common['copy_gb_per_s']} GB/s, multiplies "
        f"{common['matmul_gflop_per_s']} GFLOP/s"
        + (f" in fp32, {common['bf16_gflop_per_s']} in bf16" if device.type == "cuda" else "")
    )
    try:
        table = Table(output, common, fresh=args.fresh)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # What the aims speak of is run five times over.
    limits = Limits(budget, min_rounds=2 if args.suite == "aims" else 3)
    passes = (TRAINING,) if args.training_only else (FORWARD, TRAINING)
    todo = cases(args.suite, [name for name in args.only.split(",") if name])
    bad: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("", total=len(todo))
        for case in todo:
            label = f"{case.loss} {case.name}"

            def say(what: str, label: str = label) -> None:
                progress.update(bar, description=f"{label}: {what}")

            found = available.variants(case, device.type, compiled=not args.no_compile)
            missing = {each.name for each in found} - table.present(case.loss, case.name)
            if missing:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # the compiler's and the peers' own
                        results = measure(
                            case,
                            device,
                            rates,
                            limits,
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
            show(progress.console, label, rows)
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
