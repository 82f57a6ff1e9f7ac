"""One SVG a loss: time and memory against size, a line a variant, labelled where it ends."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import Row, read

__all__ = ["Line", "draw", "draw_lines"]

TRAINING = "forward+backward"
# In grey as well as in colour: no two variants share a marker.
MARKERS = "os^Dv<>PX*hp8d"
STYLES = ("-", "--", "-.", ":")

Line = tuple[str, list[tuple[float, float]]]  # a label and its points


def draw(path: Path) -> list[Path]:
    """Draws every loss of a CSV beside it."""
    rows = [row for row in read(path) if row["pass"] == TRAINING and row["status"].startswith("ok")]
    by_loss: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_loss[row["loss"]].append(row)
    return [_draw_loss(path, loss, found) for loss, found in by_loss.items()]


def _draw_loss(path: Path, loss: str, rows: Sequence[Row]) -> Path:
    """Panels: time and memory across, what is fixed along a line (density, part) down."""
    allocator = "warm" if any(row["allocator"] == "warm" for row in rows) else "default"
    rows = [row for row in rows if row["allocator"] == allocator]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    # A group of a single size is no line; without any line, the points are drawn all the same.
    sizes = {g: {row["elements"] for row in rows if row["group"] == g} for g in groups}
    groups = [group for group in groups if len(sizes[group]) > 1] or groups
    panels = []
    for group in groups:
        own = [row for row in rows if row["group"] == group]
        for title, column, unit in (
            ("time, ms", "seconds", 1e-3),
            ("peak extra memory, MiB", "peak_bytes", 2**20),
        ):
            points: dict[str, dict[float, float]] = defaultdict(dict)
            for row in own:
                if float(row[column]) > 0:
                    size = float(row["elements"])
                    points[row["variant"]][size] = float(row[column]) / unit
            lines = [(name, sorted(found.items())) for name, found in points.items()]
            panels.append((f"{group}: {title}" if group else title, "elements", lines))
    note = (
        f"{rows[0]['device']}, {rows[0]['threads']} threads, {rows[0]['git_commit']}, {allocator}"
    )
    target = path.with_name(f"{path.stem}-{loss}.svg")
    return draw_lines(target, f"{loss}, forward and backward ({note})", panels)


def draw_lines(
    path: Path, title: str, panels: Sequence[tuple[str, str, Sequence[Line]]], *, across: int = 2
) -> Path:
    """Draws log-log panels, each a title, what its x axis is, and lines."""
    import matplotlib

    matplotlib.use("Agg")
    # The same figures give the same file, so that a commit shows what changed.
    matplotlib.rcParams |= {"svg.hashsalt": "sparse-losses", "svg.fonttype": "none"}
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for _, _, lines in panels for name, _ in lines))
    down = -(-len(panels) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(6.2 * across, 3.6 * down), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (heading, x_label, lines) in zip(axes.flat, panels, strict=False):
        for name, points in lines:
            number = names.index(name)
            axis.plot(
                *zip(*points, strict=True),
                marker=MARKERS[number % len(MARKERS)],
                linestyle=STYLES[number % len(STYLES)],
                color=f"C{number % 10}",
                linewidth=2.2 if name == "ours" else 1.2,
                markersize=5,
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        _tick(axis, sorted({x for _, points in lines for x, _ in points}))
        axis.set_title(heading, fontsize=9)
        axis.set_xlabel(x_label, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(visible=True, which="major", alpha=0.25)
        _label(axis, lines, names)
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _tick(axis: Any, sizes: Sequence[float]) -> None:
    """The sizes that were measured below; 1, 2, 5 and their tenfolds at the side."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axis.set_xticks(sizes, [_plain(size) for size in sizes])
    axis.xaxis.set_minor_locator(NullLocator())
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _label(axis: Any, lines: Iterable[Line], names: Sequence[str]) -> None:
    """Names the lines at their right ends, moved apart where they would overlap."""
    import math

    ends = sorted(((points[-1][1], points[-1][0], name) for name, points in lines if points))
    if not ends:
        return
    low, high = axis.get_ylim()
    span = math.log10(high / low)
    left, right = axis.get_xlim()
    # A third of the panel is for the names.
    axis.set_xlim(left, right * (right / left) ** 0.55)
    places = [math.log10(value / low) / span for value, _, _ in ends]
    gap = 0.062
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + gap)
    over = max(0.0, places[-1] - 0.96)
    for index in reversed(range(len(places))):
        limit = 0.96 - gap * (len(places) - 1 - index)
        places[index] = min(places[index], limit) if over else places[index]
    for place, (value, x, name) in zip(places, ends, strict=True):
        number = names.index(name)
        axis.annotate(
            name,
            xy=(x, value),
            xytext=(0.72, place),
            textcoords="axes fraction",
            fontsize=7,
            va="center",
            color=f"C{number % 10}",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": f"C{number % 10}"},
        )
