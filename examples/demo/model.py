"""A small transformer that turns texts into sparse vectors over its own vocabulary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.demo.tokens import MAX_LENGTH, pad
from sparse_losses import SpladeHead

SPELLING = 0.5  # share of a token's initial embedding that depends on its spelling


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Sizes of the transformer."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    max_length: int = MAX_LENGTH


class SparseEncoder(nn.Module):
    """Token embeddings, a few attention layers, and the same embeddings in the head.

    Initially the model is *lexical*: embeddings are nearly orthogonal and the layers add little to
    them (a tenth of each branch), so an untrained text vector already holds its own tokens. Half of
    an embedding is shared with tokens of similar spelling, so that ``neighbors`` finds ``neighbor``
    from the start (as in "Enriching Word Vectors with Subword Information"). Rare tokens have
    longer vectors than common ones and so a larger weight.
    """

    def __init__(self, vocabulary: Sequence[str], idf: Tensor, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.thresholds: tuple[float | None, float | None] = (None, None)  # document, query
        vocab_size, hidden = len(vocabulary), size.hidden
        relative = ((idf - idf.min()) / (idf.max() - idf.min()).clamp(min=1e-6)).float()
        length = (0.3 + 0.7 * relative).unsqueeze(1)
        own = F.normalize(torch.randn(vocab_size, hidden), dim=1)
        spelt = F.normalize(_spelling(vocabulary, hidden), dim=1)
        direction = math.sqrt(1 - SPELLING) * own + math.sqrt(SPELLING) * spelt
        self.scale = math.sqrt(hidden)
        self.embedding = nn.Parameter(F.normalize(direction, dim=1) * length)
        self.position = nn.Parameter(torch.randn(size.max_length, hidden) * 0.1)
        self.layers = nn.ModuleList(Layer(hidden, size.heads) for _ in range(size.layers))
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.head = SpladeHead(self.embedding, self.bias)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, *, side: str | None = None
    ) -> Tensor:
        """Return ``[B, V]``: ``max_s log1p(relu(hidden_s . embedding_v + bias_v))``.

        A ``side``, ``"document"`` or ``"query"``, prunes by its threshold.
        """
        document, query = self.thresholds
        self.head.threshold = {None: None, "document": document, "query": query}[side]
        return self.head(self.hidden(input_ids, attention_mask), attention_mask)

    def hidden(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the hidden states ``[B, S, H]``."""
        states = F.embedding(input_ids, self.embedding) * self.scale
        states = states + self.position[: input_ids.shape[1]]
        for layer in self.layers:
            states = layer(states, attention_mask.bool()[:, None, None, :])
        return states

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield hidden states and masks of token ids, as ``calibrate`` takes them for a head."""
        for start in range(0, len(rows), 64):
            batch = pad(rows[start : start + 64])
            with torch.no_grad():
                hidden = self.hidden(**batch)
            yield hidden, batch["attention_mask"]


def _spelling(vocabulary: Sequence[str], hidden: int) -> Tensor:
    """Return sums of random vectors, one for each run of three to five letters in a token."""
    numbers: dict[str, int] = {}
    runs, owners = [], []
    for token, written in enumerate(vocabulary):
        marked = written[2:] + ">" if written.startswith("##") else f"<{written}>"
        for length in (3, 4, 5):
            for start in range(len(marked) - length + 1):
                runs.append(numbers.setdefault(marked[start : start + length], len(numbers)))
                owners.append(token)
    run, owner = torch.tensor(runs), torch.tensor(owners)
    common = torch.bincount(run).sqrt().unsqueeze(1)  # "ing" has less meaning than "transp"
    vectors = torch.randn(len(numbers), hidden) / common
    return torch.zeros(len(vocabulary), hidden).index_add_(0, owner, vectors[run])


class Layer(nn.Module):
    """Self-attention and a feed-forward step, each added to the residual stream times 0.1."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.feed_norm = nn.LayerNorm(hidden)
        self.feed = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Map ``[B, S, H]`` to ``[B, S, H]``; ``mask`` ``[B, 1, 1, S]`` is true at tokens."""
        batch, length, hidden = states.shape
        split = self.query_key_value(self.attention_norm(states))
        query, key, value = split.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        states = states + 0.1 * self.output(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return states + 0.1 * self.feed(self.feed_norm(states))
