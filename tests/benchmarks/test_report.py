"""Aims are judged by a run."""

from benchmarks.report.aims import judge


def rows(speedup: float) -> list[dict[str, str]]:
    """Return the rows of FLOPS at a size with an aim; ours needs 80 bytes for eager's 100."""
    about = {"loss": "flops", "case": "B=256 V=30522 5%", "elements": 256 * 30522, "status": "ok"}
    eager = about | {"variant": "eager", "speedup": 1.0, "peak_bytes": 100}
    ours = about | {"variant": "ours", "speedup": speedup, "peak_bytes": 80}
    return [{name: str(value) for name, value in row.items()} for row in (eager, ours)]


def test_reached_aims_are_met():
    verdicts = {(v.aim, v.wanted): v for v in judge(rows(3.5))}
    assert verdicts["FLOPS (ours)", ">= 3x eager"].verdict == "met"
    assert verdicts["FLOPS (ours)", ">= 3x eager"].measured == "3.5"
    assert verdicts["top-k (ours)", ">= 1.5x eager"].verdict == "not measured"
    rule = "every loss, above 1e5 elements"
    assert verdicts[rule, "<= 1.5 of eager's time"].verdict == "met"
    assert verdicts[rule, "<= 1 of eager's memory"].verdict == "met"


def test_a_slower_loss_misses_its_aim_and_the_rule_for_all():
    verdicts = judge(rows(0.6))
    assert {v.verdict for v in verdicts if v.aim == "FLOPS (ours)"} == {"missed"}
    slower = [v for v in verdicts if v.aim.startswith("every") and v.wanted.endswith("time")]
    assert [(v.measured, v.verdict) for v in slower] == [("1.67", "missed"), ("0 of 1", "missed")]
