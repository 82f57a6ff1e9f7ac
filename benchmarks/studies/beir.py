"""A test collection in the format of BEIR, pairs made of its documents, figures of a ranking.

The query of a pair is a sentence, its document the sentences around it (the inverse cloze task).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

PASSAGE = 64  # words from which a pair is made: about what the model reads
SHORTEST = 5  # words of a query or a document
UNSEEN = 4  # every such document gives no pair
MOST = 8  # pairs of a document
FORMAT = "a folder in BEIR's format has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv"


@dataclasses.dataclass(frozen=True)
class Collection:
    """A test collection, and pairs made of its documents.

    Every fourth document gives no pair. ``relevant`` has one mapping per query, from the position
    of a document to its grade.
    """

    name: str
    source: str
    pairs: list[tuple[str, str]]
    documents: list[str]
    queries: list[str]
    relevant: list[dict[int, int]]


def load(folder: Path, split: str = "test") -> Collection:
    """Read a folder; exit with the file and line of what is wrong in it."""
    documents, queries = (_texts(folder / f"{name}.jsonl") for name in ("corpus", "queries"))
    place = {name: number for number, name in enumerate(documents)}
    judged: dict[str, dict[int, int]] = {}
    path = folder / "qrels" / f"{split}.tsv"
    for number, line in _lines(path):
        query, document, grade = (*line.split("\t"), "", "", "")[:3]
        if number == 1 and query not in queries:
            continue  # headings
        if query not in queries or document not in place or not re.fullmatch(r"-?\d+", grade):
            expected = "known query, known document and whole number, separated by tabs"
            raise SystemExit(f"error: {path}, line {number}: expected {expected}, got {line!r}")
        if int(grade) > 0:
            judged.setdefault(query, {})[place[document]] = int(grade)
    texts = [f"{title} {text}".strip() for title, text in documents.values()]
    made = [
        pair
        for number, document in enumerate(documents.values())
        if number % UNSEEN
        for pair in itertools.islice(pairs(*document), MOST)
    ]
    for found, what in ((judged, "relevant documents"), (made, "documents of several sentences")):
        if not found:
            raise SystemExit(f"error: {folder} has no {what}")
    test = texts, [queries[name][1] for name in judged], list(judged.values())
    digest = hashlib.sha256(repr(test).encode()).hexdigest()[:12]
    size = f"{len(texts):,} documents, {len(judged):,} queries, sha256 {digest}"
    return Collection(folder.resolve().name, size, made, *test)


def _texts(path: Path) -> dict[str, tuple[str, str]]:
    texts: dict[str, tuple[str, str]] = {}
    for number, line in _lines(path):
        try:
            entry = json.loads(line)
            name, *text = (entry["_id"], entry.get("title") or "", entry["text"])
            if name in texts or not all(isinstance(each, str) for each in (name, *text)):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            expected = 'an object with "text" and an "_id" of its own, both strings'
            raise SystemExit(f"error: {path}, line {number}: expected {expected}") from error
        texts[name] = text[0], text[1]
    return texts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"error: cannot read {path}: {error}; {FORMAT}") from error
    return ((number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip())


def pairs(title: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield each sentence of a document, the title included, and the rest of its passage."""
    passages: list[list[str]] = [[]]
    for sentence in filter(str.strip, [title, *re.split(r"(?<=[.!?])\s+", text)]):
        if len(re.findall(r"\w+", " ".join(passages[-1]))) >= PASSAGE:
            passages.append([])
        passages[-1].append(sentence)
    for passage in passages:
        for number, sentence in enumerate(passage):
            rest = " ".join(passage[:number] + passage[number + 1 :])
            if all(len(re.findall(r"\w+", side)) >= SHORTEST for side in (sentence, rest)):
                yield sentence, rest


def ranked(scores: Tensor, relevant: Sequence[Mapping[int, int]]) -> dict[str, list[float]]:
    """Return figures of each query from scores ``[Q, D]``, with the grade as nDCG's gain.

    Documents of score 0 share nothing with a query and are not found.
    """
    discounts = 1 / np.log2(np.arange(2, 12))
    figures: dict[str, list[float]] = {name: [] for name in ("ndcg_10", "mrr_10", "recall_100")}
    for own, grades in zip(scores.double().numpy(), relevant, strict=True):
        best = np.argsort(-own, kind="stable")[:100]
        gains = np.array([grades.get(n, 0) for n in best[own[best] > 0].tolist()] + [0] * 10)
        ideal = np.array(sorted(grades.values(), reverse=True)[:10])
        first = np.flatnonzero(gains[:10])
        ndcg = gains[:10] @ discounts / (ideal @ discounts[: len(ideal)])
        recall = np.count_nonzero(gains) / len(grades)
        mrr = 1 / (1 + first[0]) if len(first) else 0.0
        for name, value in zip(figures, (ndcg, mrr, recall), strict=True):
            figures[name].append(float(value))
    return figures
