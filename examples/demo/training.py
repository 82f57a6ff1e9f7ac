"""The training loop, with batches that depend on the seed only."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from examples.demo.corpus import Corpus, pair_texts
from examples.demo.evaluation import ranking, similarities
from examples.demo.model import ModelSize, SparseEncoder
from examples.demo.tokens import VOCAB_SIZE, Tokens, pad
from sparse_losses import (
    RECOMMENDED,
    BM25Teacher,
    Diagnostics,
    DocumentFrequency,
    Finding,
    Preset,
    SpladeBatch,
    Texts,
    advise,
    gradient_report,
)

STEPS = 500
LOOK = 5  # steps between two looks of a controller
HELD_OUT_ROWS = 128  # per look of a controller; with half as many its variance is too large


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings that determine the figures of a run on given data and one thread."""

    steps: int = STEPS
    seed: int = 0
    preset: Preset = RECOMMENDED
    batch_size: int = 32
    learning_rate: float = 1e-3
    vocab_size: int = VOCAB_SIZE
    size: ModelSize = dataclasses.field(default_factory=ModelSize)
    probe_every: int = 50
    probe_rows: int = 200


@dataclasses.dataclass(frozen=True)
class Step:
    """The numbers of one step; ``terms`` are weighted and sum to the loss."""

    step: int
    terms: dict[str, float]
    active_query: float
    active_document: float


class Run:
    """A retriever in training, with its history."""

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self.settings = settings
        pairs = [(row.group, pair) for row in corpus.train for pair in row.pairs]
        groups = {group: number for number, (group, _) in enumerate(pairs)}
        self.group_ids = torch.tensor([groups[group] for group, _ in pairs])
        queries = [pair.query for _, pair in pairs]
        documents = [pair.document for _, pair in pairs]
        self.tokens = self.learn(queries + documents)
        self.queries, self.documents = self.tokens.ids(queries), self.tokens.ids(documents)
        self.df = DocumentFrequency(self.tokens.vocab_size)
        for start in range(0, len(pairs), 1000):
            self.df.update(**pad(self.documents[start : start + 1000]))
        self.teacher = BM25Teacher(self.df, special_token_ids=self.tokens.special_ids)
        self.probe_texts = pair_texts(corpus.validation[: settings.probe_rows], task=0)
        held_out = [pair for row in corpus.validation for pair in row.pairs]
        self.held_out = {
            side: self.tokens.ids([getattr(pair, side) for pair in held_out])
            for side in ("query", "document")
        }

        generator = torch.Generator().manual_seed(settings.seed)
        epochs = range(-(-settings.steps * settings.batch_size // len(pairs)))
        self.order = torch.cat([torch.randperm(len(pairs), generator=generator) for _ in epochs])
        self.model = self.untrained()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, weight_decay=0.0
        )
        self.special = {
            "special_token_ids": self.tokens.special_ids,
            "stopword_ids": self.tokens.stopword_ids,
        }
        self.objective = settings.preset.objective(idf=self.df.idf(), **self.special)
        self.distils = "distillation" in self.objective.weights
        schedules = settings.preset.schedules(self.objective, steps=settings.steps)
        self.schedule, *controllers = schedules
        self.schedule.attach(self.optimizer)
        for controller in controllers:
            controller.attach(self.optimizer, observe=False)
        self.controllers = {one.term.removesuffix("_flops"): one for one in controllers}
        self.step = 0
        self.seconds = 0.0
        self.history: list[Step] = []
        self.probes: list[dict[str, Any]] = [self.probe()]

    def learn(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of the model."""
        return Tokens.learn(texts, self.settings.vocab_size, self.settings.size.max_length)

    def untrained(self) -> SparseEncoder:
        """Return the model as it was before the first step."""
        torch.manual_seed(self.settings.seed)
        return SparseEncoder(self.tokens.vocabulary(), self.df.idf(), self.settings.size)

    def train(self, report: Callable[[Step], None] = lambda step: None) -> None:
        """Take the remaining steps; ``report`` may raise an error to stop between two steps."""
        while self.step < self.settings.steps:
            started = time.perf_counter()
            self._take_step()
            if self.step % self.settings.probe_every == 0 or self.step == self.settings.steps:
                self.probes.append(self.probe())
            self.seconds += time.perf_counter() - started
            report(self.history[-1])

    def _take_step(self) -> None:
        settings = self.settings
        progress = self.step / settings.steps
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (self.step + 1) / 20) * (1 - progress)
        batch = self.batch(self.step)
        total, terms = self.loss(batch)
        self.optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        self.step += 1
        for side, controller in self.controllers.items() if self.step % LOOK == 0 else ():
            # The target is for held-out texts: their documents are longer than those in training.
            texts = self.held_out[side]
            first = self.step * HELD_OUT_ROWS
            rows = [texts[(first + n) % len(texts)] for n in range(HELD_OUT_ROWS)]
            with torch.no_grad():
                controller.observe(self.model(**pad(rows)))
        active = [
            (texts.activations > 0).sum(1).double().mean().item()
            for texts in (batch.anchor, batch.positive)
        ]
        self.history.append(Step(self.step, terms, *active))

    def loss(self, batch: SpladeBatch) -> tuple[Tensor, dict[str, float]]:
        """Return the value to minimise, and its weighted terms."""
        total, terms = self.objective(batch)
        weights = self.objective.weights
        return total, {name: weights[name] * value.item() for name, value in terms.items()}

    def batch(self, step: int) -> SpladeBatch:
        """Return the texts of a step, encoded by the present model."""
        size = self.settings.batch_size
        chosen = self.order[step * size :][:size].tolist()
        texts = [pad([side[index] for index in chosen]) for side in (self.queries, self.documents)]
        return SpladeBatch(
            *(Texts(self.model(**side), **side) for side in texts),
            positive_ids=self.group_ids[chosen],
            teacher_scores=self.teacher(*texts) if self.distils else None,
        )

    def findings(self) -> dict[str, list[Finding]]:
        """Return the findings of ``advise`` on the last step's texts, by side.

        Weights that warm up count with their final value, which is the setting to change.
        """
        with torch.no_grad():
            batch = self.batch(max(self.step - 1, 0))
        weights = dict(self.objective.weights)
        self.objective.weights.update({n: self.schedule.base[n] for n in self.schedule.warmups})
        gradients = gradient_report(self.objective, batch)
        self.objective.weights.update(weights)
        findings = {}
        for side, texts, other in (
            ("document", batch.positive, batch.anchor),
            ("query", batch.anchor, batch.positive),
        ):
            seen = Diagnostics(self.tokens.vocab_size, **self.special)
            seen.update(texts, other_side=other)
            findings[side] = advise(seen.report(), gradients, objective=self.objective, side=side)
        return findings

    def encode(self, texts: Sequence[str], model: SparseEncoder | None = None) -> Tensor:
        """Return vectors ``[texts, V]`` without gradient, by this run's model by default."""
        model = model or self.model
        rows = self.tokens.ids(texts)
        with torch.no_grad():
            return torch.cat([model(**pad(rows[i : i + 64])) for i in range(0, len(rows), 64)])

    def probe(self) -> dict[str, Any]:
        """Rank some validation queries of the first task."""
        query, document = (self.encode(texts) for texts in self.probe_texts)
        scores = similarities(query, document, self.settings.preset.similarity)
        return {"step": self.step, "ranking": ranking(scores)._asdict()}
