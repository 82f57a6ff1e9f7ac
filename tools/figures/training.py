"""Recall during the demo's training, and ranking quality by target, of the recommended preset."""

import csv
import json
import statistics
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
TARGETS = [32, 64, 128]
CORPORA = {"docstrings": ("o", "-"), "debian": ("s", "--")}


def validation() -> dict[int, list[tuple[int, float]]]:
    """Return Recall@10 of the validation queries by step, of each seed."""
    runs = {}
    for path in sorted(RESULTS.glob("demo-seed-*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        runs[run["settings"]["seed"]] = [
            (row["step"], row["ranking"]["recall_10"]) for row in run["validation"]
        ]
    return runs


def study() -> dict[tuple[str, str], dict[str, float]]:
    """Return active dimensions and nDCG@10 by corpus and variant, means over the seeds."""
    with (RESULTS / "against_sentence_transformers.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["corpus"], row["variant"]): {
            key: statistics.mean(
                float(one[key] or "nan")
                for one in rows
                if (one["corpus"], one["variant"]) == (row["corpus"], row["variant"])
            )
            for key in ("active_document", "ndcg_10")
        }
        for row in rows
    }


def draw(figure: Figure) -> None:
    """Draw recall by step on the left, nDCG@10 by active dimensions on the right."""
    left, right = figure.subplots(1, 2)
    dashes = cycle(["-", "--", ":"])
    for seed, points in validation().items():
        left.plot(*zip(*points, strict=True), label=f"seed {seed}", linestyle=next(dashes))
    left.set(title="Recall@10, name task (validation)", xlabel="step")
    left.legend(loc="lower right")

    found = study()
    for corpus, (marker, dash) in CORPORA.items():
        runs = [found[corpus, f"ours, target {target}, BM25 as teacher"] for target in TARGETS]
        active, ranked = ([run[key] for run in runs] for key in ("active_document", "ndcg_10"))
        (line,) = right.plot(active, ranked, marker=marker, linestyle=dash, label=corpus)
        height = found[corpus, "BM25, same subwords"]["ndcg_10"]
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
    right.set(
        title=f"nDCG@10 with targets of {', '.join(map(str, TARGETS))} (test)",
        xlabel="active dimensions of a document, of 8,000",
        xscale="log",
        ylim=(0.5, 0.95),
    )
    right.set_xticks(TARGETS)
    right.xaxis.set_major_formatter(ScalarFormatter())
    right.xaxis.set_minor_formatter(NullFormatter())
    right.legend(loc="upper right")
