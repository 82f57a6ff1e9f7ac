"""Targets and what the demo's trainings reached, from `docs/results/targets.csv`."""

import csv
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "targets.csv"
TICKS = [32, 64, 128, 256]


def draw(figure: Figure) -> None:
    """What was reached beside what was wanted; recall beside what was reached."""
    with open(RESULTS, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    steered = [row for row in rows if row["target"]]
    fixed = [row for row in rows if not row["target"]]
    left, right = figure.subplots(1, 2)

    left.plot([25, 320], [25, 320], linewidth=1, marker="")
    for marker, label, said in (("o", "on target", "on"), ("x", "said to be unreachable", "un")):
        chosen = [row for row in steered if row["status"].startswith(said)]
        wanted, reached = ([float(row[key]) for row in chosen] for key in ("target", "active"))
        left.plot(wanted, reached, marker, label=label, fillstyle="none", markersize=7)
    left.set(
        title="active dimensions of a document", xlabel="target_active", ylabel="after training"
    )
    left.legend(loc="upper left")

    for marker, key, label in (
        ("o", "summary_recall_10", "summary to rest"),
        ("s", "name_recall_10", "name to document"),
    ):
        points = [[float(row[x]) for row in steered] for x in ("active", key)]
        (line,) = right.plot(*points, marker, label=label, fillstyle="none")
        points = [[float(row[x]) for row in fixed] for x in ("active", key)]
        right.plot(*points, marker, color=line.get_color(), label=f"{label}, fixed weight")
    right.set(title="Recall@10", xlabel="active dimensions of a document", ylim=(0.6, 0.9))
    right.legend(loc="lower right", ncols=2, columnspacing=0.8, handletextpad=0.2, fontsize=7)
    for axes, axis in ((left, left.xaxis), (left, left.yaxis), (right, right.xaxis)):
        (axes.set_xscale if axis.axis_name == "x" else axes.set_yscale)("log")
        axis.set_ticks(TICKS)
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
