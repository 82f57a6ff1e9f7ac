"""How many times as fast as the plain formula: benchmarks/results/aims.csv, median of the runs."""

import csv
from pathlib import Path

from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
VARIANTS = ("ours", "ours, CSR input", "ours, sparse_grad")
SERIES = {"default": ("allocator as it comes", "o"), "warm": ("warm", "D")}


def draw(figure: Figure) -> None:
    """A row a case; a mark is the median, its line goes from the lowest run to the highest."""
    figure.set_size_inches(8.4, 7)
    with (RESULTS / "aims.csv").open(encoding="utf-8") as lines:
        rows = [
            row
            for row in csv.DictReader(lines)
            if row["pass"] == "forward+backward" and row["variant"] in VARIANTS
        ]
    labels = list(dict.fromkeys(_label(row) for row in rows))[::-1]
    axes = figure.subplots()
    for shift, (allocator, (name, marker)) in zip((0.17, -0.17), SERIES.items(), strict=True):
        own = [row for row in rows if row["allocator"] == allocator]
        middle, low, high = (
            [float(row[f"speedup_{part}"]) for row in own] for part in ("median", "low", "high")
        )
        axes.errorbar(
            middle,
            [labels.index(_label(row)) + shift for row in own],
            xerr=(
                [m - x for m, x in zip(middle, low, strict=True)],
                [x - m for m, x in zip(middle, high, strict=True)],
            ),
            fmt=marker,
            markersize=4.5,
            markerfacecolor="none" if marker == "D" else None,
            elinewidth=1.2,
            label=name,
        )
    axes.axvline(1, color=axes.spines["left"].get_edgecolor(), linewidth=1, linestyle="-")
    axes.set_xscale("log")
    ticks = [0.7, 1, 2, 3, 5, 10, 20, 50, 100]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.set_xlabel("times as fast as the plain formula, forward and backward")
    figure.legend(loc="outside upper center", ncols=2)


def _label(row: dict[str, str]) -> str:
    option = row["variant"].removeprefix("ours").strip(", ")
    return f"{row['loss']}  {row['case']}" + (f", {option}" if option else "")
