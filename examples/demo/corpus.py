"""Pairs of query and document, split so that no test text occurs in training."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

HELD_OUT = 600
MINIMUM_PAIRS = 100


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


def read_pairs(path: Path) -> Corpus:
    """Read the user's own pairs from lines of ``query<TAB>document``.

    Lines that share a query or a document form one group. A tenth of the pairs, at most 600, is
    held out for validation, and another tenth for the test. A file that does not serve ends the
    program with a message.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"error: cannot read {path} as UTF-8 text: {error}") from error
    pairs: dict[tuple[str, str], None] = {}
    parents: dict[str, str] = {}  # a union-find whose roots are the smallest members of the groups

    def root(item: str) -> str:
        while (parent := parents.setdefault(item, item)) != item:
            parents[item] = parents[parent]  # keeps chains short
            item = parent
        return item

    for number, line in enumerate(lines, start=1):
        fields = [" ".join(field.split()) for field in line.split("\t")]
        if not any(fields):
            continue
        if len(fields) != 2 or not all(any(map(str.isalnum, field)) for field in fields):
            raise SystemExit(
                f"error: expected a query, one tab and a document in line {number} of {path}, each "
                f"with a letter or a digit, got {line[:60]!r}"
            )
        query, document = fields
        low, high = sorted(map(root, (f"query {query.lower()}", f"document {document.lower()}")))
        parents[high] = low
        pairs[query, document] = None
    rows = [
        Row(query, root(f"query {query.lower()}"), (Pair(0, query, document),), document)
        for query, document in pairs
    ]
    source = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12]}
    corpus = split(rows, ("query → document",), source, held_out=min(HELD_OUT, len(pairs) // 10))
    enough = len(corpus.train) >= MINIMUM_PAIRS // 2
    if len(pairs) < MINIMUM_PAIRS or len(corpus.validation) < MINIMUM_PAIRS // 20 or not enough:
        raise SystemExit(
            f"error: expected at least {MINIMUM_PAIRS} different pairs in {path}, of which most "
            f"share neither query nor document, got {len(pairs)} pairs, {len(corpus.train)} of "
            "them for training; a useful retriever needs a few thousand"
        )
    return corpus
