"""Filters for the texts of all corpora: length, prose, duplicates."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

LONGEST_TEXT = 160  # words; no model here reads more
NEAR_DUPLICATE = 0.35  # share of common three-word runs
COMMON_RUN = 60  # a run in so many texts tells nothing about duplicates

Entry = tuple[str, str, str]


def without_name(text: str, name: str) -> str:
    """Remove a name from a text, in upper or lower case."""
    own = rf"(?<!\w){re.escape(name)}(?!\w)"
    return " ".join(re.sub(own, " ", text, flags=re.IGNORECASE).split())


def cut(text: str) -> str:
    """Return the first words of a text."""
    return " ".join(text.split()[:LONGEST_TEXT])


def is_prose(text: str) -> bool:
    """Whether at least three quarters of the visible characters are letters."""
    visible = text.replace(" ", "")
    return sum(map(str.isalpha, visible)) >= 0.75 * len(visible)


def unique(entries: list[Entry]) -> Iterator[Entry]:
    """Yield the first of entries with the same opening or mostly the same three-word runs."""
    first: dict[tuple[str, ...], tuple[Entry, set[tuple[str, ...]]]] = {}
    for entry in entries:
        words = re.findall(r"\w+", f"{entry[1]} {entry[2]}".lower())[:LONGEST_TEXT]
        runs = set(zip(words, words[1:], words[2:], strict=False))
        first.setdefault(tuple(words[:12]), (entry, runs))
    spread = Counter(run for _, runs in first.values() for run in runs)
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    sizes: list[int] = []
    for entry, runs in first.values():
        rare = (run for run in runs if spread[run] <= COMMON_RUN)
        shared = Counter(holder for run in rare for holder in holders[run])
        if any(
            common >= NEAR_DUPLICATE * (len(runs) + sizes[holder] - common)
            for holder, common in shared.items()
        ):
            continue
        for run in runs:
            holders[run].append(len(sizes))
        sizes.append(len(runs))
        yield entry
