"""One plot per loss: time and memory against size, one line per variant."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.run.measure import TRAINING
from benchmarks.run.table import Row, read

__all__ = ["draw"]

# Also legible in grey: no two variants share both marker and dashes.
MARKERS = "os^Dv<>PX*hp8d"
STYLES = ("-", "--", "-.", ":")
PANELS = {"seconds": ("time, ms", 1e-3), "peak_bytes": ("peak extra memory, MiB", 2.0**20)}


def draw(path: Path, folder: Path) -> list[Path]:
    """Draw every loss of a CSV into a folder; return the paths."""
    by_loss: dict[str, list[Row]] = defaultdict(list)
    for row in read(path):
        if row["pass"] == TRAINING and row["status"].startswith("ok"):
            by_loss[row["loss"]].append(row)
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _draw_loss(folder / f"{path.stem}-{loss}.svg", loss, rows) for loss, rows in by_loss.items()
    ]


def _draw_loss(target: Path, loss: str, rows: Sequence[Row]) -> Path:
    """Draw panels: columns for time and memory, rows for what is fixed (density, part)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    allocator = "warm" if any(row["allocator"] == "warm" for row in rows) else "default"
    rows = [row for row in rows if row["allocator"] == allocator]
    # A group with a single size is a point; points are drawn only if there are no lines.
    sizes: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        sizes[row["group"]].add(row["elements"])
    groups = [group for group in sizes if len(sizes[group]) > 1] or list(sizes)
    names = list(dict.fromkeys(row["variant"] for row in rows))
    figure, axes = pyplot.subplots(
        len(groups), 2, figsize=(12.4, 3.6 * len(groups)), squeeze=False, layout="constrained"
    )
    for across, group in zip(axes, groups, strict=True):
        for axis, (column, (title, unit)) in zip(across, PANELS.items(), strict=True):
            for number, name in enumerate(names):
                points = sorted(
                    (float(row["elements"]), float(row[column]) / unit)
                    for row in rows
                    if (row["group"], row["variant"]) == (group, name) and float(row[column]) > 0
                )
                axis.plot(
                    [x for x, _ in points],
                    [y for _, y in points],
                    marker=MARKERS[number % len(MARKERS)],
                    linestyle=STYLES[number % len(STYLES)],
                    linewidth=2.2 if name == "ours" else 1.2,
                    label=name,
                )
            axis.set(xscale="log", yscale="log", title=f"{group} {title}".strip())
            axis.set_xlabel("elements")
            axis.grid(visible=True, alpha=0.25)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    about = f"{rows[0]['device']}, {rows[0]['threads']} threads, {rows[0]['git_commit']}"
    figure.suptitle(f"{loss}, forward and backward ({about}, {allocator})", fontsize=9)
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)
    return target
