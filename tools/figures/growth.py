"""Time and memory as one size doubles: benchmarks/results/growth.csv."""

from matplotlib.figure import Figure

from tools.figures._shared import plain_ticks, results

PANELS = {"seconds": ("time, ms", 1e-3), "peak_bytes": ("memory, MiB", 2.0**20)}
LABELS = {"eager": "plain formula", "ours": "ours"}


def draw(figure: Figure) -> None:
    """Draw two panels per axis on logarithmic scales: the slope of a line is its exponent."""
    figure.set_size_inches(8.4, 10)
    rows = results("growth.csv")
    axes_of = list(dict.fromkeys((row["loss"], row["axis"]) for row in rows))
    panels = figure.subplots(-(-len(axes_of) // 2), 4).flat
    for loss, axis in axes_of:
        own = [row for row in rows if (row["loss"], row["axis"]) == (loss, axis)]
        for column, (title, unit) in PANELS.items():
            panel = next(panels)
            for variant, label in LABELS.items():
                line = [row for row in own if row["variant"] == variant]
                panel.plot(
                    [float(row["value"]) for row in line],
                    [float(row[column]) / unit for row in line],
                    marker="o" if variant == "ours" else "x",
                    linestyle="-" if variant == "ours" else "--",
                    markersize=4,
                    label=label,
                )
            plain_ticks(panel.xaxis, sorted({float(row["value"]) for row in own}))
            panel.set_yscale("log")
            low, high = panel.get_ylim()
            factors = (1, 2, 5) if high < 50 * low else (1,)
            steps = [factor * 10.0**power for power in range(-3, 6) for factor in factors]
            plain_ticks(panel.yaxis, [step for step in steps if low <= step <= high])
            panel.set_title(f"{loss}: {title}", fontsize=8)
            panel.set_xlabel(axis, fontsize=8)
            panel.tick_params(labelsize=7)
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
