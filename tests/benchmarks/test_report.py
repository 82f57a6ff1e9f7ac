"""Runs are merged soundly, and aims judged by them."""

from pathlib import Path

from benchmarks.report.aims import judge, one_rule_for_all
from benchmarks.report.merge import merge
from benchmarks.run.measure import TRAINING, Result
from benchmarks.run.table import Table, read

COMMON = {
    **dict.fromkeys(("device", "capability", "threads", "torch"), "x"),
    "suite": "full",
    "git_commit": "abc",
}


def result(variant: str, speedup: float, peak: float, elements: int = 256 * 30522) -> Result:
    kind = "eager" if variant == "eager" else "ours"
    about = ("flops", f"B={elements // 30522} V=30522 5%", "5%", elements, TRAINING, variant, kind)
    times = (3, 1.0 / speedup, 1.0, 1.0, speedup, speedup, speedup)
    return Result(*about, "ok", *times, peak, peak, 1.0, 1.0, 0.5)


def table(path: Path, speedup: float) -> Path:
    Table(path, COMMON).add([result("eager", 1.0, 100.0), result("ours", speedup, 80.0)])
    return path


def test_runs_are_merged_and_judged(tmp_path: Path):
    paths = [table(tmp_path / f"{s}.csv", s) for s in (2.0, 3.5, 5.0)]
    merged = {row.key[3]: row for row in merge([read(path) for path in paths])}
    ours = merged["ours"]
    assert (ours.speedup.median, ours.speedup.low, ours.speedup.high) == (3.5, 2.0, 5.0)
    assert (ours.runs, ours.memory_ratio) == (3, 0.8)
    found = {(v.aim, v.wanted): v for v in judge(list(merged.values()))}
    assert found["FLOPS (ours)", ">= 3x eager"].verdict == "met"
    assert found["FLOPS (ours)", ">= 3x eager"].measured == "3.5 (2-5)"
    assert found["top-k (ours)", ">= 1.5x eager"].verdict == "not measured"
    assert found["every loss, above 1e5 elements", ">= 1x eager"].verdict == "met"


def test_an_aim_that_is_not_reached_is_missed_and_a_slower_loss_breaks_the_rule(tmp_path: Path):
    merged = merge([read(table(tmp_path / "slow.csv", 0.9))])
    found = {(v.aim, v.wanted): v.verdict for v in judge(merged)}
    assert found["FLOPS (ours)", ">= 3x eager"] == "missed"
    verdicts = [v for v in one_rule_for_all(merged) if v.wanted == ">= 1x eager"]
    assert [v.verdict for v in verdicts] == ["missed", "missed"]
