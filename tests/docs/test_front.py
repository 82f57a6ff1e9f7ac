"""The README as a package index shows it, and tables that are written from the results."""

import importlib
import re
import sys
import types
from pathlib import Path

import pytest

from tools import tables

ROOT = Path(__file__).resolve().parents[2]


def test_the_description_names_its_pages_or_links_to_those_of_its_version(monkeypatch):
    """The hook of the build, without Hatch, which only a build has."""
    hatch = types.SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", hatch)
    monkeypatch.delitem(sys.modules, "tools.metadata", raising=False)
    metadata = importlib.import_module("tools.metadata")
    hook, project = metadata.Metadata(), {"version": "1.2"}
    hook.root = str(ROOT)
    addresses = {"REPO_URL": "https://localhost/a/b/", "SITE_URL": "https://localhost/site/"}
    for variable in addresses:
        monkeypatch.delenv(variable, raising=False)
    hook.update(project)
    assert project["urls"] == {}
    assert "](" not in project["readme"]["text"].replace("](https://", "")
    for variable, address in addresses.items():
        monkeypatch.setenv(variable, address)
    hook.update(project)
    assert project["urls"] == {
        "Repository": "https://localhost/a/b",
        "Issues": "https://localhost/a/b/issues",
        "Changelog": "https://localhost/a/b/blob/v1.2/CHANGELOG.md",
        "Documentation": "https://localhost/site/1.2/",
    }
    targets = re.findall(r"\]\((https://localhost/[^)\s]+)\)", project["readme"]["text"])
    assert len(targets) > 10
    for target in targets:
        place = target.partition("#")[0].removesuffix("/")
        if found := re.fullmatch(r"https://localhost/a/b/blob/v1\.2/(.+)", place):
            assert (ROOT / found[1]).exists()
        else:
            page = place.removeprefix("https://localhost/site/1.2/")
            places = [ROOT / "docs" / name for name in (page, f"{page}.md", f"{page}/index.md")]
            assert any(place.is_file() for place in places), target


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


def test_the_home_page_has_the_text_of_the_readme():
    readme, home = ((ROOT / n).read_text(encoding="utf-8") for n in ("README.md", "docs/index.md"))
    assert tables.home(readme) in home
