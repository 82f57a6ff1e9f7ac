"""The README as a package index shows it, and tables that are written from the results."""

import importlib
import re
import sys
import types
from pathlib import Path

import pytest

from tools import tables

ROOT = Path(__file__).resolve().parents[2]


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
    assert text.count("/badge.svg)](") == 2
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 10
    for target in targets:
        if found := re.fullmatch(r"https://localhost/a/b/blob/v1\.2/(.+)", target):
            assert (ROOT / found[1]).exists()
        elif found := re.fullmatch(r"https://localhost/site/1\.2/([^#]+)(#.*)?", target):
            page = found[1].removesuffix("/")
            places = [ROOT / "docs" / name for name in (page, f"{page}.md", f"{page}/index.md")]
            assert any(place.is_file() for place in places), target
        else:
            assert "/actions" in target or target.startswith(("https://localhost/site", "https://"))


def test_links_with_an_address_and_within_a_page_stay_as_they_are(metadata):
    text = "[a](https://localhost/x) [b](#here) [c](docs/d/index.md#e) ![p](docs/q.svg) [l](L)"
    assert metadata.with_addresses(text, "1", "https://localhost/r", "https://localhost/s") == (
        "[a](https://localhost/x) [b](#here) [c](https://localhost/s/1/d/#e) "
        "![p](https://localhost/s/1/q.svg) [l](https://localhost/r/blob/v1/L)"
    )
    for wrong in ('[a](docs/b.md "c")', "[![a](docs/b.svg)](docs/c.md)"):
        with pytest.raises(ValueError, match="without titles or pictures"):
            metadata.with_addresses(wrong, "1")


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_table_is_made_of_the_results_and_stands_on_a_page(name):
    head, _, *rows = tables.TABLES[name]().splitlines()
    assert len(rows) >= 2
    assert {row.count(" | ") for row in rows} == {head.count(" | ")}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any(f"<!-- table: {name} -->" in page.read_text(encoding="utf-8") for page in pages)


def test_a_page_is_filled_between_its_marks(monkeypatch):
    monkeypatch.setitem(tables.TABLES, "one", lambda: "| a |\n|---|\n| 1 |")
    page = "before\n\n<!-- table: one -->\n\nold\n\n<!-- end of table -->\n\nafter\n"
    filled = tables.filled(page)
    assert filled == page.replace("old", "| a |\n|---|\n| 1 |")
    assert tables.filled(filled) == filled
    with pytest.raises(KeyError, match="two"):
        tables.filled(page.replace("one", "two"))


def test_the_home_page_has_the_text_of_the_readme():
    readme, home = ((ROOT / n).read_text(encoding="utf-8") for n in ("README.md", "docs/index.md"))
    assert tables.home(readme) in home
