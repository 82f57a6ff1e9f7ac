"""``python -m benchmarks.report.pages``: rewrite the tables of the benchmark pages.

The tables come from the files in ``benchmarks/results``; a test checks that they agree.
"""

import re
import sys

from benchmarks.report.aims import MIB, judge
from benchmarks.run.table import RESULTS, ROOT, by_case, markdown, read
from sparse_losses._core.files import replaced_file

PAGE = ROOT / "docs" / "benchmarks.md"
AIMS = RESULTS / "aims.md"


def aims() -> str:
    """Every aim, from ``aims-run-1.csv``."""
    lines = [
        (*words, measured + " **missed**" * (verdict == "missed"))
        for *words, measured, verdict in judge(read(RESULTS / "aims-run-1.csv"))
    ]
    return markdown(("aim", "case", "wanted", "measured"), lines)


def memory() -> str:
    """Peak memory and times of the plain formula, of sentence-transformers and of ours."""
    names = ("eager", "sentence-transformers", "ours")
    lines = []
    for about, variants in by_case(read(RESULTS / "aims-run-1.csv")).items():
        rows = [variants.get(name) for name in names]
        peaks = ["-" if row is None else _figure(float(row["peak_bytes"]) / MIB) for row in rows]
        times = ["-" if row is None else _figure(1e3 * float(row["seconds"])) for row in rows]
        lines.append((*about, *peaks, *times))
    labels = ("plain", "sentence-transformers", "ours")
    heading = [f"{label}, {unit}" for unit in ("MiB", "ms") for label in labels]
    return markdown(("loss", "case", *heading), lines)


def _figure(number: float) -> str:
    """Format three digits, or all digits of a whole number."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def main() -> int:
    """Replace every table by the one under the same heading."""
    for path, tables in (
        (PAGE, (memory(),)),
        (AIMS, (aims(),)),
    ):
        page = path.read_text(encoding="utf-8")
        for table in tables:
            heading = table.partition("\n")[0]
            old = re.compile(rf"^{re.escape(heading)}\n(?:\|.*\n)+", re.MULTILINE)
            if not old.search(page):
                raise SystemExit(f"{path} has no table under {heading}")
            page = old.sub(lambda _, table=table: f"{table}\n", page)
        with replaced_file(path, text=True) as file:
            file.write(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
