"""The aims, which are targets for measured figures, and whether they are met."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.losses import NAMES, benchmark
from benchmarks.run.table import Row, by_case
from benchmarks.schema import case_name

MIB = 2**20
RULE = "every loss, above 1e5 elements"
Variants = Mapping[str, Row]


class Verdict(NamedTuple):
    """One line of the table of aims."""

    aim: str
    case: str
    wanted: str
    measured: str
    verdict: str


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Judge every aim by the rows of a run, then the rules for all losses."""
    cases = by_case(row for row in rows if row["status"].startswith("ok"))
    verdicts = []
    for loss in NAMES:
        for aim in benchmark(loss).aims:
            case = case_name(aim.sizes)
            value = _figure(aim.figure, cases.get((loss, case), {}), aim.variant)
            is_met = value >= aim.bound if aim.figure == "speedup" else value <= aim.bound
            verdict, measured = "met" if is_met else "missed", f"{value:.3g}"
            if math.isnan(value):
                verdict, measured = "not measured", "-"
            about = f"{aim.text} ({aim.variant})", f"{loss}, {case}"
            verdicts.append(Verdict(*about, aim.wanted, measured, verdict))
    return verdicts + _rule_for_all(cases)


def _figure(figure: str, variants: Variants, name: str = "ours") -> float:
    """Return a figure of a variant; NaN if it was not measured."""
    if name not in variants or "eager" not in variants:
        return math.nan
    own, eager = variants[name], variants["eager"]
    if figure == "memory":
        return float(own["peak_bytes"]) / float(eager["peak_bytes"])
    if figure == "MiB":
        return float(own["peak_bytes"]) / MIB
    speedup = float(own["speedup"])
    return 1 / speedup if figure == "time" else speedup


def _rule_for_all(cases: Mapping[tuple[str, str], Variants], above: int = 100_000) -> list[Verdict]:
    """Judge that no loss takes 1.5 times eager's time, or more memory, above 1e5 elements."""
    verdicts = []
    for figure, most in (("time", 1.5), ("memory", 1.0)):
        wanted = f"<= {most:g} of eager's {figure}"
        figures = {
            about: _figure(figure, variants)
            for about, variants in cases.items()
            if "ours" in variants and int(variants["ours"]["elements"]) > above
        }
        figures = {about: value for about, value in figures.items() if not math.isnan(value)}
        worse = {about: value for about, value in figures.items() if value > 1.001 * most}
        for about, value in worse.items():
            verdicts.append(Verdict(RULE, ", ".join(about), wanted, f"{value:.3g}", "missed"))
        verdict = "missed" if worse else "met" if figures else "not measured"
        count = f"{len(figures) - len(worse)} of {len(figures)}"
        verdicts.append(Verdict(RULE, f"{len(figures)} cases", wanted, count, verdict))
    return verdicts
