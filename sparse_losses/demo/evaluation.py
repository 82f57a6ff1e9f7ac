"""How well a retriever ranks, what its vectors look like, and the BM25 that it is held against."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparse_losses.demo.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Recall at 1 and 10 and the mean reciprocal rank, cut at 10."""

    recall_1: float
    recall_10: float
    mrr_10: float


def ranking(scores: Tensor) -> Ranking:
    """Figures for a square score matrix whose diagonal holds the right answers.

    A tie counts half against the right answer, so that scoring everything alike earns nothing.
    """
    right = scores.diagonal().unsqueeze(1)
    above = (scores > right).sum(1).double()
    tied = (scores == right).sum(1).double() - 1
    rank = 1 + above + tied / 2
    found = rank <= 10
    return Ranking(
        recall_1=(rank <= 1).double().mean().item(),
        recall_10=found.double().mean().item(),
        mrr_10=torch.where(found, 1 / rank, torch.zeros_like(rank)).mean().item(),
    )


def bm25_scores(queries: Sequence[Sequence[str]], documents: Sequence[Sequence[str]]) -> Tensor:
    """Scores ``[queries, documents]`` of bm25s with its default k1 and b."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    index = bm25s.BM25()
    index.index([list(document) for document in documents], show_progress=False)
    known = set(index.vocab_dict)
    scores = np.zeros((len(queries), len(documents)), dtype=np.float32)
    for row, query in enumerate(queries):
        if terms := [term for term in query if term in known]:
            scores[row] = index.get_scores(terms)
    return torch.from_numpy(scores)


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """What the vectors of some texts are made of.

    Attributes:
        active: dimensions above zero, mean over texts.
        stopwords: share of the ten highest dimensions that are stopwords.
        special: the same for special tokens.
        rare: the same for rare tokens that are not in the text.
        own: share of a text's own tokens that are active.
    """

    active: float
    stopwords: float
    special: float
    rare: float
    own: float


RARE = 5


def anatomy(vectors: Tensor, rows: Sequence[Sequence[int]], tokens: Tokens, df: Tensor) -> Anatomy:
    """Look into vectors ``[texts, V]`` of texts with the token ids ``rows``; ``df`` is ``[V]``.

    Only dimensions above zero count as one of the ten highest. A token is rare if at most five
    training documents hold it.
    """
    values, top = vectors.topk(min(10, vectors.shape[1]), dim=1)
    filled = values > 0
    slots = filled.sum().clamp(min=1)
    inside = torch.zeros(vectors.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        inside[index, list(row)] = True
    special = torch.tensor(tokens.special_ids)
    rare = (df[top] <= RARE) & ~inside.gather(1, top) & ~torch.isin(top, special)
    inside[:, special] = False

    def share(which: Tensor) -> float:
        return ((which & filled).sum() / slots).item()

    return Anatomy(
        active=(vectors > 0).sum(1).double().mean().item(),
        stopwords=share(torch.isin(top, torch.tensor(tokens.stopword_ids))),
        special=share(torch.isin(top, special)),
        rare=share(rare),
        own=((vectors > 0) & inside).sum().item() / max(1, int(inside.sum())),
    )
