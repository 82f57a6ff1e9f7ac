"""The worker process: it measures all cases and shows the results."""

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

BROKE = "failed, and what was running with it: "  # prefix of a status


def work(args: argparse.Namespace, output: Path, *, budget: float) -> int:
    """Measure what the CSV lacks; return 1 if a variant differs or ours failed.

    Return ``AGAIN`` if a variant left the GPU unusable; its rows say so, and a new process can
    continue.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is available")
    if device.type == "cpu" and args.suite == "gpu":
        raise SystemExit("--suite gpu needs --device cuda; on a CPU it would take hours")
    if args.threads:
        torch.set_num_threads(args.threads)
    for package in available.PACKAGES:
        if reason := available.why_missing(package, device.type):
            console.print(f"{package}: {reason}, skipped")

    rates = ceilings.measure(device, copy_mib=16 if args.suite == "tiny" else 256)
    common = circumstances(device, args.suite, rates)
    console.print(
        f"{common['device']} ({common['capability']}), {common['threads']} threads: copies "
        f"{common['copy_gb_per_s']} GB/s, multiplies "
        f"{common['matmul_gflop_per_s']} GFLOP/s"
        + (f" in fp32, {common['bf16_gflop_per_s']} in bf16" if device.type == "cuda" else "")
    )
    try:
        table = Table(output, common, fresh=args.fresh)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # The aims are usually measured in several runs, with fewer rounds each.
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
                        warnings.simplefilter("ignore")  # of the compiler and the peers
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
    """Return the rows of variants that broke an earlier process."""
    rows = table.rows_of(case.loss, case.name)
    return [row for row in rows if row["status"].startswith(BROKE)]
