"""``python -m benchmarks.report.summary a.csv b.csv ...``: merge runs and compare with the aims.

The figure of several runs is the median; the range from lowest to highest shows the uncertainty.
"""

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.aims import Verdict, judge
from benchmarks.report.merge import Merged, markdown, merge
from benchmarks.run.table import RESULTS, read
from sparse_losses._core.files import replaced_file

__all__ = ["aims_table", "main", "write"]


def aims_table(verdicts: Sequence[Verdict]) -> str:
    """Return the table of aims as Markdown."""
    heading = ("aim", "case", "allocator", "wanted", "measured", "")
    return markdown(
        heading, [(v.aim, v.case, v.allocator, v.wanted, v.measured, v.verdict) for v in verdicts]
    )


def write(path: Path, merged: Sequence[Merged]) -> None:
    """Write the merged rows as CSV."""
    names = ("loss", "case", "pass", "variant", "allocator")
    spreads = ("seconds", "speedup", "share_of_ceiling")
    plain = ("peak_bytes", "peak_bytes_without_gradients", "memory_ratio")
    columns = [f"{name}_{part}" for name in spreads for part in ("median", "low", "high")]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path, text=True) as lines:
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
    """Write the merged CSV and print the aims."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.report.summary", description=__doc__
    )
    options.add_argument("runs", nargs="+", type=Path, help="CSVs of `python -m benchmarks`")
    options.add_argument(
        "--output", type=Path, default=RESULTS / "aims.csv", help="the CSV (default: %(default)s)"
    )
    args = options.parse_args(arguments)
    tables = [read(path) for path in args.runs]
    for path, rows in zip(args.runs, tables, strict=True):
        if not rows:
            raise SystemExit(f"{path} " + ("holds no rows" if path.exists() else "does not exist"))
    machines = {(row["device"], row["git_commit"], row["torch"]) for rows in tables for row in rows}
    merged = merge(tables)
    write(args.output, merged)
    print(aims_table(judge(merged)))
    print(args.output)
    if len(machines) > 1:
        print("the runs are from different machines, commits or versions", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
