"""Speedups over the plain formula: benchmarks/results/aims-run-1.csv."""

from matplotlib.figure import Figure

from tools.figures._shared import plain_ticks, results

VARIANTS = ("ours", "ours, CSR input", "ours, sparse_grad")


def draw(figure: Figure) -> None:
    """Draw one row per case."""
    figure.set_size_inches(8.4, 7)
    points = [
        (float(row["speedup"]), ", ".join((f"{row['loss']}  {row['case']}", *options)))
        for row in results("aims-run-1.csv")
        if row["pass"] == "forward+backward" and row["variant"] in VARIANTS
        for options in [row["variant"].split(", ")[1:]]
    ]
    labels = list(dict.fromkeys(label for _, label in points))[::-1]
    axes = figure.subplots()
    axes.plot([speedup for speedup, _ in points], [labels.index(y) for _, y in points], "o")
    axes.axvline(1, color=axes.spines["left"].get_edgecolor(), linewidth=1, linestyle="-")
    plain_ticks(axes.xaxis, [0.7, 1, 2, 3, 5, 10, 20, 50, 100])
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.set_xlabel("times as fast as the plain formula, forward and backward")
