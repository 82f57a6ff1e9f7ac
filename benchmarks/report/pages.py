"""``python -m benchmarks.report.pages``: rewrite the tables of the benchmark page.

The tables come from the files in ``benchmarks/results``; a test checks that they agree.
"""

import re
import sys

from benchmarks.run.table import RESULTS, ROOT, Row, by_case, largest_cases, markdown, read
from sparse_losses._core.files import replaced_file

PAGE = ROOT / "docs" / "benchmarks.md"
MIB = 2**20
PEERS = (
    "eager",
    "torch.compile",
    "ours, compiled",
    "sentence-transformers",
    "pytorch-metric-learning",
    "info-nce-pytorch",
)


def peers() -> str:
    """Time and memory of other packages over ours for the largest cases of ``cpu-quick.csv``."""
    rows = read(RESULTS / "cpu-quick.csv")
    cases = by_case(rows)
    names = [name for name in PEERS if any(name in variants for variants in cases.values())]
    lines = [
        (*about, *(_over(cases[about].get(name), cases[about]["ours"]) for name in names))
        for about in largest_cases(rows)
    ]
    return markdown(("loss", "case", *names), lines)


def _over(row: Row | None, ours: Row) -> str:
    if row is None or not row["status"].startswith("ok"):
        return ""
    return ", ".join(f"{float(row[x]) / float(ours[x]):.2f}" for x in ("seconds", "peak_bytes"))


def memory() -> str:
    """Peak memory and times of the plain formula, of sentence-transformers and of ours."""
    names = ("eager", "sentence-transformers", "ours")
    lines = []
    for about, variants in by_case(read(RESULTS / "aims-run-1.csv")).items():
        rows = [variants.get(name) for name in names]
        peaks = ["-" if row is None else _figure(float(row["peak_bytes"]) / MIB) for row in rows]
        times = ["-" if row is None else _time(float(row["seconds"])) for row in rows]
        lines.append((*about, *peaks, *times))
    labels = ("plain", "sentence-transformers", "ours")
    heading = [f"{label}, {unit}" for unit in ("MiB", "time") for label in labels]
    return markdown(("loss", "case", *heading), lines)


def objective() -> str:
    """Times of all losses of V26 together, from ``objective.csv``."""
    lines = []
    for (_, case), own in by_case(read(RESULTS / "objective.csv")).items():
        sizes = dict(re.findall(r"(\w)=(\d+)", case))
        times = [
            _time(float(own[name]["seconds"])) for name in ("eager", "ours, one by one", "ours")
        ]
        kept = [float(own[name]["peak_bytes_without_gradients"]) for name in ("eager", "ours")]
        memory = ", ".join(f"{num_bytes / MIB:.3g}" for num_bytes in kept) + " MiB"
        vectors = f"`[{sizes['B']}, {sizes['V']}]`, {case.split()[-1]}"
        lines.append((vectors, *times, memory))
    heading = ("activations", "eager", "one by one", "`SpladeObjective`")
    return markdown((*heading, "memory without gradients, eager and ours"), lines)


def calculated() -> str:
    """Calculated figures from ``calculated.csv``: each loss's largest case, by dtype."""
    cases = by_case(read(RESULTS / "calculated.csv"))
    largest: dict[tuple[str, str], tuple[int, str]] = {}
    for (loss, case), variants in cases.items():
        dtype = case.split()[-1]
        if dtype in ("fp32", "bf16"):  # sizes for a GPU name their dtype
            size = int(variants["eager"]["bytes"]), case
            largest[loss, dtype] = max(largest.get((loss, dtype), size), size)
    lines = []
    for (loss, _), (_, case) in largest.items():
        variants = cases[loss, case]
        rows = [variants.get(name) for name in ("eager", "ours", "sentence-transformers")]
        launches = ["-" if row is None else row["launches"] for row in rows]
        peaks = ["-" if row is None else _figure(int(row["peak_bytes"]) / MIB) for row in rows]
        ratios = [
            f"{float(variants['eager'][column]) / float(variants['ours'][column]):.2f}"
            for column in ("h100_seconds", "a10g_seconds")
        ]
        lines.append((loss, case, "; ".join(launches), "; ".join(peaks), *ratios))
    heading = ("loss", "case", "launches: plain; ours; peer", "peak, MiB: plain; ours; peer")
    return markdown((*heading, "plain over ours, H100", "A10G"), lines)


def _figure(number: float) -> str:
    """Format three digits, or all digits of a whole number."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def main() -> int:
    """Replace every table by the one under the same heading."""
    page = PAGE.read_text(encoding="utf-8")
    for table in (peers(), memory(), objective(), calculated()):
        heading = table.partition("\n")[0]
        old = re.compile(rf"^{re.escape(heading)}\n(?:\|.*\n)+", re.MULTILINE)
        if not old.search(page):
            raise SystemExit(f"{PAGE} has no table under {heading}")
        page = old.sub(lambda _, table=table: f"{table}\n", page)
    with replaced_file(PAGE, text=True) as file:
        file.write(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
