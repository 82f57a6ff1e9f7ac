"""Write llms.txt and llms-full.txt into a built site: ``python -m tools.llms build/site``.

llms.txt lists the English pages by section. llms-full.txt holds their Markdown, without the API and
the changelog. Addresses begin with SITE_URL if it is set, and are relative otherwise.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.markdown import DOCS, LANGUAGES, ROOT, body, expand, front_matter

NOT_ENGLISH = tuple(f"{language}/" for language in LANGUAGES)
NOT_WHOLE = ("api/", "changelog.md")  # too long; llms.txt links to them
REFERENCE = re.compile(r"\[([^\]]+)\]\[(?:tests|sparse_losses)[\w.]*\]")


def settings() -> dict[str, Any]:
    """Return the settings in mkdocs.yml, without what its tags name."""
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    config: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), loader)
    return config


def pages(nav: list[Any]) -> Iterator[str]:
    """Yield the path of every page below an entry of the navigation."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from pages(below)


def line(path: str) -> str:
    """Return a page's title, address and description as an entry of a list."""
    text = (DOCS / path).read_text(encoding="utf-8")
    found = re.search(r"^# (.+)$", expand(text), re.MULTILINE)
    assert found, f"{path} has no title"
    return f"- [{found[1]}]({address(path)}): {front_matter(text).get('description', '')}"


def address(path: str) -> str:
    """Return the address of a page in the built site."""
    place = re.sub(r"(^|/)index\.md$", r"\1", path)
    place = place.removesuffix(".md") + "/" if place.endswith(".md") else place
    return os.environ.get("SITE_URL", "") + place or "."


def short(config: dict[str, Any]) -> str:
    """Return the text of llms.txt."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for entry in config["nav"]:
        ((section, below),) = entry.items()
        listed = [line(path) for path in pages(below) if not path.startswith(NOT_ENGLISH)]
        if listed:
            lines += ["", f"## {section}", "", *listed]
    return "\n".join(lines) + "\n"


def full(config: dict[str, Any]) -> str:
    """Return the text of llms-full.txt, with references to the API as text."""
    parts = []
    for path in pages(config["nav"]):
        if not path.startswith(NOT_ENGLISH + NOT_WHOLE):
            text = expand(body((DOCS / path).read_text(encoding="utf-8")))
            parts.append(f"<!-- {address(path)} -->\n\n" + REFERENCE.sub(r"\1", text).strip())
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    site, settings_ = Path(sys.argv[1]), settings()
    (site / "llms.txt").write_text(short(settings_), encoding="utf-8")
    (site / "llms-full.txt").write_text(full(settings_), encoding="utf-8")
