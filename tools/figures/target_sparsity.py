"""Targets and the sparsity after 250 steps of training, from the results of the target study."""

from matplotlib.figure import Figure

from benchmarks.studies.targets import read_rows
from tools.figures._shared import ROOT, plain_ticks

TICKS = [32, 64, 128]
CORPORA = {"docstrings": ("o", "C0"), "debian": ("s", "C1")}
BESIDE = 1.09  # ratio of neighbouring places on the left axis, so that no mark hides another


def draw(figure: Figure) -> None:
    """Draw the reached sparsity by the target, and recall of trained and calibrated models."""
    trained, calibrated = (
        [row for row in read_rows(ROOT / "docs" / "results" / name) if row["steps"] == 250]
        for name in ("targets.csv", "targets-calibrated.csv")
    )
    left, right = figure.subplots(1, 2)
    for target in TICKS:
        width = [target / BESIDE**2, target * BESIDE**2]
        left.fill_between(width, 0.9 * target, 1.1 * target, color="C2", alpha=0.2, linewidth=0)
    places = (BESIDE**place for place in (-1.5, -0.5, 0.5, 1.5))
    for corpus, (marker, colour) in CORPORA.items():
        mark = {"marker": marker, "color": colour, "linestyle": "", "markersize": 6}
        own = [row for row in trained if row["corpus"] == corpus and row["target"] in TICKS]
        for start, fill in (("dense", "full"), ("sparse", "none")):
            place = next(places)
            points = [
                (place * row["target"], row["active"]) for row in own if row["start"] == start
            ]
            label = f"{corpus}, {start} start"
            left.plot(*zip(*points, strict=True), fillstyle=fill, label=label, **mark)
        thinned = [
            row
            for row in calibrated
            if (row["corpus"], row["target"], row["given"]) == (corpus, 128, "validation")
        ]
        for rows, fill, label in (
            (own, "full", f"{corpus}, trained to it"),
            (thinned, "none", f"{corpus}, calibrated from 128"),
        ):
            points = [(row["active"], row["recall_10"]) for row in rows]
            right.plot(*zip(*points, strict=True), fillstyle=fill, label=label, **mark)
    left.set(title="active dimensions of a document", xlabel="asked for", ylabel="after training")
    right.set(title="Recall@10", xlabel="active dimensions of a document", ylim=(0.6, 1.0))
    left.legend(loc="upper left", fontsize=8)
    right.legend(loc="lower right", fontsize=8)
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        plain_ticks(axis, TICKS)
