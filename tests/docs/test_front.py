"""The README as a package index shows it, and tables that are written from the results."""

import importlib
import re
import sys
import types
from pathlib import Path

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


def test_the_tables_on_pages_are_those_of_the_results():
    """``python -m tools.tables`` writes them."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {str(page): page.read_text(encoding="utf-8") for page in pages}
    assert [name for name, text in texts.items() if tables.filled(text) != text] == []
    whole = "".join(texts.values())
    assert [name for name in tables.TABLES if f"<!-- table: {name} -->" not in whole] == []


def test_the_home_page_has_the_text_of_the_readme():
    readme, home = ((ROOT / n).read_text(encoding="utf-8") for n in ("README.md", "docs/index.md"))
    assert tables.home(readme) in home
