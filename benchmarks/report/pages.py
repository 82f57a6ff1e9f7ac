"""``python -m benchmarks.report.pages``: rewrite the tables of the benchmark page.

The tables come from the files in ``benchmarks/results``; a test checks that they agree.
"""

import re
import sys

from benchmarks.run.table import RESULTS, ROOT, by_case, markdown, read
from sparse_losses._core.files import replaced_file

PAGE = ROOT / "docs" / "benchmarks.md"
MIB = 2**20


def memory() -> str:
    """Peak memory and times of the plain formula, of sentence-transformers and of this package."""
    names = ("eager", "sentence-transformers", "ours")
    lines = []
    for about, variants in by_case(read(RESULTS / "aims-run-1.csv")).items():
        rows = [variants.get(name) for name in names]
        peaks = ["-" if row is None else _figure(float(row["peak_bytes"]) / MIB) for row in rows]
        times = ["-" if row is None else _figure(1e3 * float(row["seconds"])) for row in rows]
        lines.append((*about, *peaks, *times))
    labels = ("plain", "sentence-transformers", "sparse-losses")
    heading = [f"{label}, {unit}" for unit in ("MiB", "ms") for label in labels]
    return markdown(("loss", "case", *heading), lines)


def _figure(number: float) -> str:
    """Format three digits, or all digits of a whole number."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def main() -> int:
    """Replace every table by the one under the same heading."""
    page, table = PAGE.read_text(encoding="utf-8"), memory()
    heading = table.partition("\n")[0]
    old = re.compile(rf"^{re.escape(heading)}\n(?:\|.*\n)+", re.MULTILINE)
    if not old.search(page):
        raise SystemExit(f"{PAGE} has no table under {heading}")
    with replaced_file(PAGE, text=True) as file:
        file.write(old.sub(lambda _: f"{table}\n", page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
