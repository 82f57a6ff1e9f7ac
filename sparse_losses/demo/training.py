"""The training loop: batches that depend on the seed alone, and checkpoints to go on from."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_losses import (
    Diagnostics,
    DocumentFrequency,
    Finding,
    SparsityController,
    SpladeBatch,
    Texts,
    advise,
    gradient_report,
)
from sparse_losses.demo.corpus import Corpus, Row
from sparse_losses.demo.errors import UserError
from sparse_losses.demo.evaluation import Ranking, ranking
from sparse_losses.demo.model import ModelSize, SparseEncoder, Start
from sparse_losses.demo.objective import Weights, loss_of, make_objective, make_schedule
from sparse_losses.demo.switches import STEPS
from sparse_losses.demo.tokens import VOCAB_SIZE, Tokens, pad


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides the figures of a run on given data and one thread."""

    steps: int = STEPS
    seed: int = 0
    start: Start = "dense"
    without: tuple[str, ...] = ()
    plain_flops: bool = False
    target_active: int | None = None
    target_active_query: int | None = None
    batch_size: int = 32
    learning_rate: float = 1e-3
    vocab_size: int = VOCAB_SIZE
    size: ModelSize = dataclasses.field(default_factory=ModelSize)
    weights: Weights = dataclasses.field(default_factory=Weights)
    probe_every: int = 50
    probe_rows: int = 200


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step looked like; ``terms`` are weighted and sum to the loss."""

    step: int
    terms: dict[str, float]
    active_query: float
    active_document: float

    @property
    def loss(self) -> float:
        """The value that was minimised."""
        return sum(self.terms.values())


@dataclasses.dataclass(frozen=True)
class Probe:
    """Ranking on some validation queries of the first task, in the course of training."""

    step: int
    ranking: Ranking


class Run:
    """A retriever in training.

    Everything random is drawn from the seed before the first step, so that a run that goes on
    from a checkpoint sees what an uninterrupted one would have seen.
    """

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self.settings = settings
        self.data = corpus.fingerprint()
        pairs = [(row.group, pair) for row in corpus.train for pair in row.pairs]
        groups = {group: number for number, (group, _) in enumerate(pairs)}
        self.group_ids = torch.tensor([groups[group] for group, _ in pairs])
        queries = [pair.query for _, pair in pairs]
        documents = [pair.document for _, pair in pairs]
        self.tokens = Tokens.learn(queries + documents, settings.vocab_size)
        self.queries, self.documents = self.tokens.ids(queries), self.tokens.ids(documents)
        self.df = _document_frequency(self.documents, self.tokens.vocab_size)
        self.idf = self.df.idf()
        self.probe_rows = corpus.validation[: settings.probe_rows]

        generator = torch.Generator().manual_seed(settings.seed)
        self.order = _shuffled(len(pairs), settings.steps * settings.batch_size, generator)
        self.model = self.untrained()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, weight_decay=0.0
        )
        self.objective = make_objective(
            self.tokens, self.idf, settings.weights, settings.without, settings.plain_flops
        )
        self.controllers: dict[str, SparsityController] = {}
        self.held_out: dict[str, list[list[int]]] = {}
        targets = {"document": settings.target_active, "query": settings.target_active_query}
        for side, target in targets.items():
            if target is None:
                continue
            if "flops" in settings.without:
                raise UserError("--target-active steers the weight of flops: drop --without flops")
            self.controllers[side] = SparsityController(
                self.objective, f"{side}_flops", target_active=target, window=20
            )
            self.held_out[side] = self.tokens.ids(
                [getattr(pair, side) for row in corpus.validation for pair in row.pairs]
            )
        self.schedule = make_schedule(
            self.objective,
            settings.weights,
            settings.without,
            settings.steps,
            [controller.term for controller in self.controllers.values()],
        )
        self.schedule.attach(self.optimizer)
        self.step = 0
        self.seconds = 0.0
        self.history: list[Step] = []
        self.probes: list[Probe] = [self.probe()]

    @property
    def controller(self) -> SparsityController | None:
        """What steers the documents' sparsity, if anything does."""
        return self.controllers.get("document")

    def untrained(self) -> SparseEncoder:
        """The model as it was before the first step."""
        torch.manual_seed(self.settings.seed)
        size = self.settings.size
        if "spelling" in self.settings.without:
            size = dataclasses.replace(size, spelling=0.0)
        return SparseEncoder(self.tokens.vocabulary(), self.idf, self.settings.start, size)

    def train(self, report: Callable[[Step], None] = lambda step: None) -> None:
        """Take the remaining steps; ``report`` may raise to stop between two of them."""
        while self.step < self.settings.steps:
            started = time.perf_counter()
            taken = self._take_step()
            if self.step % self.settings.probe_every == 0 or self.step == self.settings.steps:
                self.probes.append(self.probe())
            self.seconds += time.perf_counter() - started
            report(taken)

    def batch(self, step: int) -> SpladeBatch:
        """The texts of a step as the model sees them now."""
        size = self.settings.batch_size
        chosen = self.order[step * size :][:size].tolist()
        texts = (pad([side[index] for index in chosen]) for side in (self.queries, self.documents))
        query, document = (Texts(self.model(x), x.input_ids, x.attention_mask) for x in texts)
        return SpladeBatch(query, document, positive_ids=self.group_ids[chosen])

    def _take_step(self) -> Step:
        settings = self.settings
        progress = self.step / settings.steps
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (self.step + 1) / 20) * (1 - progress)
        batch = self.batch(self.step)
        total, found = self.objective(batch)
        terms: dict[str, float] = {}
        for name, value in found.items():
            weighted = self.objective.weights[name] * value.item()
            terms[loss_of(name)] = terms.get(loss_of(name), 0.0) + weighted
        self.optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        self.step += 1
        for side, controller in self.controllers.items():
            # It is texts never trained on whose sparsity was asked for: documents are longer here.
            if self.step % controller.every == 0:
                texts = self.held_out[side]
                looked_at = [texts[(self.step * 64 + n) % len(texts)] for n in range(64)]
                with torch.no_grad():
                    controller.observe(self.model(pad(looked_at)))
            controller.step()
        step = Step(
            self.step,
            terms,
            *(
                (texts.activations > 0).sum(1).double().mean().item()
                for texts in (batch.anchor, batch.positive)
            ),
        )
        self.history.append(step)
        return step

    def findings(self) -> dict[str, list[Finding]]:
        """What ``advise`` says of the last step's texts, by side; it changes nothing.

        A weight that is warming up is judged by what it will be: that is the setting to turn.
        """
        with torch.no_grad():
            batch = self.batch(max(self.step - 1, 0))
        weights = dict(self.objective.weights)
        self.objective.weights.update({n: self.schedule.base[n] for n in self.schedule.warmups})
        gradients = gradient_report(self.objective, batch)
        self.objective.weights.update(weights)
        found = {}
        for side, texts, other in (
            ("document", batch.positive, batch.anchor),
            ("query", batch.anchor, batch.positive),
        ):
            diagnostics = Diagnostics(
                self.tokens.vocab_size,
                special_token_ids=self.tokens.special_ids,
                stopword_ids=self.tokens.stopword_ids,
            )
            diagnostics.update(texts, other_side=other)
            found[side] = advise(diagnostics.report(), gradients, side=side)
        return found

    def encode(self, texts: Sequence[str], model: SparseEncoder | None = None) -> Tensor:
        """Vectors ``[texts, V]`` without gradient, by this run's model unless told otherwise."""
        model = model or self.model
        rows = self.tokens.ids(texts)
        with torch.no_grad():
            return torch.cat([model(pad(rows[i : i + 64])) for i in range(0, len(rows), 64)])

    def scores(self, rows: Sequence[Row], task: int) -> Tensor:
        """Cosines of all queries and documents of a task, ``[rows, rows]``."""
        queries, documents = pair_texts(rows, task)
        return cosine(self.encode(queries), self.encode(documents))

    def probe(self) -> Probe:
        """Rank some validation queries."""
        return Probe(self.step, ranking(self.scores(self.probe_rows, 0)))

    # Checkpoints ---------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write all that is needed to go on; a file cut short never takes the old one's place."""
        state = {
            "settings": dataclasses.asdict(self.settings),
            "data": self.data,
            "vocabulary": self.tokens.vocabulary(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "controllers": {s: one.state_dict() for s, one in self.controllers.items()},
            "step": self.step,
            "seconds": self.seconds,
            "history": [dataclasses.asdict(step) for step in self.history],
            "probes": [dataclasses.asdict(probe) for probe in self.probes],
        }
        partial = path.with_name(path.name + ".partial")
        torch.save(state, partial)
        os.replace(partial, path)
        for controller in self.controllers.values():
            controller.checkpoint = str(path)

    @staticmethod
    def peek(path: Path) -> tuple[int, dict[str, Any]]:
        """The step and the settings of a checkpoint.

        Raises:
            UserError: it cannot be read.
        """
        state = _read_checkpoint(path)
        return state["step"], state["settings"]

    def load(self, path: Path) -> None:
        """Go back to a checkpoint of the same settings and data.

        Raises:
            UserError: there is none, it cannot be read, or it belongs to another experiment.
        """
        state = _read_checkpoint(path)
        check_same_settings(path, state["settings"], self.settings)
        if state["data"] != self.data or state["vocabulary"] != self.tokens.vocabulary():
            raise UserError(
                f"{path} was trained on other texts: the pairs or the installed versions "
                "of Python and its packages have changed; start afresh without --resume"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        for side, controller in self.controllers.items():
            controller.load_state_dict(state["controllers"][side])
        self.step, self.seconds = state["step"], state["seconds"]
        self.history = [Step(**step) for step in state["history"]]
        self.probes = [Probe(one["step"], Ranking(**one["ranking"])) for one in state["probes"]]


def pair_texts(rows: Sequence[Row], task: int) -> tuple[list[str], list[str]]:
    """Queries and documents of one task."""
    pairs = [pair for row in rows for pair in row.pairs if pair.task == task]
    return [pair.query for pair in pairs], [pair.document for pair in pairs]


def cosine(queries: Tensor, documents: Tensor) -> Tensor:
    """Cosine similarities ``[queries, documents]``; an empty vector has 0 with everything."""
    normalize = torch.nn.functional.normalize
    return normalize(queries, dim=1) @ normalize(documents, dim=1).T


def _document_frequency(rows: Sequence[Sequence[int]], vocab_size: int) -> DocumentFrequency:
    counter = DocumentFrequency(vocab_size)
    for start in range(0, len(rows), 1000):
        texts = pad(rows[start : start + 1000])
        counter.update(texts.input_ids, texts.attention_mask)
    return counter


def _shuffled(items: int, length: int, generator: torch.Generator) -> Tensor:
    """One random order of the items after another, cut to ``length``."""
    epochs = -(-length // items)
    return torch.cat([torch.randperm(items, generator=generator) for _ in range(epochs)])[:length]


def _read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"nothing to resume: there is no {path}") from error
    except Exception as error:  # torch.load reports a damaged file in many ways
        raise UserError(f"{path} is not a checkpoint that can be read: {error}") from error
    if not isinstance(state, dict) or "settings" not in state:
        raise UserError(f"{path} is not a checkpoint of this demo")
    return state


def check_same_settings(path: Path, made_with: dict[str, Any], settings: Settings) -> None:
    """Check that a checkpoint can be gone on from with these settings.

    Raises:
        UserError: it cannot; the message names every difference.
    """
    if different := _differences(made_with, dataclasses.asdict(settings)):
        raise UserError(
            f"{path} was made with other settings: {'; '.join(different)}; "
            "repeat the options of the first run beside --resume"
        )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    found = []
    for name, value in new.items():
        was = old.get(name)
        if isinstance(was, dict) and isinstance(value, dict):
            found += [f"{name}.{one}" for one in _differences(was, value)]
        elif was != value:
            found.append(f"{name} was {was}, now {value}")
    return found
