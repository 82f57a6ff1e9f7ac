"""The pages say what the committed results hold."""

import re
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks import summary
from benchmarks.table import read

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TRAINING = "forward+backward"
PEERS = (
    "eager",
    "torch.compile",
    "sentence-transformers",
    "pytorch-metric-learning",
    "info-nce-pytorch",
)


def table(page: str, beginning: str) -> list[list[str]]:
    """Return the cells of the table whose heading begins so, without the heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^{re.escape(beginning)}.*\n\|[-:| ]+\|\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in found.splitlines()]


def test_the_aims():
    runs = sorted(RESULTS.glob("aims-run-*.csv")) + sorted(RESULTS.glob("aims-info_nce-run-*.csv"))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for v in summary.judge(summary.merge([read(path) for path in runs])):
        said = v.measured + (" **missed**" if v.verdict == "missed" else "")
        cells.setdefault((v.aim, v.case, v.wanted), {})[v.allocator] = said
    expected = [
        [*key, found.get("default", "-"), found.get("warm", "-")] for key, found in cells.items()
    ]
    assert table("benchmarks.md", "| aim | case | wanted |") == expected


def test_the_peers():
    rows = {
        (row["loss"], row["case"], row["variant"]): row
        for row in read(RESULTS / "cpu-quick.csv")
        if row["pass"] == TRAINING
    }
    expected = []
    for loss, case in dict.fromkeys(key[:2] for key in rows):
        ours = rows[loss, case, "ours"]
        cells = []
        for peer in PEERS:
            row = rows.get((loss, case, peer))
            ratios = [
                f"{float(row[column]) / float(ours[column]):.2f}"
                for column in ("seconds", "peak_bytes")
                if row
            ]
            cells.append(", ".join(ratios))
        expected.append([loss, case, *cells])
    assert table("benchmarks.md", "| loss | case | eager |") == expected


def test_the_objective():
    rows = read(RESULTS / "objective.csv")
    found = table("benchmarks.md", "| activations | eager | one by one |")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    assert len(found) == len(cases)
    for case, (activations, *times, memory) in zip(cases, found, strict=True):
        own = {row["variant"]: row for row in rows if row["case"] == case}
        sizes = dict(re.findall(r"(\w)=(\d+)", case))
        assert activations == f"`[{sizes['B']}, {sizes['V']}]`, {case.split()[-1]}"
        for text, variant in zip(times, ("eager", "ours, one by one", "ours"), strict=True):
            seconds = float(own[variant]["seconds"])
            assert text == (f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s")
        mib = [
            f"{float(own[variant]['peak_bytes_without_gradients']) / 2**20:.3g}"
            for variant in ("eager", "ours")
        ]
        assert memory == ", ".join(mib) + " MiB"


def test_growth_shows_what_the_command_wrote():
    page = (ROOT / "docs" / "growth.md").read_text(encoding="utf-8")
    written = (RESULTS / "growth.md").read_text(encoding="utf-8")
    assert [block for block in written.strip().split("\n\n") if block not in page] == []
    assert f"commit {read(RESULTS / 'growth.csv')[0]['git_commit']}," in written


def test_large_batches_shows_what_caching_measured():
    expected = [
        [
            row["pairs"],
            row["mini_batch_size"],
            f"{int(row['peak_bytes']) / 2**20:.0f}",
            f"{float(row['cpu_seconds']):.1f}",
        ]
        for row in read(RESULTS / "caching.csv")
    ]
    assert table("large_batches.md", "| pairs | mini-batch |") == expected
