"""List the translated pages of the docs that are out of date: ``python -m tools.translations``.

The front matter of a translation names its English page and that page's checksum when it was
translated:

    translation_of: losses/info_nce.md
    source_sha256: 720b83...

When the English page changes, the checksums differ. Update the translation, then write the new one
with ``python -m tools.translations --accept PAGE ...``. Formulas and longer code are included from
the English page, so they are never out of date; a test compares the `structure` of the two pages.
"""

import argparse
import hashlib
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LANGUAGES = ("ko", "ja")
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
INCLUDE = re.compile(
    r'^(?P<indent>[ \t]*)--8<-- "(?P<path>[^":]+)(?::(?P<section>[\w-]+))?"[ \t]*$'
)
MARKER = re.compile(r"--8<-- \[(?P<end>start|end):\s*(?P<section>[\w-]+)\]")
FENCE = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w-]*)")


def pages() -> list[Path]:
    """Return the translated pages."""
    return sorted(page for language in LANGUAGES for page in DOCS.glob(f"{language}/**/*.md"))


def front_matter(text: str) -> dict[str, str]:
    """Return the keys and values of a page's front matter."""
    found = FRONT_MATTER.match(text)
    lines = found[1].splitlines() if found else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def body(text: str) -> str:
    """Return a page without its front matter."""
    return FRONT_MATTER.sub("", text, count=1)


def original(page: Path) -> Path:
    """Return the English page.

    Raises:
        ValueError: if the page names none, or a missing one.
    """
    name = front_matter(page.read_text(encoding="utf-8")).get("translation_of", "")
    if not name or not (DOCS / name).is_file():
        raise ValueError(f"{page}: expected a page of docs/ in translation_of, got {name!r}")
    return DOCS / name


def checksum(page: Path) -> str:
    """Return the checksum of a page's bytes."""
    return hashlib.sha256(page.read_bytes()).hexdigest()


def behind(page: Path) -> bool:
    """Return whether the English page has changed since."""
    stated = front_matter(page.read_text(encoding="utf-8")).get("source_sha256")
    return stated != checksum(original(page))


def accept(page: Path) -> None:
    """Write the English page's present checksum into the front matter."""
    line = f"source_sha256: {checksum(original(page))}"
    text = page.read_text(encoding="utf-8")
    head, rest = FRONT_MATTER.match(text), body(text)
    assert head is not None  # `original` has read it
    kept = [one for one in head[1].splitlines() if not one.startswith("source_sha256:")]
    page.write_text("\n".join(["---", *kept, line, "---", ""]) + rest, encoding="utf-8")


def expand(text: str) -> str:
    """Return a page's text with its snippets expanded, and without the marks of sections.

    Raises:
        ValueError: for a missing file or section.
    """
    lines: list[str] = []
    for line in text.splitlines():
        found = INCLUDE.match(line)
        if found:
            taken = expand(_section(found["path"], found["section"]))
            lines += [found["indent"] + each for each in taken.splitlines()]
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
    taken: list[str] = []
    inside = ended = False
    for line in text.splitlines():
        mark = MARKER.search(line)
        if mark and mark["section"] == section:
            inside = mark["end"] == "start"
            ended |= not inside
        elif inside:
            taken.append(line)
    if not ended:
        raise ValueError(f"expected a section {section} in {path}, got none")
    return textwrap.dedent("\n".join(taken)) + "\n"


@dataclass(frozen=True)
class Structure:
    """The parts that must be equal in a page and its translation."""

    levels: list[int]  # levels of the headings, in order
    table_rows: list[int]  # number of rows of each table
    code: list[tuple[str, str]]  # language and text of each block
    figures: list[str]
    display: list[str]  # display formulas, without whitespace
    inline: list[str]
    ids: list[str]  # explicit ids of the headings; "" for a heading without one


def structure(text: str) -> Structure:
    """Return the structure of an expanded page."""
    prose, code = split_code(body(text))
    headings = re.findall(r"^[ \t]*(#{1,6}) .*?(?:\{\s*#([\w-]+)[^}]*\})?[ \t]*$", prose, re.M)
    tables = re.findall(r"(?:^[ \t]*\|.*\n)+", prose, re.MULTILINE)
    display = re.findall(r"\$\$(.+?)\$\$", prose, re.DOTALL)
    rest = re.sub(r"`[^`\n]*`", "", re.sub(r"\$\$.+?\$\$", "", prose, flags=re.DOTALL))
    return Structure(
        levels=[len(marks) for marks, _ in headings],
        table_rows=[len(table.splitlines()) for table in tables],
        code=code,
        figures=[
            Path(target.partition("#")[0]).name + "#" + target.partition("#")[2]
            for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", prose)
        ]
        + re.findall(r'data-plot="([^"]+)"', prose),
        display=["".join(formula.split()) for formula in display],
        inline=["".join(formula.split()) for formula in re.findall(r"\$([^$\n]+)\$", rest)],
        ids=[name for _, name in headings],
    )


def split_code(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return a page without its fenced blocks, and the blocks (language, text)."""
    prose: list[str] = []
    blocks: list[tuple[str, str]] = []
    fence = language = ""
    inside: list[str] = []
    for line in text.splitlines():
        if fence:
            if line.strip() == fence:
                indent = min((len(x) - len(x.lstrip()) for x in inside if x.strip()), default=0)
                blocks.append((language, "".join(f"{each[indent:]}\n" for each in inside)))
                fence = ""
            else:
                inside.append(line)
            continue
        found = FENCE.match(line)
        if found:
            fence, language, inside = found["fence"], found["language"], []
        else:
            prose.append(line)
    return "\n".join(prose) + "\n", blocks


def main(arguments: Iterable[str] | None = None) -> int:
    """Print the pages that are out of date; return 1 if there are any."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.translations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--accept",
        nargs="+",
        type=Path,
        default=[],
        metavar="PAGE",
        help="mark these translations as up to date with their English pages",
    )
    options = parser.parse_args(None if arguments is None else list(arguments))
    for page in options.accept:
        try:
            accept(page.resolve())
        except (OSError, ValueError) as error:
            parser.error(str(error))
    late = [page for page in pages() if behind(page)]
    for page in late:
        english = original(page).relative_to(ROOT)
        print(f"{page.relative_to(ROOT)}: {english} has changed since")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
