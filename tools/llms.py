"""Write llms.txt and llms-full.txt into a built site: ``python -m tools.llms build/site``.

llms.txt lists the English pages by section, with their descriptions. llms-full.txt holds their
Markdown, without the API and the changelog. Addresses begin with SITE_URL if it is set, and are
relative otherwise.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.markdown import DOCS, ROOT, body, expand, front_matter

NOT_ENGLISH = ("ko/", "ja/")
NOT_WHOLE = ("api/", "changelog.md")  # too long; llms.txt links to them
REFERENCE = re.compile(r"\[([^\]]+)\]\[(?:tests|sparse_losses)[\w.]*\]")


def settings() -> dict[str, Any]:
    """Return the settings in mkdocs.yml, without what its tags name."""
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    config: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), loader)
    return config


def pages(nav: list[Any], title: str = "") -> Iterator[tuple[str, str]]:
    """Yield title and path of every page below an entry of the navigation."""
    for entry in nav:
        if isinstance(entry, str):
            yield title, entry
        else:
            for name, below in entry.items():
                if isinstance(below, str):
                    yield name, below
                else:
                    yield from pages(below, name)


def text_of(path: str) -> str:
    """Return a page's Markdown with snippets expanded and references to tests and API as text."""
    text = (DOCS / path).read_text(encoding="utf-8")
    return REFERENCE.sub(r"\1", expand(body(text))).strip()


def description(path: str) -> str:
    """Return the description of a page."""
    return front_matter((DOCS / path).read_text(encoding="utf-8")).get("description", "")


def address(path: str) -> str:
    """Return the address of a page in the built site."""
    place = re.sub(r"(^|/)index\.md$", r"\1", path)
    place = place.removesuffix(".md") + "/" if place.endswith(".md") else place
    return os.environ.get("SITE_URL", "") + place or "."


def short(config: dict[str, Any]) -> str:
    """Return the text of llms.txt."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    first: list[str] = []
    for entry in config["nav"]:
        ((section, below),) = entry.items()
        entries = [("", below)] if isinstance(below, str) else list(pages(below, section))
        entries = [(title or section, path) for title, path in entries]
        if entries[0][1].startswith(NOT_ENGLISH):
            continue
        listed = [f"- [{title}]({address(path)}): {description(path)}" for title, path in entries]
        if isinstance(below, str):
            first += listed
        else:
            lines += ["", f"## {section}", "", *listed]
    lines[3:3] = ["", *first]
    return "\n".join(lines) + "\n"


def full(config: dict[str, Any]) -> str:
    """Return the text of llms-full.txt."""
    paths = [path for _, path in pages(config["nav"])]
    kept = [path for path in paths if not path.startswith(NOT_ENGLISH + NOT_WHOLE)]
    return "\n\n".join(f"<!-- {address(path)} -->\n\n{text_of(path)}" for path in kept) + "\n"


def main(arguments: list[str]) -> int:
    """Write both files."""
    (site,) = map(Path, arguments)
    config = settings()
    (site / "llms.txt").write_text(short(config), encoding="utf-8")
    (site / "llms-full.txt").write_text(full(config), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
