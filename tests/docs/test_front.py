"""README and front pages: their figures are those of the committed results, their links lead on."""

import csv
import importlib
import re
import sys
import types
from pathlib import Path
from statistics import mean, stdev

import pytest

from tools import front

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "aims-run-1.csv"
PAGES = ["README.md", "docs/index.md", "docs/ko/index.md", "docs/ja/index.md"]
PEER = "sentence-transformers"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured(loss: str, case: str, variant: str) -> tuple[float, float]:
    """Return seconds and peak MiB of one variant, forward and backward."""
    (row,) = [
        row
        for row in rows(RESULTS)
        if (row["loss"], row["case"], row["variant"]) == (loss, case, variant)
        and row["pass"] == "forward+backward"
    ]
    return float(row["seconds"]), float(row["peak_bytes"]) / 2**20


def figures() -> list[str]:
    """Return what the pages say, made from the results."""
    head = "splade_head", front.CASE
    flops = "flops", "B=256 V=30522 5%"
    info_nce = "info_nce", "B=1024 V=30522 0.5%"
    nws = "nws", "B=64 K=64 Q=8192 F=128 L=512"
    active = [
        float(row["active"])
        for row in rows(ROOT / "docs/results/targets-250.csv")
        if row["target"] == "64"
    ]
    seconds = {case: measured(*case, "ours")[0] for case in (head, info_nce, nws)}
    peaks = {case: measured(*case, "ours")[1] for case in (head, flops, info_nce)}
    return [
        f"{peaks[head]:.0f} MiB",
        f"{seconds[head]:.2f}",
        f"{measured(*head, PEER)[1]:,.0f} MiB",
        f"{measured(*head, PEER)[0]:.1f}",
        f"{peaks[flops]:.1f} MiB",
        f"{measured(*flops, PEER)[1]:.0f} MiB",
        f"{1e3 * seconds[info_nce]:.0f} ms",
        f"{peaks[info_nce]:.0f} MiB",
        f"{measured(*info_nce, PEER)[0]:.1f}",
        f"{measured(*info_nce, PEER)[1]:.0f} MiB",
        f"{1e3 * seconds[nws]:.0f} ms",
        f"{measured(*nws, 'eager')[0]:.1f}",
        f"{mean(active):.1f} ± {stdev(active):.1f}",
    ]


@pytest.mark.parametrize("page", PAGES)
def test_the_figures_are_those_of_the_results(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [figure for figure in figures() if figure not in text] == []


def test_the_sparsity_is_that_of_the_page_on_targets():
    text = (ROOT / "docs/target_sparsity.md").read_text(encoding="utf-8")
    assert figures()[-1] in text


def test_the_picture_is_drawn_from_the_results():
    kept = (front.ASSETS / "front.svg").read_text(encoding="utf-8")
    assert kept == front.draw(), "python -m tools.front draws it"


@pytest.fixture
def metadata(monkeypatch):
    """The hook of the build, without Hatch, which only a build has."""
    stub = types.ModuleType("hatchling.metadata.plugin.interface")
    stub.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.delitem(sys.modules, "tools.metadata", raising=False)
    return importlib.import_module("tools.metadata")


def test_the_description_of_the_package_has_the_repositorys_address(metadata, monkeypatch):
    hook = metadata.Metadata()
    hook.root = str(ROOT)
    plain, addressed = {}, {}
    monkeypatch.delenv("REPO_URL", raising=False)
    monkeypatch.delenv("SITE_URL", raising=False)
    hook.update(plain)
    assert plain["readme"]["text"] == (ROOT / "README.md").read_text(encoding="utf-8")
    assert plain["urls"] == {}

    monkeypatch.setenv("REPO_URL", "https://localhost/someone/name/")
    hook.update(addressed)
    assert addressed["urls"] == {"Repository": "https://localhost/someone/name"}
    targets = re.findall(r"\]\(([^)\s]+)\)", addressed["readme"]["text"])
    assert len(targets) > 20
    for target in targets:
        file = re.fullmatch(
            r"https://localhost/someone/name/(?:blob|raw)/main/([^#]+)(#.+)?", target
        )
        assert file, target
        assert (ROOT / file[1]).exists(), target


def test_links_with_an_address_and_within_a_page_stay_as_they_are(metadata):
    text = "[a](https://localhost/x) [b](#here) [c](d.md#e) ![p](q.svg)"
    assert metadata.with_addresses(text, "https://localhost/r") == (
        "[a](https://localhost/x) [b](#here) "
        "[c](https://localhost/r/blob/main/d.md#e) ![p](https://localhost/r/raw/main/q.svg)"
    )
