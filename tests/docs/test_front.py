"""README and front pages: their figures are those of the committed results, their links lead on."""

import importlib
import re
import sys
import types
from pathlib import Path
from statistics import median

import pytest

from benchmarks.run.table import read
from tools import front

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "aims-run-1.csv"
PAGES = ["README.md", "docs/index.md", "docs/ko/index.md", "docs/ja/index.md"]
PEER = "sentence-transformers"


def measured(loss: str, case: str, variant: str) -> tuple[float, float]:
    """Return seconds and peak MiB of one variant, forward and backward."""
    (row,) = [
        row
        for row in read(RESULTS)
        if (row["loss"], row["case"], row["variant"]) == (loss, case, variant)
    ]
    return float(row["seconds"]), float(row["peak_bytes"]) / 2**20


def figures() -> list[str]:
    """Return what the pages say, made from the results."""
    head = "splade_head", front.CASE
    flops = "flops", "B=256 V=30522 5%"
    info_nce = "info_nce", "B=1024 V=30522 0.5%"
    battery = read(ROOT / "docs/results/battery.csv")
    pruned = [row for row in battery if row["controller"] == "controller" and row["calibrated"]]
    misses = [abs(float(row["calibrated"]) / float(row["wanted"]) - 1) for row in pruned]
    seconds = {case: measured(*case, "ours")[0] for case in (head, info_nce)}
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
        f"{median(misses):.1%}",
    ]


@pytest.mark.parametrize("page", PAGES)
def test_the_figures_are_those_of_the_results(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [figure for figure in figures() if figure not in text] == []


def step_figures() -> list[str]:
    """Return the cells of a training step in sentence-transformers."""
    path = ROOT / "benchmarks" / "results" / "sentence-transformers-step.csv"
    return [
        f"{float(row['peak_mib']):,.0f} MiB, {float(row['seconds']):.1f} s"
        for row in read(path)
        if row["vocabulary"] == "250002"
    ]


@pytest.mark.parametrize("page", [*PAGES, "docs/sentence_transformers.md"])
def test_the_step_of_a_trainer_is_that_of_the_results(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(step_figures()) == 2
    assert [figure for figure in step_figures() if figure not in text] == []


def test_the_speed_of_encoding_is_that_of_the_results():
    text = (ROOT / "docs/encoder.md").read_text(encoding="utf-8")
    study = read(ROOT / "benchmarks" / "results" / "encode.csv")
    assert len(study) == 12
    for row in study:
        figure = f"{float(row['texts_per_second']):.0f} texts/s, {float(row['peak_mib']):,.0f} MiB"
        assert row["variant"] == "use_splade_head" or figure in text


@pytest.mark.parametrize("page", ["docs/benchmarks.md", *PAGES])
def test_the_training_step_on_a_gpu_is_that_of_the_results(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = read(ROOT / "benchmarks/results/cuda-training.csv")
    cells = {
        (row["pairs"], row["variant"]): f"{1e3 * float(row['seconds']):.0f} ms, "
        f"{float(row['peak_bytes']) / 2**20:,.0f} MiB"
        for row in rows
        if row["status"] == "ok"
    }
    assert len(cells) == 5
    shown = [cell for (pairs, _), cell in cells.items() if pairs == "32" or "docs/b" in page]
    assert [cell for cell in shown if cell not in text] == []


def test_what_is_said_of_a_loss_on_a_gpu_is_that_of_the_results():
    table = {
        (row["loss"], row["case"], row["variant"]): row
        for row in read(ROOT / "benchmarks/results/cuda-gpu.csv")
    }

    def ratio(loss: str, case: str, one: str, other: str, column: str = "seconds") -> str:
        return (
            f"{float(table[loss, case, one][column]) / float(table[loss, case, other][column]):.1f}"
        )

    text = " ".join((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").split())
    head = "splade_head", "B=32 S=256 V=250002 H=768 1% mask=67% bf16"
    large, small = "B=65536 D=768 bf16", "B=8192 D=768 bf16"
    kl = ratio("distillation", "B=4096 C=4096 KL fp32", "ours", "eager")
    assert f"KL of 4,096 lists {kl} times" in text
    of_large = ratio("info_nce", large, "ours", "eager")
    assert f"InfoNCE of 65,536 pairs in bf16 {of_large} times" in text
    assert f"N-pair of 8,192 pairs {ratio('n_pair', small, 'ours', 'eager')} times" in text
    assert f"takes {ratio('info_nce', small, 'ours', 'eager')} times as long" in text
    assert f"sentence-transformers {ratio('info_nce', small, PEER, 'eager')} times" in text
    ours, plain = (
        float(table["info_nce", large, name]["peak_bytes"]) / 2**20 for name in ("ours", "eager")
    )
    assert f"{ours:,.0f} MiB instead of {plain:,.0f}" in text
    text = (ROOT / "docs/head.md").read_text(encoding="utf-8")
    for name in ("ours", PEER):
        row = table[*head, name]
        assert (
            f"{1e3 * float(row['seconds']):.0f} ms and {float(row['peak_bytes']) / 2**20:,.0f}"
            in text
        )


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_what_is_said_of_a_dense_head_is_measured(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for active in ("0.5%", "50%"):
        case = "splade_head", f"B=8 S=128 V=30522 H=768 {active}"
        ratio = measured(*case, PEER)[0] / measured(*case, "ours")[0]
        assert f"{ratio:.1f} times" in text


@pytest.mark.parametrize("name", front.PICTURES)
def test_the_pictures_are_drawn_from_the_results(name):
    kept = (front.ASSETS / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == front.PICTURES[name](), "python -m tools.front draws it"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_what_a_weight_and_a_target_reach_is_that_of_the_results(page):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    for (*_, name, _), words in {
        front.GIVEN[0]: "A fixed weight of 0.1 ends between {:.0f} and {:.0f} active dimensions",
        front.GIVEN[1]: "with a teacher between {:.0f} and {:.0f}",
        front.GIVEN[2]: "a target of 64 between {:.0f} and {:.0f}",
        front.GIVEN[3]: "a target of 32 between {:.0f} and {:.0f}",
    }.items():
        reached = [x for runs in front.reached(name).values() for x in runs]
        assert words.format(min(reached), max(reached)) in text


@pytest.fixture
def metadata(monkeypatch):
    """The hook of the build, without Hatch, which only a build has."""
    stub = types.ModuleType("hatchling.metadata.plugin.interface")
    stub.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.delitem(sys.modules, "tools.metadata", raising=False)
    return importlib.import_module("tools.metadata")


def test_without_an_address_the_description_names_its_pages(metadata, monkeypatch):
    hook, project = metadata.Metadata(), {"version": "1.2"}
    hook.root = str(ROOT)
    monkeypatch.delenv("REPO_URL", raising=False)
    monkeypatch.delenv("SITE_URL", raising=False)
    hook.update(project)
    text = project["readme"]["text"]
    assert project["urls"] == {}
    assert "](" not in text.replace("](https://", "")
    assert "Troubleshooting" in text


def test_the_description_links_to_the_site_and_the_tag_of_its_version(metadata, monkeypatch):
    hook, project = metadata.Metadata(), {"version": "1.2"}
    hook.root = str(ROOT)
    monkeypatch.setenv("REPO_URL", "https://localhost/a/b/")
    monkeypatch.setenv("SITE_URL", "https://localhost/site/")
    hook.update(project)
    assert project["urls"] == {
        "Repository": "https://localhost/a/b",
        "Issues": "https://localhost/a/b/issues",
        "Changelog": "https://localhost/a/b/blob/v1.2/CHANGELOG.md",
        "Documentation": "https://localhost/site/1.2/",
    }
    text = project["readme"]["text"]
    assert "\ngit clone https://localhost/a/b sparse-losses" in text
    assert text.count("/badge.svg)](") == 2
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 10
    for target in targets:
        if found := re.fullmatch(r"https://localhost/a/b/blob/v1\.2/(.+)", target):
            assert (ROOT / found[1]).exists()
        elif found := re.fullmatch(r"https://localhost/site/1\.2/(.+)", target):
            page = found[1].removesuffix("/")
            places = [ROOT / "docs" / name for name in (page, f"{page}.md", f"{page}/index.md")]
            assert any(place.is_file() for place in places), target
        else:
            assert "/actions" in target or target == "https://localhost/site"


def test_links_with_an_address_and_within_a_page_stay_as_they_are(metadata):
    text = "[a](https://localhost/x) [b](#here) [c](docs/d/index.md#e) ![p](docs/q.svg) [l](L)"
    assert metadata.with_addresses(text, "1", "https://localhost/r", "https://localhost/s") == (
        "[a](https://localhost/x) [b](#here) [c](https://localhost/s/1/d/#e) "
        "![p](https://localhost/s/1/q.svg) [l](https://localhost/r/blob/v1/L)"
    )
    for wrong in ('[a](docs/b.md "c")', "[![a](docs/b.svg)](docs/c.md)"):
        with pytest.raises(ValueError, match="without titles or pictures"):
            metadata.with_addresses(wrong, "1")
