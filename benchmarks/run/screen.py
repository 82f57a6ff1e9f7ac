"""Terminal output of a case: the training pass; the CSV has the rest."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Screen

from benchmarks.run.measure import TRAINING
from benchmarks.run.table import Row

__all__ = ["show"]


def show(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print one line per variant, and then the failures."""
    screen = Screen(title=title, title_justify="left", box=None, pad_edge=False)
    screen.add_column("forward + backward", width=24, no_wrap=True)
    for heading in ("time", "x eager", "quartiles", "memory", "- gradients", "of ceiling"):
        screen.add_column(heading, justify="right", no_wrap=True, min_width=10)
    trouble = []
    for row in rows:
        if row["pass"] != TRAINING:
            continue
        if not row["status"].startswith("ok"):
            trouble.append(f"{row['variant']}: {row['status']}")
            continue
        low, high = row["speedup_q1"], row["speedup_q3"]
        screen.add_row(
            row["variant"],
            _time(float(row["seconds"])),
            f"{float(row['speedup']):.2f}" if row["speedup"] else "",
            f"{float(low):.2f}-{float(high):.2f}" if row["speedup"] else "",
            _memory(float(row["peak_bytes"])),
            _memory(float(row["peak_bytes_without_gradients"])),
            f"{100 * float(row['share_of_ceiling']):.0f}%",
        )
    console.print(screen)
    for line in trouble:
        console.print(escape(line))


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _memory(num_bytes: float) -> str:
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**10:.3g} KiB"
