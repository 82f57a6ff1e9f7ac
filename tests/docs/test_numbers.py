"""The pages say what the committed results of the demo hold."""

import csv
import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest

from benchmarks.studies.targets import asked_and_got, calibration, read_rows

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


def test_the_table_of_targets():
    table = rows("demo.md", "| run | active | off by |")
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


def test_the_tables_of_the_study_of_targets():
    trained = read_rows(RESULTS / "targets-250.csv")
    calibrated = read_rows(RESULTS / "targets-250-calibrated.csv")
    text = (DOCS / "target_sparsity.md").read_text(encoding="utf-8")
    assert asked_and_got(trained) in text
    assert calibration(calibrated, trained) in text


def found_on_test_queries() -> list[list[dict]]:
    """Return what each seed's run found on the test queries, by task."""
    files = [RESULTS / f"demo-seed-{seed}.json" for seed in range(3)]
    return [json.loads(file.read_text(encoding="utf-8"))["test"] for file in files]


@pytest.mark.parametrize("task", ["name → document", "summary → rest"])
def test_the_tables_of_rankings(task):
    """BM25 does not depend on the seed, and has no deviation."""
    found = [
        part["rankings"] for run in found_on_test_queries() for part in run if part["task"] == task
    ]
    assert len(found) == 3
    table = rows("demo.md", f"| {task} | Recall@1 |")
    assert len(table) == len(found[0])
    for system, *cells in table:
        for cell, key in zip(cells, ("recall_1", "recall_10", "mrr_10"), strict=True):
            values = [rankings[system.strip("*")][key] for rankings in found]
            expected = f"{values[0]:.3f}" if len(set(values)) == 1 else spread(values, 3)
            assert cell.strip("*") == expected.replace("0.", ".")


def test_whose_active_dimensions():
    tests = found_on_test_queries()
    name, summary = (
        spread([test[task]["document_after"]["active"] for test in tests], 0) for task in (0, 1)
    )
    both = spread(column("targets.csv", "full", "active"), 1)
    shorter = spread(column("ablation.csv", "full", "active_document"), 0)
    found = [row[0] for row in rows("demo.md", "| active | of | steps |")]
    assert found[:4] == [name, summary, both, shorter]
    assert found[4] == "108"  # one run, not committed: the row "the default" of what was tried
    bm25 = [test["rankings"]["BM25, same subwords"] for test in tests[0]]
    recall, mrr = (
        " and ".join(f"{one[key]:.3f}".removeprefix("0") for one in bm25)
        for key in ("recall_10", "mrr_10")
    )
    text = " ".join((DOCS / "demo.md").read_text(encoding="utf-8").split())
    assert f"{recall} are Recall@10 of the test queries" in text
    assert f"MRR@10 of the validation queries (of the test queries: {mrr})" in text
