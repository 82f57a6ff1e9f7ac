"""Pairs of query and document, split so that no test text occurs in training."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterable

HELD_OUT = 600


@dataclasses.dataclass(frozen=True)
class Pair:
    """A query, the document that it should find, and the number of its task."""

    task: int
    query: str
    document: str


@dataclasses.dataclass(frozen=True)
class Row:
    """An object to be found, with at most one pair for each task.

    Rows of one group (such as methods of the same name) are always on the same side of a split.
    ``text`` is indexed for the user's questions.
    """

    title: str
    group: str
    pairs: tuple[Pair, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Rows for training, validation and test, and the versions of their sources.

    Every validation and test row has one pair for each task.
    """

    tasks: tuple[str, ...]
    train: list[Row]
    validation: list[Row]
    test: list[Row]
    sources: dict[str, str]

    @property
    def rows(self) -> list[Row]:
        """All rows, which are indexed for the user's questions."""
        return self.train + self.validation + self.test


def pair_texts(rows: Iterable[Row], task: int) -> tuple[list[str], list[str]]:
    """Return the queries and documents of one task."""
    pairs = [pair for row in rows for pair in row.pairs if pair.task == task]
    return [pair.query for pair in pairs], [pair.document for pair in pairs]


def split(
    rows: Iterable[Row], tasks: tuple[str, ...], sources: dict[str, str], held_out: int = HELD_OUT
) -> Corpus:
    """Split whole groups into test, validation and training rows, in the order of their md5.

    A held-out set takes one complete row of a group and drops the others, so that every query has
    one right document. The split depends only on names, not on a seed.
    """
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    corpus = Corpus(tasks, [], [], [], sources)
    for group in sorted(groups, key=lambda name: hashlib.md5(name.encode()).hexdigest()):
        complete = [row for row in groups[group] if len(row.pairs) == len(tasks)]
        if complete and len(corpus.test) < held_out:
            corpus.test.append(complete[0])
        elif complete and len(corpus.validation) < held_out:
            corpus.validation.append(complete[0])
        else:
            corpus.train.extend(groups[group])
    return corpus
