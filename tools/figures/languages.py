"""Other scripts after training with a language penalty or FLOPS: `docs/results/languages.csv`."""

from matplotlib.figure import Figure

from tools.figures._shared import plain_ticks, results

PANELS = {"query_foreign": "share of other scripts", "recall_10": "Recall@10"}
MARKERS = "s^D"


def draw(figure: Figure) -> None:
    """Draw both by the active dimensions of a query, one mark per training."""
    figure.set_size_inches(8.4, 3.8)
    rows = results("languages.csv")
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
        axes.set(title=title, xlabel="active dimensions of a query", ylim=(-0.03, 1))
        plain_ticks(axes.xaxis, [20, 50, 100, 200, 500])
    figure.legend(
        *both[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8
    )
