"""Filters for the texts of all corpora: length, prose, duplicates."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

LONGEST_TEXT = 160
NEAR_DUPLICATE = 0.35
_COMMON_SHINGLE = 60


def without_name(text: str, name: str) -> str:
    """Remove a name from a text, in upper or lower case.

    >>> without_name("Sum of array elements, see Sum.", "sum")
    'of array elements, see .'
    """
    own = rf"(?<!\w){re.escape(name)}(?!\w)"
    return " ".join(re.sub(own, " ", text, flags=re.IGNORECASE).split())


def cut(text: str) -> str:
    """Return the first words of a text; no model here reads more."""
    return " ".join(text.split()[:LONGEST_TEXT])


def is_prose(text: str) -> bool:
    """Whether at least three quarters of the visible characters are letters."""
    visible = text.replace(" ", "")
    return sum(map(str.isalpha, visible)) >= 0.75 * len(visible)


def unique(entries: list[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield the first of entries with the same opening or mostly the same three-word runs."""
    openings = set()
    shingled: list[tuple[tuple[str, str, str], frozenset[int]]] = []
    spread: Counter[int] = Counter()
    numbers: dict[tuple[str, ...], int] = {}
    for entry in entries:
        words = re.findall(r"\w+", f"{entry[1]} {entry[2]}".lower())[:LONGEST_TEXT]
        opening = tuple(words[:12])
        if opening in openings:
            continue
        openings.add(opening)
        runs = zip(words, words[1:], words[2:], strict=False)
        shingles = frozenset(numbers.setdefault(run, len(numbers)) for run in runs)
        spread.update(shingles)
        shingled.append((entry, shingles))
    holders: dict[int, list[int]] = defaultdict(list)
    sizes: list[int] = []
    for entry, shingles in shingled:
        shared = Counter(
            holder
            for shingle in shingles
            if spread[shingle] <= _COMMON_SHINGLE
            for holder in holders[shingle]
        )
        if any(
            common >= NEAR_DUPLICATE * (len(shingles) + sizes[holder] - common)
            for holder, common in shared.items()
        ):
            continue
        for shingle in shingles:
            holders[shingle].append(len(sizes))
        sizes.append(len(shingles))
        yield entry
