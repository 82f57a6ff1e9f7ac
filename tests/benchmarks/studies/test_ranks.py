"""The study over ranks runs, and the docs show its committed results."""

from pathlib import Path

from benchmarks.run.table import read
from benchmarks.studies import ranks

ROOT = Path(__file__).resolve().parents[3]


def test_it_measures_every_variant_on_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # no name look-up, which some sandboxes lack
    output = tmp_path / "ranks.csv"
    words = ["--tiny", "--ranks", "2", "--rounds", "2", "--output", str(output)]
    assert ranks.main(words) == 0
    rows = read(output)
    assert [row["variant"] for row in rows] == [*ranks.VARIANTS]
    for row in rows:
        assert float(row["seconds"]) > 0
        assert int(row["peak_bytes"]) >= int(row["peak_bytes_without_gradients"]) > 0
        assert row["device"]


def test_the_docs_show_the_committed_results_of_four_ranks():
    table = ranks.report(read(ROOT / "benchmarks" / "results" / "ranks.csv"))
    rows = [row.removeprefix("| 4 ") for row in table.splitlines() if row.startswith("| 4 |")]
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    shown = [row for row in page.splitlines() if row.startswith(("| 1024 x 256", "| 64 x 30522"))]
    # The docs may still show a variant that this study no longer has.
    shown = [row for row in shown if any(f"`{name}`" in row for name in ranks.VARIANTS)]
    assert len(shown) >= 4
    assert [row for row in shown if row not in rows] == []
