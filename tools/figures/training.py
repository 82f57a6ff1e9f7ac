"""Recall during the demo's training, and ranking quality by target, of the recommended preset."""

import json
from itertools import cycle
from statistics import mean

from matplotlib.figure import Figure

from tools.figures._shared import ROOT, plain_ticks, results

TARGETS = [32, 64, 128]
CORPORA = {"docstrings": ("o", "-"), "debian": ("s", "--")}


def validation() -> dict[int, list[tuple[int, float]]]:
    """Return Recall@10 of the validation queries by step, of each seed."""
    runs = {}
    for path in sorted((ROOT / "docs" / "results").glob("demo-seed-*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        runs[run["settings"]["seed"]] = [
            (row["step"], row["ranking"]["recall_10"]) for row in run["validation"]
        ]
    return runs


def study(corpus: str, variant: str) -> tuple[float, float]:
    """Return active dimensions and nDCG@10 of a variant, means over the seeds."""
    rows = [
        row
        for row in results("against_sentence_transformers.csv")
        if (row["corpus"], row["variant"]) == (corpus, variant)
    ]
    active = mean(float(row["active_document"] or "nan") for row in rows)
    return active, mean(float(row["ndcg_10"]) for row in rows)


def draw(figure: Figure) -> None:
    """Draw recall by step on the left, nDCG@10 by active dimensions on the right."""
    left, right = figure.subplots(1, 2)
    dashes = cycle(["-", "--", ":"])
    for seed, points in validation().items():
        left.plot(*zip(*points, strict=True), label=f"seed {seed}", linestyle=next(dashes))
    left.set(title="Recall@10, name task (validation)", xlabel="step")
    left.legend(loc="lower right")

    for corpus, (marker, dash) in CORPORA.items():
        points = [study(corpus, f"ours, target {x}, BM25 as teacher") for x in TARGETS]
        (line,) = right.plot(
            *zip(*points, strict=True), marker=marker, linestyle=dash, label=corpus
        )
        _, height = study(corpus, "BM25, same subwords")
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
        ylim=(0.5, 0.95),
    )
    plain_ticks(right.xaxis, TARGETS)
    right.legend(loc="upper right")
