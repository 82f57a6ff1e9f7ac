"""The pages say what the committed results of the demo hold."""

import functools
import json
import re
from pathlib import Path
from statistics import mean, median, stdev

import pytest

from benchmarks.run.table import read
from benchmarks.studies.against_sentence_transformers import summary

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
    return read(RESULTS / file)


def column(file: str, variant: str, name: str) -> list[float]:
    values = [float(run[name]) for run in runs(file) if run["variant"] == variant]
    assert len(values) == 3
    return values


def test_what_is_said_of_the_battery():
    text = " ".join((DOCS / "target_sparsity.md").read_text(encoding="utf-8").split())
    runs, former = (
        [run for run in read(RESULTS / "battery.csv") if run["controller"] == way]
        for way in ("controller", "former")
    )

    def near(runs: list[dict[str, str]]) -> list[int]:
        """Return the number of runs that can end near their target, and of those that do."""
        apart = [run for run in runs if not run["name"].startswith(("bert dot", "decoder"))]
        ends = [float(run["training"]) / float(run["target"]) for run in apart]
        return [len(apart), *(sum(0.95 <= end <= most for end in ends) for most in (1.5, 1.25))]

    assert f"on {len(runs)} short trainings" in text
    assert "Of the other {} runs, {} end between 0.95 and 1.5".format(*near(runs)) in text
    assert f"{near(runs)[2]} of them between 0.95 and 1.25" in text
    assert "With the former controller {1} and {2} of {0}".format(*near(former)) in text
    misses = [
        abs(float(run["calibrated"]) / float(run["wanted"]) - 1)
        for run in runs
        if run["calibrated"]
    ]
    assert f"by {median(misses):.1%} in the median of {len(misses)} runs" in text
    assert f"by less than 10% in {sum(miss < 0.1 for miss in misses)}" in text
    assert f"the largest miss is {max(misses):.0%}" in text


def test_what_is_said_of_temperature_2():
    text = " ".join((DOCS / "against_sentence_transformers.md").read_text(encoding="utf-8").split())
    found: dict[str, dict[str, list[float]]] = {}
    for run in read(RESULTS / "temperature.csv"):
        row = found.setdefault(run["row"].removeprefix("RECOMMENDED, target 64"), {})
        row.setdefault(run["collection"], []).append(float(run["ndcg_10"]))
    changes = [mean(row) - mean(found[""][n]) for n, row in found[", temperature 2"].items()]
    first, *middle, last = (f"{x:+.3f}".replace("0.", ".") for x in changes)
    assert f"{first}, {', '.join(middle)} and {last}" in text


def test_the_tables_beside_sentence_transformers():
    text = (DOCS / "against_sentence_transformers.md").read_text(encoding="utf-8")
    assert summary(runs("against_sentence_transformers.csv")) in text


def demo(preset: str, *names: str) -> list[list[dict]]:
    """Return what runs of the demo found on the test queries, by task."""
    found = [json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names]
    assert {run["settings"]["preset"]["name"] for run in found} == {preset}
    return [run["test"] for run in found]


RECOMMENDED = "RECOMMENDED", "demo-seed-0", "demo-seed-1", "demo-seed-2"


def test_the_table_of_rankings():
    *table, cosine = rows("demo.md", "| | name R@1 |")
    trained = demo(*RECOMMENDED)
    assert [row[0].strip("*") for row in table] == list(trained[0][0]["rankings"])
    assert cosine[0] == "`COSINE`, seed 0"
    measured = [(row, row[0].strip("*"), trained) for row in table]
    measured.append((cosine, "this model", demo("COSINE", "demo-cosine-seed-0")))
    for (_, *cells), system, runs in measured:
        found = [
            mean(run[task]["rankings"][system][key] for run in runs)
            for task in (0, 1)
            for key in ("recall_1", "recall_10", "mrr_10")
        ]
        assert [cell.strip("*") for cell in cells] == [f"{one:.3f}"[1:] for one in found]


def test_the_table_of_dimensions():
    names = [name for name, _ in demo(*RECOMMENDED)]
    table = rows("demo.md", "| name → document | active |")
    sides = {"queries": "query_after", "documents": "document_after"}
    assert [row[0] for row in table] == list(sides)
    for (_, active, *shares), side in zip(table, sides.values(), strict=True):

        def found(key: str, side: str = side) -> float:
            return mean(name[side][key] for name in names)

        assert active == f"{found('active'):,.0f}"
        assert shares == [f"{found(key):.1%}" for key in ("stopwords", "rare", "own")]


def test_the_table_of_the_ablation():
    """The rows are in the order of the runs, and say the mean of three seeds."""
    variants = list(dict.fromkeys(run["variant"] for run in runs("ablation.csv")))
    variants = [one for one in variants if one == "full" or one.startswith("without ")]
    table = rows("demo.md", "| losses, 300 steps |")
    for (_, *cells), variant in zip(table, variants, strict=True):
        found = functools.partial(column, "ablation.csv", variant)
        expected = [spread(found(key), 3) for key in ("name_mrr_10", "summary_mrr_10")]
        counts, shares = ("active_query", "active_document"), ("stopwords", "query_rare", "own")
        expected += [f"{mean(found(key)):,.0f}" for key in counts]
        expected += [f"{mean(found(key)):.1%}" for key in shares]
        assert cells == expected, variant


@pytest.mark.parametrize("page", ["../README.md", "against_sentence_transformers.md"])
def test_the_table_of_public_collections(page):
    """Means over the seeds, of MED and of TIME."""
    measured = runs("collection.csv")
    table = rows(page, "| public collections |")
    assert len(table) >= 5
    for name, *cells in table:
        own = "BM25, same subwords" if name == "BM25" else name.replace("`", "")
        expected = []
        for key, form in (("ndcg_10", ".3f"), ("active_document", ".0f"), ("products", ".2f")):
            for collection in ("med", "time"):
                found = [
                    float(run[key])
                    for run in measured
                    if (run["collection"], run["row"]) == (collection, own)
                ]
                expected.append(f"{mean(found):{form}}".removeprefix("0" * (key == "ndcg_10")))
        assert cells == expected, name
