"""The pages say what the committed results of the demo hold."""

import csv
import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = DOCS / "results"


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table whose heading begins so, without the heading."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^{re.escape(heading)}.*\n\|[-:| ]+\|\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in found.splitlines()]


def spread(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def runs(file: str) -> list[dict[str, str]]:
    return list(csv.DictReader((RESULTS / file).read_text(encoding="utf-8").splitlines()))


def column(file: str, variant: str, name: str) -> list[float]:
    values = [float(run[name]) for run in runs(file) if run["variant"] == variant]
    assert len(values) == 3
    return values


@pytest.mark.parametrize("page", ["target_sparsity.md", "demo.md"])
def test_the_table_of_targets(page):
    table = rows(page, "| run | active | off by |")
    assert [row[0] for row in table][1:] == [f"target {a}" for a in (32, 64, 128, 256)]
    for run, active, off, name, summary, status in table:
        variant = "full" if run == "a fixed weight" else run
        found = column("targets.csv", variant, "active")
        assert active == spread(found, 1)
        assert name == spread(column("targets.csv", variant, "name_recall_10"), 3)
        assert summary == spread(column("targets.csv", variant, "summary_recall_10"), 3)
        said = [one["status"] for one in runs("targets.csv") if one["variant"] == variant]
        assert said == 3 * [status]
        if variant != "full":
            target = float(variant.removeprefix("target "))
            assert off == f"{mean(found) / target - 1:+.1%}"
            if status == "on target":
                assert all(abs(one / target - 1) < 0.08 for one in found)


def test_the_table_of_targets_of_the_guide():
    for target, active, name, summary in rows("guides/sparsity.md", "| target, documents |"):
        variant = f"target {target}"
        assert active.removesuffix(", unreachable") == spread(
            column("targets.csv", variant, "active"), 1
        )
        assert name == spread(column("targets.csv", variant, "name_recall_10"), 3)
        assert summary == spread(column("targets.csv", variant, "summary_recall_10"), 3)


def test_whose_active_dimensions():
    tests = [
        json.loads((RESULTS / f"demo-seed-{seed}.json").read_text(encoding="utf-8"))["test"]
        for seed in range(3)
    ]
    name, summary = (
        spread([test[task]["document_after"]["active"] for test in tests], 0) for task in (0, 1)
    )
    both = spread(column("targets.csv", "full", "active"), 1)
    shorter = spread(column("ablation.csv", "full", "active_document"), 0)
    found = [row[0] for row in rows("demo.md", "| active | of | steps |")]
    assert found[:4] == [name, summary, both, shorter]
    assert found[4] == "108"  # one run, not committed: the row "the default" of what was tried
    bm25 = [test["rankings"]["BM25, same subwords"] for test in tests[0]]
    assert [f"{one['recall_10']:.3f}" for one in bm25] == ["0.677", "0.823"]
    assert [f"{one['mrr_10']:.3f}" for one in bm25] == ["0.571", "0.687"]
