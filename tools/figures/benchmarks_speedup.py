"""Speedups over the plain formula: benchmarks/results/aims-run-1.csv."""

import csv
from pathlib import Path

from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
VARIANTS = ("ours", "ours, CSR input", "ours, sparse_grad")


def draw(figure: Figure) -> None:
    """Draw one row per case."""
    figure.set_size_inches(8.4, 7)
    with (RESULTS / "aims-run-1.csv").open(encoding="utf-8") as lines:
        rows = [
            row
            for row in csv.DictReader(lines)
            if row["pass"] == "forward+backward" and row["variant"] in VARIANTS
        ]
    labels = list(dict.fromkeys(_label(row) for row in rows))[::-1]
    axes = figure.subplots()
    axes.plot(
        [float(row["speedup"]) for row in rows],
        [labels.index(_label(row)) for row in rows],
        "o",
    )
    axes.axvline(1, color=axes.spines["left"].get_edgecolor(), linewidth=1, linestyle="-")
    axes.set_xscale("log")
    ticks = [0.7, 1, 2, 3, 5, 10, 20, 50, 100]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.set_xlabel("times as fast as the plain formula, forward and backward")


def _label(row: dict[str, str]) -> str:
    option = row["variant"].removeprefix("ours").strip(", ")
    return f"{row['loss']}  {row['case']}" + (f", {option}" if option else "")
