"""A trained model that encodes texts, searches an index of them, and is saved with it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.demo.corpus import Row
from examples.demo.model import ModelSize, SparseEncoder
from examples.demo.tokens import Tokens, pad

MODEL, TEXTS, TOKENIZER = "model.pt", "texts.json", "tokenizer.json"


class Retriever:
    """A model, its tokens, and an index of texts that are ranked by dot products."""

    def __init__(self, tokens: Tokens, model: SparseEncoder) -> None:
        self.tokens, self.model = tokens, model
        self.texts: list[tuple[str, str]] = []  # titles and texts
        self.vectors = torch.zeros(0, tokens.vocab_size).to_sparse()

    def encode(self, texts: Sequence[str], side: str | None = None) -> Tensor:
        """Return vectors ``[texts, V]``, those of a ``side`` pruned by its threshold."""
        rows = self.tokens.ids(texts)
        starts = range(0, len(rows), 64)
        with torch.no_grad():
            return torch.cat([self.model(**pad(rows[i : i + 64]), side=side) for i in starts])

    def index(self, rows: Sequence[Row]) -> None:
        """Encode and keep the texts of rows."""
        self.texts = [(row.title, row.text) for row in rows]
        texts = [row.text for row in rows]
        starts = range(0, len(texts), 512)
        parts = [self.encode(texts[i : i + 512], "document").to_sparse() for i in starts]
        self.vectors = torch.cat(parts).coalesce()

    def search(self, question: str, count: int = 5) -> list[dict[str, Any]]:
        """Return score, title and text of the best texts that share a token with the question."""
        scores = torch.sparse.mm(self.vectors, self.encode([question], "query").T).squeeze(1)
        values, best = scores.topk(min(count, len(self.texts)))
        return [
            {"score": round(value, 4), "title": self.texts[i][0], "text": self.texts[i][1]}
            for value, i in zip(values.tolist(), best.tolist(), strict=True)
            if value > 0
        ]

    def top_tokens(self, texts: Sequence[str], count: int = 8) -> list[list[tuple[str, float]]]:
        """Return the highest dimensions of each query, by name."""
        vectors = self.encode(texts, "query")
        values, tokens = vectors.topk(min(count, self.tokens.vocab_size), dim=1)
        return [
            [(self.tokens.name(t), round(v, 2)) for t, v in zip(*row, strict=True) if v > 0]
            for row in zip(tokens.tolist(), values.tolist(), strict=True)
        ]

    def save(self, folder: Path) -> None:
        """Write model, tokenizer and index."""
        content = {
            "size": dataclasses.asdict(self.model.size),
            "thresholds": self.model.thresholds,
            "state": self.model.state_dict(),
            "indices": self.vectors.indices(),
            "values": self.vectors.values(),
        }
        torch.save(content, folder / MODEL)
        (folder / TEXTS).write_text(json.dumps(self.texts), encoding="utf-8")
        self.tokens.tokenizer.save(str(folder / TOKENIZER))

    @classmethod
    def load(cls, folder: Path) -> Retriever:
        """Return what ``save`` wrote."""
        content = torch.load(folder / MODEL, weights_only=True)
        size = ModelSize(**content["size"])
        tokens = Tokens(Tokenizer.from_file(str(folder / TOKENIZER)), size.max_length)
        model = SparseEncoder(tokens.vocabulary(), torch.ones(tokens.vocab_size), size)
        model.load_state_dict(content["state"])
        model.thresholds = content["thresholds"]
        retriever = cls(tokens, model)
        texts = json.loads((folder / TEXTS).read_text(encoding="utf-8"))
        retriever.texts = [(title, text) for title, text in texts]
        shape = (len(texts), tokens.vocab_size)
        retriever.vectors = torch.sparse_coo_tensor(
            content["indices"], content["values"], shape, check_invariants=True
        )
        return retriever
