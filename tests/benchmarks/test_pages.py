"""The pages and tables say what the committed results hold."""

import re
from pathlib import Path

import pytest

pytest.importorskip("rich")

from benchmarks.report import pages
from benchmarks.run.table import RESULTS, read
from benchmarks.studies import growth

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("make", "page"),
    [
        (pages.memory, pages.PAGE),
        (pages.aims, pages.AIMS),
    ],
)
def test_benchmarks_shows_what_was_measured(make, page):
    table = make()
    assert table.count("\n") >= 4
    assert f"\n{table}\n\n" in page.read_text(encoding="utf-8"), (
        "python -m benchmarks.report.pages rewrites the tables"
    )


def test_tables_are_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = pages.PAGE.read_text(encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(before.replace("| flops |", "| another |"), encoding="utf-8")
    monkeypatch.setattr(pages, "PAGE", page)
    assert pages.main() == 0
    assert page.read_text(encoding="utf-8") == before
    page.write_text("no table", encoding="utf-8")
    with pytest.raises(SystemExit, match="has no table under"):
        pages.main()


def test_the_exponents_of_growth_are_those_of_its_points():
    rows = read(RESULTS / "growth.csv")
    written = (RESULTS / "growth.md").read_text(encoding="utf-8")
    assert f"\n{growth.exponents_table(rows)}\n\n" in written
    assert f"commit {rows[0]['git_commit']}," in written


def test_large_batches_shows_the_results_of_caching():
    text = (ROOT / "docs" / "large_batches.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| pairs \| mini-batch \|.*\n\|[-:| ]+\|\n((?:\|.*\n)+)", text, re.M)
    shown = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()]
    expected = [
        [
            row["pairs"],
            row["mini_batch_size"],
            f"{int(row['peak_bytes']) / 2**20:.0f}",
            f"{float(row['cpu_seconds']):.1f}",
        ]
        for row in read(RESULTS / "caching.csv")
    ]
    assert shown == expected
