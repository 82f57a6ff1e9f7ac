"""The package and its peers: benchmarks/results/cpu-quick.csv, the largest case of each kind."""

from matplotlib.figure import Figure

from benchmarks.run.table import RESULTS, largest_cases, read

PANELS = {"seconds": "time over ours", "peak_bytes": "peak extra memory over ours"}
PEERS = {
    "eager": ("plain formula", "o"),
    "torch.compile": ("the same, compiled", "x"),
    "ours, compiled": ("ours, compiled", "s"),
    "sentence-transformers": ("sentence-transformers", "^"),
    "pytorch-metric-learning": ("pytorch-metric-learning", "D"),
    "info-nce-pytorch": ("info-nce-pytorch", "+"),
}


def draw(figure: Figure, *, stacked: bool = False) -> None:
    """Draw one row per case; right of 1, ours is faster or smaller. Panels are side by side."""
    figure.set_size_inches((4.6, 12) if stacked else (8.4, 6.4))
    rows = [
        row
        for row in read(RESULTS / "cpu-quick.csv")
        if row["pass"] == "forward+backward" and row["status"].startswith("ok")
    ]
    cases = largest_cases(rows)[::-1]
    both = figure.subplots(2, 1) if stacked else figure.subplots(1, 2, sharey=True)
    for axes, (column, title) in zip(both, PANELS.items(), strict=True):
        found = {(row["loss"], row["case"], row["variant"]): float(row[column]) for row in rows}
        text = axes.spines["left"].get_edgecolor()
        for name, (label, marker) in PEERS.items():
            own = [case for case in cases if (*case, name) in found]
            if not own:  # the peer was not measured
                continue
            axes.plot(
                [found[*case, name] / found[*case, "ours"] for case in own],
                [cases.index(case) for case in own],
                marker,
                label=label,
                markersize=6,
                markerfacecolor="none",
                markeredgewidth=1.5,
                **({"color": text} if name == "info-nce-pytorch" else {}),
            )
        axes.axvline(1, color=text, linewidth=1, linestyle="-")
        axes.set_xscale("log")
        ticks = [0.2, 0.5, 1, 2, 5, 10, 20, 50]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(title)
        axes.set_ylim(-0.6, len(cases) - 0.4)
    for axes in both if stacked else both[:1]:
        axes.set_yticks(range(len(cases)), ["\n".join(case) for case in cases], fontsize=7)
    figure.legend(
        *both[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=2 if stacked else 5,
        fontsize=8,
    )
