"""Ranking figures of a retriever and of BM25, and statistics of the retriever's vectors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import bm25s
import numpy as np
import torch
from torch import Tensor

from examples.demo.corpus import Corpus, pair_texts
from examples.demo.retriever import Retriever
from examples.demo.tokens import Tokens

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
    that are. ``stopwords`` and ``rare`` are shares of such tokens among the ten highest dimensions
    above zero; a rare token is not in the text.
    """
    values, top = vectors.topk(min(10, vectors.shape[1]), dim=1)
    filled = values > 0
    inside = torch.zeros(vectors.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        inside[index, list(row)] = True
    special = torch.tensor(tokens.special_ids)
    chosen = {
        "stopwords": torch.isin(top, torch.tensor(tokens.stopword_ids)),
        "rare": (df[top] <= RARE) & ~inside.gather(1, top) & ~torch.isin(top, special),
    }
    inside[:, special] = False
    slots = filled.sum().clamp(min=1)
    shares = {name: ((mask & filled).sum() / slots).item() for name, mask in chosen.items()}
    own = ((vectors > 0) & inside).sum().item() / max(1, int(inside.sum()))
    return {"active": (vectors > 0).sum(1).double().mean().item(), **shares, "own": own}


def measure(
    trained: Retriever, untrained: Retriever, corpus: Corpus, df: Tensor
) -> list[dict[str, Any]]:
    """Rank the test queries of every task by the model, whole and pruned, and by BM25.

    Each task has statistics of the pruned vectors of both sides, and their products per pair.
    """
    figures = []
    for number, task in enumerate(corpus.tasks):
        sides = pair_texts(corpus.test, number)
        pruned = [
            trained.encode(texts, side)
            for texts, side in zip(sides, ("query", "document"), strict=True)
        ]
        whole, before = ([one.encode(texts) for texts in sides] for one in (trained, untrained))
        tokens = trained.tokens
        scores = {
            "untrained model": before[0] @ before[1].T,
            "BM25, words": bm25_scores(*map(tokens.words, sides)),
            "BM25, same subwords": bm25_scores(*map(tokens.pieces, sides)),
            "trained, not pruned": whole[0] @ whole[1].T,
            MODEL: pruned[0] @ pruned[1].T,
        }
        looks = {}
        for side, texts, vectors, unpruned in zip(
            ("query", "document"), sides, pruned, whole, strict=True
        ):
            looks[side] = anatomy(vectors, tokens.ids(texts), tokens, df)
            looks[side]["active_unpruned"] = (unpruned > 0).sum(1).double().mean().item()
        figures.append(
            {
                "task": task,
                "queries": len(sides[0]),
                "rankings": {name: ranking(each)._asdict() for name, each in scores.items()},
                "products": products(*pruned),
                "products_unpruned": products(*whole),
                **looks,
            }
        )
    return figures


def products(queries: Tensor, documents: Tensor) -> float:
    """Return how many products a query and a document have on average."""
    shares = [(vectors > 0).double().mean(0) for vectors in (queries, documents)]
    return float(shares[0] @ shares[1])
