"""A test collection in the format of BEIR, pairs made of its documents, figures of a ranking.

The query of a pair is a sentence, its document the sentences around it (the inverse cloze task).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from examples.demo.corpus import Corpus, Pair, Row

PASSAGE = 64  # words from which a pair is made: about what the model reads
SHORTEST = 5  # words of a query or a document
RESAMPLES = 10_000
FORMAT = "a folder in BEIR's format has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv"


@dataclasses.dataclass(frozen=True)
class Collection(Corpus):
    """Pairs made of the documents; the documents, the test queries, and their relevant documents.

    ``relevant`` has one mapping per query, from the position of a document to its grade.
    """

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
    train = [
        Row(name, name, (Pair(0, query, rest),), rest)
        for name, document in documents.items()
        for query, rest in pairs(*document)
    ]
    for found, what in ((judged, "relevant documents"), (train, "documents of several sentences")):
        if not found:
            raise SystemExit(f"error: {folder} has no {what}")
    held_out = [
        Row(name, name, (Pair(0, text, text),), text)
        for name, text in zip(place, texts, strict=True)
    ]
    test = texts, [queries[name][1] for name in judged], list(judged.values())
    digest = hashlib.sha256(repr(test).encode()).hexdigest()[:12]
    size = f"{len(texts):,} documents, {len(judged):,} queries, sha256 {digest}"
    sources = {folder.resolve().name: size}
    return Collection(("sentence → passage",), train, held_out, [], sources, *test)


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


def costs(queries: Sequence[Sequence[Any]], documents: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Return the terms of a query and of a document, and those that they share; means.

    And the share of the documents that the longest posting list holds.
    """
    texts = (queries, documents)
    query, document = (Counter(term for text in side for term in set(text)) for side in texts)
    shared = sum(count * document[term] for term, count in query.items())
    return {
        "active_query": query.total() / len(queries),
        "active_document": document.total() / len(documents),
        "products": shared / (len(queries) * len(documents)),
        "longest_list": max(document.values(), default=0) / len(documents),
    }


def difference(
    row: Sequence[np.ndarray], reference: Sequence[np.ndarray]
) -> tuple[float, float, float]:
    """Return the mean difference of two rows, and the bounds of its 95% interval.

    A row has an array of figures by query for each collection; the mean is that of the collections.
    The interval is that of a bootstrap of pairs, over queries.
    """
    generator = np.random.default_rng(0)
    paired = [own - other for own, other in zip(row, reference, strict=True)]
    drawn = [generator.choice(own, (RESAMPLES, len(own))).mean(1) for own in paired]
    low, high = np.quantile(np.mean(drawn, 0), (0.025, 0.975))
    return float(np.mean([own.mean() for own in paired])), float(low), float(high)
