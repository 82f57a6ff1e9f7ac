"""Pictures of committed results."""

import functools
from collections.abc import Sequence

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from benchmarks.run.table import RESULTS as BENCHMARKS
from benchmarks.run.table import largest_cases, read


def plain_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Put the only ticks of a logarithmic axis at these values, written as numbers."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(FixedLocator(values))
    axis.set_ticklabels([f"{v / 1e3:.3g}k" if v >= 1e4 else f"{v:g}" for v in values])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


PEERS = {  # variants with their labels and markers
    "eager": ("plain formula", "o"),
    "torch.compile": ("the same, compiled", "x"),
    "ours, compiled": ("sparse-losses, compiled", "s"),
    "sentence-transformers": ("sentence-transformers", "^"),
    "pytorch-metric-learning": ("pytorch-metric-learning", "D"),
    "info-nce-pytorch": ("info-nce-pytorch", "+"),
}


def relative(figure: Figure, *, file: str) -> None:
    """Draw time and memory of others over ours, a line per case: right of 1, ours is less."""
    rows = [row for row in read(BENCHMARKS / file) if row["status"].startswith("ok")]
    table = {(row["loss"], row["case"], row["variant"]): row for row in rows}
    peers = [name for name in PEERS if any(variant == name for *_, variant in table)]
    cases = [x for x in largest_cases(rows) if any((*x, name) in table for name in peers)][::-1]
    figure.set_size_inches(8.4, 0.4 * len(cases))
    both = figure.subplots(1, 2, sharey=True)
    for axes, (column, title) in zip(
        both, {"seconds": "time", "peak_bytes": "memory"}.items(), strict=True
    ):
        text = axes.spines["left"].get_edgecolor()
        for number, name in enumerate(peers):
            label, marker = PEERS[name]
            ratios = {
                line: float(table[*case, name][column]) / float(table[*case, "ours"][column])
                for line, case in enumerate(cases)
                if (*case, name) in table
            }
            axes.plot(
                list(ratios.values()),
                list(ratios),
                marker,
                label=label,
                markerfacecolor="none",
                markeredgewidth=1.5,
                color=text if number > 4 else None,  # there are no more colours
            )
        axes.axvline(1, color=text, linewidth=1, linestyle="-")
        plain_ticks(axes.xaxis, [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 200])
        axes.set(xlabel=f"{title} relative to sparse-losses", ylim=(-0.6, len(cases) - 0.4))
    both[0].set_yticks(range(len(cases)), ["\n".join(case) for case in cases], fontsize=7.5)
    handles = both[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3)


FIGURES = {
    "benchmarks_peers": functools.partial(relative, file="cpu-quick.csv"),
    "benchmarks_gpu": functools.partial(relative, file="cuda-gpu.csv"),
}
