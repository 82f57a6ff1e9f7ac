"""``python -m benchmarks.report.summary a.csv b.csv ...``: runs in one table, beside the aims.

A single run says what happened once. Of several, the median is the figure and the range from the
lowest to the highest says how far to trust it.
"""

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.aims import MIB, Verdict, judge
from benchmarks.report.merge import Merged, Spread, markdown, merge
from benchmarks.run.table import RESULTS, read

__all__ = ["aims_table", "main", "table", "write"]


def table(merged: Sequence[Merged]) -> str:
    """All rows as Markdown."""
    heading = (
        "loss",
        "case",
        "pass",
        "allocator",
        "variant",
        "time, ms",
        "x eager",
        "memory, MiB",
        "without gradients",
        "of eager's memory",
        "% of ceiling",
    )
    lines = []
    for row in merged:
        loss, case, pass_, variant, allocator = row.key
        if row.runs == 0:
            lines.append((loss, case, pass_, allocator, variant, row.status, *[""] * 5))
            continue
        scaled = Spread(*(1e3 * x for x in (row.seconds.median, row.seconds.low, row.seconds.high)))
        lines.append(
            (
                loss,
                case,
                pass_,
                allocator,
                variant,
                scaled,
                row.speedup,
                f"{row.peak_bytes / MIB:.1f}",
                f"{row.peak_bytes_without_gradients / MIB:.1f}",
                "-" if math.isnan(row.memory_ratio) else f"{row.memory_ratio:.3f}",
                f"{100 * row.share_of_ceiling.median:.0f}",
            )
        )
    return markdown(heading, lines)


def aims_table(verdicts: Sequence[Verdict]) -> str:
    """The aims as Markdown."""
    heading = ("aim", "case", "allocator", "wanted", "measured", "")
    return markdown(
        heading, [(v.aim, v.case, v.allocator, v.wanted, v.measured, v.verdict) for v in verdicts]
    )


def write(path: Path, merged: Sequence[Merged]) -> None:
    """The merged rows as CSV."""
    names = ("loss", "case", "pass", "variant", "allocator")
    spreads = ("seconds", "speedup", "share_of_ceiling")
    plain = ("peak_bytes", "peak_bytes_without_gradients", "memory_ratio")
    columns = [f"{name}_{part}" for name in spreads for part in ("median", "low", "high")]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow([*names, "elements", "kind", "runs", *columns, *plain, "status"])
        for row in merged:
            values = [
                getattr(getattr(row, n), p) for n in spreads for p in ("median", "low", "high")
            ]
            values += [getattr(row, name) for name in plain]
            spelt = ["" if math.isnan(value) else f"{value:.6g}" for value in values]
            writer.writerow([*row.key, row.elements, row.kind, row.runs, *spelt, row.status])


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes NAME.csv and NAME.md and prints the aims."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.report.summary", description=__doc__
    )
    options.add_argument("runs", nargs="+", type=Path, help="CSVs of `python -m benchmarks`")
    options.add_argument(
        "--output",
        type=Path,
        default=RESULTS / "summary.csv",
        help="the CSV; the same as Markdown goes beside it (default: %(default)s)",
    )
    args = options.parse_args(arguments)
    tables = [read(path) for path in args.runs]
    for path, rows in zip(args.runs, tables, strict=True):
        if not rows:
            raise SystemExit(f"{path} " + ("holds no rows" if path.exists() else "does not exist"))
    machines = {(row["device"], row["git_commit"], row["torch"]) for rows in tables for row in rows}
    merged = merge(tables)
    verdicts = judge(merged)
    about = [
        f"- {device}, commit {commit}, torch {torch}" for device, commit, torch in sorted(machines)
    ]
    text = "\n".join(
        [
            f"{len(tables)} files; of every row the median of those that hold it, the lowest and "
            "the highest in brackets.",
            "",
            *about,
            "",
            "## Aims",
            "",
            aims_table(verdicts),
            "",
            "## All figures",
            "",
            table(merged),
            "",
        ]
    )
    write(args.output, merged)
    args.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(aims_table(verdicts))
    print(f"{args.output}, {args.output.with_suffix('.md')}")
    if len(machines) > 1:
        print("these runs are of different machines, commits or versions", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
