"""Tables of figures calculated on the simulated device, not measured."""

from collections.abc import Sequence

from benchmarks.report.merge import markdown
from benchmarks.run.reckoned import Row

__all__ = ["figure", "table"]

PEER = "sentence-transformers"
MIB = 2.0**20


def table(rows: Sequence[Row]) -> str:
    """Return one line per case that has figures of the plain formula and of ours."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row.status == "ok":
            cases.setdefault((row.loss, row.case), {})[row.variant] = row
    lines = []
    for about, found in cases.items():
        if {"eager", "ours"} <= set(found):
            each = [found["eager"], found["ours"], found.get(PEER)]
            lines.append((*about, *_cells(each)))
    heading = (
        "loss",
        "case",
        "launches: plain; ours; peer",
        "peak, MiB: plain; ours; peer",
        "plain over ours, H100",
        "A10G",
    )
    return markdown(heading, lines)


def _cells(each: Sequence[Row | None]) -> list[str]:
    plain, ours = each[0], each[1]
    assert plain is not None
    assert ours is not None
    return [
        "; ".join("-" if row is None else f"{row.launches}" for row in each),
        "; ".join("-" if row is None else figure(row.peak_bytes / MIB) for row in each),
        f"{plain.h100_seconds / ours.h100_seconds:.2f}",
        f"{plain.a10g_seconds / ours.a10g_seconds:.2f}",
    ]


def figure(number: float) -> str:
    """Format three digits, or all digits of a whole number."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
