"""The run of a suite: it measures all cases and prints the results."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.losses import cases
from benchmarks.run import available
from benchmarks.run.measure import about, measure
from benchmarks.run.table import Row, Table, circumstances, markdown

ENDS = ("_q1", "", "_q3")
SIZES = ("peak_bytes", "peak_bytes_without_gradients")


def work(args: argparse.Namespace, output: Path, *, budget: float) -> int:
    """Measure what the CSV lacks; return 1 if a variant differs or ours failed."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is available")
    if device.type == "cpu" and args.suite == "gpu":
        raise SystemExit("--suite gpu needs --device cuda; on a CPU it would take hours")
    for package in available.PACKAGES:
        if reason := available.missing_reason(package):
            print(f"{package}: {reason}, skipped")
    common = circumstances(device, args.suite)
    print(", ".join(f"{name} {value}" for name, value in common.items() if value))
    try:
        table = Table(output, common, fresh=args.fresh)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    todo = cases(args.suite, [name for name in args.only.split(",") if name], args.case)
    compiled = not args.no_compile
    wrong = []
    for number, case in enumerate(todo, start=1):
        variants = available.variants(case, compiled=compiled)
        missing = [x for x in variants if x.name not in table.present(case.loss, case.name)]
        rows = table.rows_of(case.loss, case.name)  # of an earlier, interrupted run
        if missing:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the compiler and the peers
                    results = measure(case, device, budget, compiled=compiled)
            except Exception as error:
                line = (str(error).splitlines() or [""])[0][:150]
                status = f"failed: {type(error).__name__}: {line}"
                results = [about(case, variant, status) for variant in missing]
            rows = table.add(results)
            wrong += [row for row in rows if not row["status"].startswith(("ok", "skipped"))]
        print(f"\n{case.loss} {case.name} ({number} of {len(todo)})\n\n{_shown(rows)}", flush=True)
        if device.type == "cuda":
            torch.cuda.synchronize()  # ends here if a kernel broke the GPU's context
    for row in wrong:
        print(", ".join(row[name] for name in ("loss", "case", "variant", "status")))
    return int(
        any(row["variant"].startswith("ours") or "MISMATCH" in row["status"] for row in wrong)
    )


def _shown(rows: Sequence[Row]) -> str:
    """Return one line per variant; one that was not timed has its status there."""
    heading = ("", "ms", "x eager", "quartiles", "MiB", "- gradients")
    lines = []
    for row in rows:
        if not row["status"].startswith("ok"):
            lines.append((row["variant"], row["status"], *("" for _ in heading[2:])))
            continue
        low, ratio, high = (f"{float(row.get(f'speedup{end}') or 'nan'):.2f}" for end in ENDS)
        sizes = [f"{float(row[name]) / 2**20:.3g}" for name in SIZES]
        milliseconds = f"{1e3 * float(row['seconds']):.3g}"
        lines.append((row["variant"], milliseconds, ratio, f"{low} to {high}", *sizes))
    return markdown(heading, lines)
