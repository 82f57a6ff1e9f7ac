"""How the docs' pages are read: front matter, included sections, code blocks."""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LANGUAGES = ("ko", "ja")
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
INCLUDE = re.compile(
    r'^(?P<indent>[ \t]*)--8<-- "(?P<path>[^":]+)(?::(?P<section>[\w-]+))?"[ \t]*$'
)
MARKER = re.compile(r"--8<-- \[(?:start|end):\s*[\w-]+\]")
FENCE = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w-]*)")


def front_matter(text: str) -> dict[str, str]:
    """Return the keys and values of a page's front matter."""
    match = FRONT_MATTER.match(text)
    lines = match[1].splitlines() if match else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def body(text: str) -> str:
    """Return a page without its front matter."""
    return FRONT_MATTER.sub("", text, count=1)


def expand(text: str) -> str:
    """Return a page's text with its snippets expanded, and without the marks of sections.

    Raises:
        ValueError: for a missing file or section.
    """
    lines: list[str] = []
    for line in text.splitlines():
        include = INCLUDE.match(line)
        if include:
            section = expand(_section(include["path"], include["section"]))
            lines += [include["indent"] + each for each in section.splitlines()]
        elif not MARKER.search(line):
            lines.append(line)
    return "\n".join(lines) + "\n"


def _section(path: str, section: str | None) -> str:
    file = next((base / path for base in (DOCS, ROOT) if (base / path).is_file()), None)
    if file is None:
        raise ValueError(f"expected a file {path} to include, got none")
    text = file.read_text(encoding="utf-8")
    if section is None:
        return text
    mark = rf"--8<-- \[{{}}:\s*{section}\][^\n]*\n"
    pattern = mark.format("start") + r"(.*?)^[^\n]*" + mark.format("end")
    found = re.search(pattern, text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"expected a section {section} in {path}, got none")
    return textwrap.dedent(found[1])


def split_code(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return a page without its fenced blocks, and the blocks (language, text)."""
    prose: list[str] = []
    blocks: list[tuple[str, str]] = []
    fence = language = ""
    inside: list[str] = []
    for line in text.splitlines():
        if fence:
            if line.strip() == fence:
                blocks.append((language, textwrap.dedent("\n".join([*inside, ""]))))
                fence = ""
            else:
                inside.append(line)
            continue
        opening = FENCE.match(line)
        if opening:
            fence, language, inside = opening["fence"], opening["language"], []
        else:
            prose.append(line)
    return "\n".join(prose) + "\n", blocks
