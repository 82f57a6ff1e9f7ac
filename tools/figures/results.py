"""Pictures of committed results."""

import functools
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from benchmarks.run.table import RESULTS as BENCHMARKS
from benchmarks.run.table import Row, largest_cases, read


def plain_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Put the only ticks of a logarithmic axis at these values, written as numbers."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(FixedLocator(values))
    axis.set_ticklabels([f"{v / 1e3:.3g}k" if v >= 1e4 else f"{v:g}" for v in values])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def over_ours(
    figure: Figure,
    rows: Iterable[Row],
    panels: Mapping[str, str],
    series: Mapping[str, tuple[str, str]],
    cases: Sequence[tuple[str, str]],
) -> None:
    """Draw each variant's figure over ours, a line per case: right of 1, ours is less."""
    table = {(row["loss"], row["case"], row["variant"]): row for row in rows}
    is_drawn = [any((*case, name) in table for name in series) for case in cases]
    cases = [case for case, drawn in zip(cases, is_drawn, strict=True) if drawn][::-1]
    both = figure.subplots(1, 2, sharey=True)
    for axes, (column, title) in zip(both, panels.items(), strict=True):
        text = axes.spines["left"].get_edgecolor()
        for number, (name, (label, marker)) in enumerate(series.items()):
            own = [case for case in cases if (*case, name) in table]
            ratios = [
                float(table[*case, name][column]) / float(table[*case, "ours"][column])
                for case in own
            ]
            axes.plot(
                ratios,
                [cases.index(case) for case in own],
                marker,
                label=label,
                markersize=6,
                markerfacecolor="none",
                markeredgewidth=1.5,
                color=text if number > 4 else None,  # there are no more colours
            )
        axes.axvline(1, color=text, linewidth=1, linestyle="-")
        plain_ticks(axes.xaxis, [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 200])
        axes.set(xlabel=title, ylim=(-0.6, len(cases) - 0.4))
    both[0].set_yticks(range(len(cases)), ["\n".join(case) for case in cases], fontsize=6)
    handles = both[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=5, fontsize=8)


def benchmarks_peers(figure: Figure, *, file: str) -> None:
    """Time and memory of the peers side by side."""
    rows = [row for row in read(BENCHMARKS / file) if row["status"].startswith("ok")]
    panels = {"seconds": "time", "peak_bytes": "memory"}
    panels = {key: f"{name} relative to sparse-losses" for key, name in panels.items()}
    peers = {"eager": ("plain formula", "o"), "torch.compile": ("the same, compiled", "x")}
    names = ("ours, compiled", "sentence-transformers", "pytorch-metric-learning")
    for name, marker in zip((*names, "info-nce-pytorch"), "s^D+", strict=True):
        peers[name] = (name.replace("ours", "sparse-losses"), marker)
    figure.set_size_inches(8.4, 6.4)
    found = {row["variant"] for row in rows}
    peers = {name: look for name, look in peers.items() if name in found}
    over_ours(figure, rows, panels, peers, largest_cases(rows))


FIGURES = {
    "benchmarks_peers": functools.partial(benchmarks_peers, file="cpu-quick.csv"),
    "benchmarks_gpu": functools.partial(benchmarks_peers, file="cuda-gpu.csv"),
}
