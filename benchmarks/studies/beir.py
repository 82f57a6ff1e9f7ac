"""A test collection in the format of BEIR, pairs made of its documents, figures of a ranking.

The query of a pair is a sentence, its document the sentences around it (the inverse cloze task).
"""

import csv
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

PASSAGE = 64  # words from which a pair is made: about what the model reads
SHORTEST = 5  # words of a query or a document
UNSEEN = 4  # every such document gives no pair
MOST = 8  # pairs of a document
FORMAT = "a folder in BEIR's format has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv"


class Collection(NamedTuple):
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
    """Read a folder; exit with what is wrong in it."""
    judged: dict[str, dict[int, int]] = {}
    try:
        documents, queries = (_texts(folder / f"{name}.jsonl") for name in ("corpus", "queries"))
        place = {name: number for number, name in enumerate(documents)}
        with (folder / "qrels" / f"{split}.tsv").open(encoding="utf-8") as file:
            for query, document, grade in itertools.islice(csv.reader(file, "excel-tab"), 1, None):
                if int(grade) > 0:
                    _ = queries[query]
                    judged.setdefault(query, {})[place[document]] = int(grade)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"error: cannot read {folder}: {error!r}; {FORMAT}") from error
    texts = [f"{title} {text}".strip() for title, text in documents.values()]
    of_documents = (
        itertools.islice(pairs(*document), MOST)
        for number, document in enumerate(documents.values())
        if number % UNSEEN
    )
    made = list(itertools.chain.from_iterable(of_documents))
    for found, what in ((judged, "relevant documents"), (made, "documents of several sentences")):
        if not found:
            raise SystemExit(f"error: {folder} has no {what}")
    test = texts, [queries[name][1] for name in judged], list(judged.values())
    digest = hashlib.sha256(repr(test).encode()).hexdigest()[:12]
    size = f"{len(texts):,} documents, {len(judged):,} queries, sha256 {digest}"
    return Collection(folder.resolve().name, size, made, *test)


def _texts(path: Path) -> dict[str, tuple[str, str]]:
    entries = map(json.loads, filter(str.strip, path.read_text(encoding="utf-8").split("\n")))
    return {entry["_id"]: (entry.get("title") or "", entry["text"]) for entry in entries}


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
