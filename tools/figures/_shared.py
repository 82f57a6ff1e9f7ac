"""What several figures need: committed results, marks over ours, plain ticks, values and slopes."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, str]


def results(name: str) -> list[Row]:
    """Return the rows of a CSV of the docs' or the benchmarks' results."""
    folders = (ROOT / "docs" / "results", ROOT / "benchmarks" / "results")
    path = next(folder / name for folder in folders if (folder / name).exists())
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


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
    *,
    stacked: bool = False,
    markersize: float = 6,
    joined: str = "\n",
) -> None:
    """Draw each variant's figure over ours, a line per case: right of 1, ours is less."""
    table = {(row["loss"], row["case"], row["variant"]): row for row in rows}
    cases = [case for case in cases if (*case, "ours") in table][::-1]
    both = figure.subplots(2, 1) if stacked else figure.subplots(1, 2, sharey=True)
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
                markersize=markersize,
                markerfacecolor="none",
                markeredgewidth=1.5,
                color=text if number > 4 else None,  # there are no more colours
            )
        axes.axvline(1, color=text, linewidth=1, linestyle="-")
        plain_ticks(axes.xaxis, [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50])
        axes.set(xlabel=title, ylim=(-0.6, len(cases) - 0.4))
    for axes in both if stacked else both[:1]:
        axes.set_yticks(range(len(cases)), [joined.join(case) for case in cases], fontsize=6)
    handles = both[0].get_legend_handles_labels()
    columns = 2 if stacked else 5
    figure.legend(*handles, loc="outside upper center", ncols=columns, fontsize=8)


def slopes(x: Any, losses: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, Any]:
    """Return the curves of losses without reduction: each row's value, and its slope in ``x``."""
    curves: dict[str, Any] = {"x": x, "value": {}, "gradient": {}}
    for series, loss in losses.items():
        leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        value = loss(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        curves["value"][series] = value.detach().numpy()
        curves["gradient"][series] = gradient.numpy()
    return curves
