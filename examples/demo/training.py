"""The recipe: start sparse, learn by InfoNCE alone, prune both sides."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from examples.demo.corpus import Corpus
from examples.demo.model import ModelSize, SparseEncoder
from examples.demo.retriever import Retriever
from examples.demo.tokens import VOCAB_SIZE, Tokens, pad
from sparse_losses import Calibration, DocumentFrequency, InfoNCELoss, calibrate

STEPS = 250
SAMPLE = 500  # texts that the start is made of


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings that determine the figures of a run on given data and one thread."""

    steps: int = STEPS
    seed: int = 0
    start_active: int = 128
    document_active: int = 64
    query_active: int = 24
    batch_size: int = 32
    learning_rate: float = 1e-3
    vocab_size: int = VOCAB_SIZE
    size: ModelSize = dataclasses.field(default_factory=ModelSize)


class Run:
    """A retriever in training."""

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self.corpus, self.settings = corpus, settings
        pairs = [(row.group, pair) for row in corpus.train for pair in row.pairs]
        groups = {group: number for number, (group, _) in enumerate(pairs)}
        self.group_ids = torch.tensor([groups[group] for group, _ in pairs])
        queries = [pair.query for _, pair in pairs]
        documents = [pair.document for _, pair in pairs]
        longest = settings.size.max_length
        self.tokens = Tokens.learn(queries + documents, settings.vocab_size, longest)
        self.queries, self.documents = self.tokens.ids(queries), self.tokens.ids(documents)
        self.df = DocumentFrequency(self.tokens.vocab_size)
        for start in range(0, len(pairs), 1000):
            self.df.update(**pad(self.documents[start : start + 1000]))
        generator = torch.Generator().manual_seed(settings.seed)
        epochs = range(-(-settings.steps * settings.batch_size // len(pairs)))
        self.order = torch.cat([torch.randperm(len(pairs), generator=generator) for _ in epochs])
        torch.manual_seed(settings.seed)
        self.model = SparseEncoder(self.tokens.vocabulary(), self.df.idf(), settings.size)
        self.losses: list[float] = []
        self.seconds = 0.0

    def start(self) -> Calibration:
        """Shift the bias, so that a text starts with few active dimensions."""
        hidden = self.model.batches(self.documents[:SAMPLE])
        target = self.settings.start_active
        return calibrate(self.model.head, hidden, target, method="shift", verbose=False)

    def train(self, report: Callable[[int, float], None] = lambda step, loss: None) -> None:
        """Take all steps; ``report`` gets the number and the loss of each."""
        settings, loss = self.settings, InfoNCELoss(temperature=1.0, similarity="dot")
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, weight_decay=0.0
        )
        started = time.process_time()
        for step in range(settings.steps):
            for group in optimizer.param_groups:
                left = 1 - step / settings.steps
                group["lr"] = settings.learning_rate * min(1.0, (step + 1) / 20) * left
            chosen = self.order[step * settings.batch_size :][: settings.batch_size].tolist()
            query, document = (
                self.model(**pad([texts[i] for i in chosen]))
                for texts in (self.queries, self.documents)
            )
            value = loss(query, document, positive_ids=self.group_ids[chosen])
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            optimizer.step()
            self.losses.append(value.item())
            report(step + 1, self.losses[-1])
        self.seconds = time.process_time() - started

    def prune(self) -> Calibration:
        """Find the thresholds of both sides on the validation texts, which are new to the model."""
        pairs = [pair for row in self.corpus.validation for pair in row.pairs]
        documents, queries = (
            self.model.batches(self.tokens.ids([getattr(pair, side) for pair in pairs]))
            for side in ("document", "query")
        )
        settings = self.settings
        calibration = calibrate(
            self.model.head,
            documents,
            settings.document_active,
            queries=queries,
            query_target=settings.query_active,
            verbose=False,
        )
        self.model.thresholds = calibration[:2]
        return calibration

    def retriever(self) -> Retriever:
        """Return the model with its tokens, to search with."""
        return Retriever(self.tokens, self.model)
