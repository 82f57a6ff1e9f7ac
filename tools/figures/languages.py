"""Other scripts after training with a language penalty or FLOPS: `docs/results/languages.csv`."""

import csv
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "languages.csv"
PANELS = {"query_foreign": "share of other scripts", "recall_10": "Recall@10"}
TICKS = [20, 50, 100, 200, 500]
MARKERS = "s^D"


def draw(figure: Figure) -> None:
    """Draw both by the active dimensions of a query, one mark per training."""
    figure.set_size_inches(8.4, 3.8)
    with RESULTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    both = figure.subplots(1, 2)
    for axes, (column, title) in zip(both, PANELS.items(), strict=True):
        text = axes.spines["left"].get_edgecolor()
        for number, variant in enumerate(dict.fromkeys(row["variant"] for row in rows)):
            own = [row for row in rows if row["variant"] == variant]
            plain = variant == "no penalty"
            axes.plot(
                [float(row["query_active"]) for row in own],
                [float(row[column]) for row in own],
                "X" if plain else MARKERS[number % 3],
                color=text if plain else f"C{number % 4}",
                fillstyle="none" if variant.startswith("FLOPS") else "full",
                label=variant,
                linestyle="none",
            )
        axes.set(title=title, xlabel="active dimensions of a query", xscale="log", ylim=(-0.03, 1))
        axes.set_xticks(TICKS, [str(tick) for tick in TICKS])
        axes.xaxis.set_minor_locator(NullLocator())
    figure.legend(
        *both[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8
    )
