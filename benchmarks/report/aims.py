"""The aims, which are targets for measured figures, and whether they are met."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.losses import NAMES, benchmark
from benchmarks.report.merge import Key, Merged
from benchmarks.run.measure import TRAINING
from benchmarks.schema import Aim, case_name

__all__ = ["Verdict", "judge", "one_rule_for_all"]

MIB = 2**20
RULE = "every loss, above 1e5 elements"


@dataclass(frozen=True)
class Verdict:
    """One line of the table of aims."""

    aim: str
    case: str
    wanted: str
    measured: str
    verdict: str


def judge(merged: Sequence[Merged]) -> list[Verdict]:
    """Judge every aim, then the rules for all losses."""
    rows = {row.key: row for row in merged}
    lines = []
    for loss in NAMES:
        for aim in benchmark(loss).aims:
            case = case_name(aim.sizes)
            value, runs = _measured(aim, rows, (loss, case, TRAINING))
            is_met = value >= aim.bound if aim.is_lower_bound else value <= aim.bound
            unknown = math.isnan(value)
            lines.append(
                Verdict(
                    f"{aim.text} ({aim.variant})",
                    f"{loss}, {case}",
                    aim.wanted,
                    "-" if unknown else f"{value:.3g}{runs}",
                    "not measured" if unknown else "met" if is_met else "missed",
                )
            )
    return lines + one_rule_for_all(merged) + _crossover(rows)


def _measured(aim: Aim, rows: dict[Key, Merged], about: tuple[str, str, str]) -> tuple[float, str]:
    """Return the figure (NaN if not measured) and the lowest and highest of several runs."""
    row = rows.get((*about, aim.variant))
    if row is None or row.runs == 0:
        return math.nan, ""
    if aim.figure == "memory":
        return row.memory_ratio, ""
    if aim.figure == "MiB":
        return row.peak_bytes / MIB, ""
    if aim.figure == "against":
        other = rows.get((*about, aim.other))
        return (row.speedup.median / other.speedup.median if other else math.nan), ""
    ends = (row.speedup.low, row.speedup.high)
    value = row.speedup.median
    if aim.figure == "time":
        value, ends = 1 / value, (1 / ends[1], 1 / ends[0])
    return value, f" ({ends[0]:.3g}-{ends[1]:.3g})" if row.runs > 1 else ""


def one_rule_for_all(merged: Sequence[Merged], above: int = 100_000) -> list[Verdict]:
    """Judge that no loss is slower or needs more memory than eager above 1e5 elements."""
    lines = []
    tests: tuple[tuple[str, Callable[[Merged], float], Callable[[float], bool]], ...] = (
        (">= 1x eager", lambda row: row.speedup.median, lambda value: value < 1),
        ("<= 1 of eager's memory", lambda row: row.memory_ratio, lambda value: value > 1.001),
    )
    for wanted, figure, is_worse in tests:
        ours = [
            row
            for row in merged
            if row.key[3] == "ours" and row.elements > above and not math.isnan(figure(row))
        ]
        worse = [row for row in ours if is_worse(figure(row))]
        for row in worse:
            case, found = ", ".join(row.key[:3]), f"{figure(row):.3g}"
            lines.append(Verdict(RULE, case, wanted, found, "missed"))
        verdict = "met" if ours and not worse else "missed" if worse else "not measured"
        whole = f"{len(ours)} cases and passes"
        count = f"{len(ours) - len(worse)} of {len(ours)}"
        lines.append(Verdict(RULE, whole, wanted, count, verdict))
    return lines


def _crossover(rows: dict[Key, Merged]) -> list[Verdict]:
    """Report the density at which InfoNCE's sparse products stop being faster than dense ones."""
    found = []
    for sizes in sorted(benchmark("info_nce").crossover, key=lambda sizes: sizes["density"]):
        about = ("info_nce", case_name(sizes), TRAINING)
        sparse, dense = (rows.get((*about, f"ours, {way}")) for way in ("nonzeros", "direct"))
        if sparse and dense and sparse.runs and dense.runs:
            ratio = dense.seconds.median / sparse.seconds.median
            found.append(f"{100 * sizes['density']:g}%: {ratio:.2f}")
    said = ("InfoNCE, nonzeros over direct", "info_nce, B=256 V=30522")
    return [Verdict(*said, "1 near 12%", ", ".join(found), "see figures")] if found else []
