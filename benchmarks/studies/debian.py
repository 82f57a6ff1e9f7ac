"""Debian's packages as pairs: the title as query, the description as document.

Texts come from the lists that apt keeps on a Debian or Ubuntu machine; nothing is downloaded here.
Packages built from one source describe the same thing, so a source gives one row, and the releases
of a source (``gcc-11``, ``gcc-12``) count as one.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterable, Iterator

from examples.demo.corpus import Corpus, Pair, Row, split
from examples.demo.texts import cut, is_prose, unique, without_name

TASKS = ("title → description",)
SOURCES = 10_000  # the number of texts in the docstrings
TITLE_WORDS = range(3, 26)
MINIMUM_WORDS = 20
BOILERPLATE = 3  # a paragraph that so many sources share is boilerplate
UPDATE = "apt-get update -o Acquire::Languages=en"

_LANGUAGE = ("-o", "Acquire::Languages=en")  # container images set it to "none"
_SIDE_PACKAGE = re.compile(r"-(dev|devel|doc|docs|dbg|dbgsym|data|common|examples|tests?|l10n-.*)$")
_EMPTY_PACKAGE = re.compile(r"\btransitional\b|\bdummy package\b|\bmeta-?package\b", re.IGNORECASE)
_VERSION = re.compile(r"[-.]?\d[\d.]*(-.*)?$")
_ADDRESS = re.compile(r"(?:https?|ftp)://\S+|www\.\S+")

Package = tuple[str, str, str]  # name, source, and description as apt prints it


def load() -> Corpus:
    """Read apt's lists, clean, drop duplicates and split; the same lists give the same corpus."""
    return to_corpus(read_packages())


def to_corpus(packages: Iterable[Package]) -> Corpus:
    """Return the split rows of packages, with their number and a digest of all texts."""
    rows = to_rows(packages)
    texts = "\n".join(text for row in rows for text in (row.pairs[0].query, row.pairs[0].document))
    digest = hashlib.sha256(texts.encode()).hexdigest()[:12]
    return split(rows, TASKS, {"debian": f"{len(rows):,} packages, sha256 {digest}"})


def read_packages() -> Iterator[Package]:
    """Read all packages that apt knows, in the order of its lists."""
    sources = {
        record["Package"]: record.get("Source", record["Package"]).split()[0]
        for record in _records(_run("apt-cache", "dumpavail"))
    }
    named = ("indextargets", *_LANGUAGE, "--format", "$(FILENAME)", "Created-By: Translations")
    lists = _run("apt-get", *named).split()
    if not lists:
        raise SystemExit(
            "error: apt has no descriptions on this machine; run this as its administrator: "
            f"{UPDATE}"
        )
    for path in lists:
        for record in _records(_run("/usr/lib/apt/apt-helper", "cat-file", path)):
            name, description = record["Package"], record.get("Description-en")
            if description and name in sources:
                yield name, sources[name], description


def _run(*command: str) -> str:
    try:
        process = subprocess.run(command, capture_output=True, check=True)
    except FileNotFoundError as error:
        raise SystemExit(
            f"error: Debian's texts are in the lists of apt, and there is no {command[0]} on this "
            "machine: take a Debian or Ubuntu, or its image for containers"
        ) from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"error: {command[0]}: {error.stderr.decode().strip()}") from error
    return process.stdout.decode(errors="replace")


def _records(text: str) -> Iterator[dict[str, str]]:
    """Yield the paragraphs of a control file; continuation lines keep their first blank."""
    for paragraph in text.split("\n\n"):
        record: dict[str, str] = {}
        name = ""
        for line in paragraph.splitlines():
            if line[:1].isspace():
                record[name] = f"{record.get(name, '')}\n{line}"
            else:
                name, _, value = line.partition(":")
                record[name] = value.strip()
        if "Package" in record:
            yield record


def clean(description: str) -> tuple[str, list[str]]:
    """Return a description's title and its paragraphs, each on one line, without indented lists."""
    title, *lines = description.split("\n")
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == ".":
            paragraphs.append([])
        elif not line.startswith("  "):
            paragraphs[-1].append(line.strip())
    texts = (" ".join(_ADDRESS.sub(" ", " ".join(each)).split()) for each in paragraphs)
    return " ".join(title.split()), [text for text in texts if text]


def family(source: str) -> str:
    """Return a source's name without its release: the name of its group in a split."""
    return _VERSION.sub("", source) or source


def to_rows(packages: Iterable[Package]) -> list[Row]:
    """Return one row per family: that of its package with the plainest name, if it makes a pair.

    Empty packages that only name others are left out, and so are paragraphs that several sources
    share, titles already seen, and near duplicates of other descriptions.
    """
    cleaned = []
    holders: dict[str, set[str]] = {}
    for name, source, description in packages:
        group = family(source)
        if _EMPTY_PACKAGE.search(description):
            continue
        title, paragraphs = clean(description)
        for paragraph in paragraphs:
            holders.setdefault(paragraph, set()).add(group)
        plainness = bool(_SIDE_PACKAGE.search(name)), len(name), name
        cleaned.append((group, plainness, title, paragraphs))
    candidates: dict[str, tuple[str, str, str]] = {}
    titles = set()
    for group, (*_, name), title, paragraphs in sorted(cleaned):
        own = [text for text in paragraphs if len(holders[text]) < BOILERPLATE]
        body = cut(without_name(" ".join(own), title))
        fits = len(title.split()) in TITLE_WORDS and len(body.split()) >= MINIMUM_WORDS
        if group in candidates or title.lower() in titles or not fits or not is_prose(body):
            continue
        titles.add(title.lower())
        candidates[group] = name, title, body
    chosen = sorted(candidates, key=lambda group: hashlib.md5(group.encode()).hexdigest())[:SOURCES]
    groups = {candidates[group][0]: group for group in chosen}
    return [
        Row(name, groups[name], (Pair(0, title, body),), cut(f"{title}. {body}"))
        for name, title, body in unique([candidates[group] for group in chosen])
    ]
