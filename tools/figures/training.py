"""Recall during training, and recall by target sparsity, from the demo's results."""

import csv
import json
import statistics
from collections import defaultdict
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
MARKERS = {"name": "o", "summary": "s"}


def validation() -> dict[int, list[tuple[int, float]]]:
    """Return Recall@10 of the validation queries by step, of each seed."""
    runs = {}
    for path in sorted(RESULTS.glob("demo-seed-*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        runs[run["settings"]["seed"]] = [
            (row["step"], row["ranking"]["recall_10"]) for row in run["validation"]
        ]
    return runs


def targets() -> dict[int, dict[str, float]]:
    """Return active dimensions and recall by target, means over the seeds."""
    rows = defaultdict(list)
    with (RESULTS / "targets.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["target"]:
                rows[int(row["target"])].append(row)
    return {
        target: {
            key: statistics.mean(float(row[key]) for row in found)
            for key in ("active", "name_recall_10", "summary_recall_10")
        }
        for target, found in sorted(rows.items())
    }


def bm25() -> dict[str, float]:
    """Return BM25's recall on the test queries, on the model's own subwords, by task."""
    run = json.loads((RESULTS / "demo-seed-0.json").read_text(encoding="utf-8"))
    return {
        row["task"].split()[0]: row["rankings"]["BM25, same subwords"]["recall_10"]
        for row in run["test"]
    }


def draw(figure: Figure) -> None:
    """Draw recall by step on the left, recall by active dimensions on the right."""
    left, right = figure.subplots(1, 2)
    dashes = cycle(["-", "--", ":"])
    for seed, points in validation().items():
        left.plot(*zip(*points, strict=True), label=f"seed {seed}", linestyle=next(dashes))
    left.set(title="Recall@10, name task (validation)", xlabel="step")
    left.legend(loc="lower right")

    found = targets()
    active = [row["active"] for row in found.values()]
    for (task, marker), dash in zip(MARKERS.items(), ["-", "--"], strict=True):
        recall = [row[f"{task}_recall_10"] for row in found.values()]
        (line,) = right.plot(active, recall, marker=marker, linestyle=dash, label=f"{task} task")
        height = bm25()[task]
        right.axhline(height, color=line.get_color(), linewidth=1, linestyle=":")
        right.annotate(
            "BM25",
            (1, height),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(0, -10),
            ha="right",
            fontsize=8,
        )
    for target, row in found.items():
        place = (row["active"], row["summary_recall_10"])
        right.annotate(
            f"asked: {target}",
            place,
            textcoords="offset points",
            xytext=(0, 8),
            ha="center",
            fontsize=8,
        )
    right.set(
        title="Recall@10 by the sparsity asked for (test)",
        xlabel="active dimensions of a document, of 8,000",
        xscale="log",
        ylim=(0.66, 0.9),
    )
    right.margins(x=0.12)
    right.set_xticks([32, 64, 128, 210], minor=False)
    right.set_xticks([], minor=True)
    right.xaxis.set_major_formatter(ScalarFormatter())
    right.legend(loc="center right", bbox_to_anchor=(1, 0.45))
