"""Ranking figures of a retriever and of BM25, and statistics of the retriever's vectors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import bm25s
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.demo.corpus import Corpus, pair_texts
from examples.demo.tokens import Tokens

if TYPE_CHECKING:
    from examples.demo.training import Run

MODEL = "this model"
RARE = 5  # the largest number of training documents that hold a rare token


class Ranking(NamedTuple):
    """Recall at 1 and 10 and the mean reciprocal rank, cut at 10."""

    recall_1: float
    recall_10: float
    mrr_10: float


def ranks(scores: Tensor) -> Tensor:
    """Return the rank of document i for query i, from scores ``[queries, documents]``.

    Half of the tied documents rank above the right one, so that a constant score gains nothing.
    """
    right = scores.diagonal().unsqueeze(1)
    above = (scores > right).sum(1).double()
    tied = (scores == right).sum(1).double() - 1
    return 1 + above + tied / 2


def ranking(scores: Tensor) -> Ranking:
    """Return the figures of a score matrix with the right documents on its diagonal."""
    rank = ranks(scores)
    return Ranking(
        recall_1=(rank <= 1).double().mean().item(),
        recall_10=(rank <= 10).double().mean().item(),
        mrr_10=torch.where(rank <= 10, 1 / rank, 0.0).mean().item(),
    )


def similarities(queries: Tensor, documents: Tensor, name: str) -> Tensor:
    """Return dot products or cosines ``[queries, documents]``; an empty vector has 0 with all."""
    if name == "cosine":
        queries, documents = F.normalize(queries, dim=1), F.normalize(documents, dim=1)
    return queries @ documents.T


def bm25_scores(queries: Sequence[Sequence[str]], documents: Sequence[Sequence[str]]) -> Tensor:
    """Return scores ``[queries, documents]`` of bm25s with its default k1 and b."""
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    index = bm25s.BM25()
    index.index([list(document) for document in documents], show_progress=False)
    known = set(index.vocab_dict)
    scores = np.zeros((len(queries), len(documents)), dtype=np.float32)
    for row, query in enumerate(queries):
        if terms := [term for term in query if term in known]:
            scores[row] = index.get_scores(terms)
    return torch.from_numpy(scores)


def anatomy(
    vectors: Tensor, rows: Sequence[Sequence[int]], tokens: Tokens, df: Tensor
) -> dict[str, float]:
    """Return statistics of vectors ``[texts, V]`` with token ids ``rows``; ``df`` is ``[V]``.

    ``active`` is the mean number of dimensions above zero, ``own`` the share of a text's own tokens
    that are. ``stopwords``, ``special`` and ``rare`` are shares of such tokens among the ten
    highest dimensions above zero; a rare token is not in the text.
    """
    values, top = vectors.topk(min(10, vectors.shape[1]), dim=1)
    filled = values > 0
    inside = torch.zeros(vectors.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        inside[index, list(row)] = True
    special = torch.tensor(tokens.special_ids)
    chosen = {
        "stopwords": torch.isin(top, torch.tensor(tokens.stopword_ids)),
        "special": torch.isin(top, special),
        "rare": (df[top] <= RARE) & ~inside.gather(1, top) & ~torch.isin(top, special),
    }
    inside[:, special] = False
    slots = filled.sum().clamp(min=1)
    shares = {name: ((mask & filled).sum() / slots).item() for name, mask in chosen.items()}
    own = ((vectors > 0) & inside).sum().item() / max(1, int(inside.sum()))
    return {"active": (vectors > 0).sum(1).double().mean().item(), **shares, "own": own}


def measure(run: Run, corpus: Corpus) -> list[dict[str, Any]]:
    """Rank the test queries of every task by the trained and the untrained model and by BM25.

    Each task also has statistics of both sides' vectors, before and after training.
    """
    models = {"before": run.untrained(), "after": run.model}
    similarity = run.settings.preset.similarity
    figures = []
    for number, task in enumerate(corpus.tasks):
        sides = pair_texts(corpus.test, number)
        vectors = {
            when: [run.encode(texts, model) for texts in sides] for when, model in models.items()
        }
        scores = {
            "untrained model": similarities(*vectors["before"], similarity),
            "BM25, words": bm25_scores(*map(run.tokens.words, sides)),
            "BM25, same subwords": bm25_scores(*map(run.tokens.pieces, sides)),
            MODEL: similarities(*vectors["after"], similarity),
        }
        rankings = {system: ranking(each)._asdict() for system, each in scores.items()}
        looks = {
            f"{side}_{when}": anatomy(
                vectors[when][place], run.tokens.ids(sides[place]), run.tokens, run.df.df
            )
            for place, side in enumerate(("query", "document"))
            for when in models
        }
        figures.append({"task": task, "queries": len(sides[0]), "rankings": rankings, **looks})
    return figures


def top_tokens(run: Run, texts: Sequence[str], count: int = 8) -> list[list[tuple[str, float]]]:
    """Return the highest dimensions of each text, by name."""
    values, tokens = run.encode(texts).topk(min(count, run.tokens.vocab_size), dim=1)
    return [
        [(run.tokens.name(t), round(v, 2)) for t, v in zip(*row, strict=True) if v > 0]
        for row in zip(tokens.tolist(), values.tolist(), strict=True)
    ]


class Index:
    """A search index of all texts of a corpus as sparse vectors, ranked by dot products."""

    def __init__(self, run: Run, corpus: Corpus) -> None:
        self.run, self.rows = run, corpus.rows
        texts = [row.text for row in self.rows]
        parts = (run.encode(texts[start : start + 500]) for start in range(0, len(texts), 500))
        self.vectors = torch.cat([part.to_sparse() for part in parts])

    def search(self, question: str, count: int = 5) -> list[dict[str, Any]]:
        """Return score, title and text of the best rows that share a token with the question."""
        scores = torch.sparse.mm(self.vectors, self.run.encode([question]).T).squeeze(1)
        values, best = scores.topk(min(count, len(self.rows)))
        return [
            {"score": round(value, 4), "title": row.title, "text": row.text}
            for value, row in zip(values.tolist(), map(self.rows.__getitem__, best), strict=True)
            if value > 0
        ]
