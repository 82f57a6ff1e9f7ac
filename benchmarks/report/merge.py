"""Several runs merged into one table: the median, lowest and highest value of every row."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.run.table import Row

__all__ = ["Key", "Merged", "Spread", "markdown", "merge"]

Key = tuple[str, str, str, str]  # loss, case, pass, variant


@dataclass(frozen=True)
class Spread:
    """The median of the runs and their range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Return the spread of the values that are not NaN; NaN if there are none."""
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls(math.nan, math.nan, math.nan)
        return cls(statistics.median(known), min(known), max(known))


@dataclass(frozen=True)
class Merged:
    """One variant of one case over all runs."""

    key: Key
    elements: int
    runs: int
    seconds: Spread
    speedup: Spread
    peak_bytes: float
    memory_ratio: float  # relative to eager's peak


def merge(tables: Sequence[Sequence[Row]]) -> list[Merged]:
    """Merge the rows of equal keys, in the order of the first table that has them."""
    found: dict[Key, list[Row]] = defaultdict(list)
    for rows in tables:
        for row in rows:
            found[_key(row)].append(row)
    eager = {key: _number(rows[0], "peak_bytes") for key, rows in found.items()}
    merged = []
    for key, rows in found.items():
        good = [row for row in rows if row["status"].startswith("ok")]
        base = eager.get((*key[:3], "eager"), math.nan)
        peak = Spread.of(_number(row, "peak_bytes") for row in good).high
        merged.append(
            Merged(
                key,
                int(rows[0]["elements"]),
                len(good),
                Spread.of(_number(row, "seconds") for row in good),
                Spread.of(_number(row, "speedup") for row in good),
                peak,
                peak / base if base else math.nan,
            )
        )
    return merged


def _key(row: Row) -> Key:
    return row["loss"], row["case"], row["pass"], row["variant"]


def _number(row: Row, name: str) -> float:
    return float(row[name]) if row[name] else math.nan


def markdown(heading: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)
