"""Pairs of query and document, split so that no test text occurs in training."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from sparse_losses.demo.options import UserError

HELD_OUT = 600
MINIMUM_PAIRS = 100


@dataclasses.dataclass(frozen=True)
class Pair:
    """A query, the document that answers it, and the number of its task."""

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
    one right answer. The split depends only on names, not on a seed.
    """
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    train: list[Row] = []
    test: list[Row] = []
    validation: list[Row] = []
    for group in sorted(groups, key=lambda name: hashlib.md5(name.encode()).hexdigest()):
        complete = [row for row in groups[group] if len(row.pairs) == len(tasks)]
        if complete and len(test) < held_out:
            test.append(complete[0])
        elif complete and len(validation) < held_out:
            validation.append(complete[0])
        else:
            train.extend(groups[group])
    return Corpus(tasks, train, validation, test, sources)


def read_pairs(path: Path) -> Corpus:
    """Read the user's own pairs from lines of ``query<TAB>document``.

    Lines that share a query or a document form one group. A tenth of the pairs, at most 600, is
    held out for validation, and another tenth for the test.

    Raises:
        UserError: the file cannot be read, a line is not such a pair, or there are too few.
    """
    pairs: dict[tuple[str, str], None] = {}
    above: dict[str, str] = {}  # a union-find whose roots are the smallest members of the groups

    def root(item: str) -> str:
        while (parent := above.setdefault(item, item)) != item:
            above[item] = above[parent]  # keeps chains short
            item = parent
        return item

    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        number = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {number}: expected UTF-8 text ({error.reason})") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) != 2 or not all(any(map(str.isalnum, field)) for field in fields):
            raise UserError(
                f"{path}, line {number}: expected a query, one tab and a document, each with a "
                f"letter or a digit, got {line[:60]!r}"
            )
        query, document = (" ".join(field.split()) for field in fields)
        low, high = sorted(map(root, (f"query {query.lower()}", f"document {document.lower()}")))
        above[high] = low
        pairs[query, document] = None
    if len(pairs) < MINIMUM_PAIRS:
        raise UserError(
            f"{path}: expected at least {MINIMUM_PAIRS} different pairs for training and test, got "
            f"{len(pairs)}; a useful retriever needs a few thousand"
        )
    rows = []
    for query, document in pairs:
        pair = Pair(0, query, document)
        rows.append(Row(query, root(f"query {query.lower()}"), (pair,), document))
    source = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12]}
    corpus = split(rows, ("query → document",), source, held_out=min(HELD_OUT, len(pairs) // 10))
    if len(corpus.train) < MINIMUM_PAIRS // 2 or len(corpus.validation) < MINIMUM_PAIRS // 20:
        raise UserError(
            f"{path}: only {len(corpus.train)} pairs are left for training without the test pairs, "
            "because most lines share a query or a document; add more different pairs"
        )
    return corpus
