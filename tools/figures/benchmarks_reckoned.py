"""Calculated times of the package and the plain formula on two GPUs: results/reckoned.csv."""

import csv
from pathlib import Path

from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
PANELS = {"h100_seconds": "H100", "a10g_seconds": "A10G"}
SERIES = {"eager": ("plain formula", "o"), "sentence-transformers": ("sentence-transformers", "^")}


def draw(figure: Figure) -> None:
    """Draw one row per case; right of 1, ours is faster."""
    with (RESULTS / "reckoned.csv").open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["status"] == "ok"]
    found = {(row["loss"], row["case"], row["variant"]): row for row in rows}
    cases = list(dict.fromkeys(key[:2] for key in found if (*key[:2], "ours") in found))[::-1]
    figure.set_size_inches(8.4, 1 + 0.15 * len(cases))
    both = figure.subplots(1, 2, sharey=True)
    for axes, (column, title) in zip(both, PANELS.items(), strict=True):
        text = axes.spines["left"].get_edgecolor()
        for name, (label, marker) in SERIES.items():
            own = [case for case in cases if (*case, name) in found]
            axes.plot(
                [
                    float(found[*case, name][column]) / float(found[*case, "ours"][column])
                    for case in own
                ],
                [cases.index(case) for case in own],
                marker,
                label=label,
                markersize=4.5,
                markerfacecolor="none",
            )
        axes.axvline(1, color=text, linewidth=1, linestyle="-")
        axes.set_xscale("log")
        ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(f"{title}: calculated time over ours")
        axes.set_ylim(-0.6, len(cases) - 0.4)
    both[0].set_yticks(range(len(cases)), [" ".join(case) for case in cases], fontsize=6)
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
