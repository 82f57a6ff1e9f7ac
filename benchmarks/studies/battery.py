"""``python -m benchmarks.studies.battery``: does a target hold at first use?

Small models that the controller was not tuned to, trained in a loop of one's own by InfoNCE and
FLOPS on the documents: a tiny BERT with dropout, a bag of embeddings with two towers, and static
queries with documents alone; sparse and dense starts, several learning rates, batches and lengths
of the run. Three ways to steer: no FLOPS at all (what the target costs, and whether the run learns
anything), the package's controller, and ``Planned``, a candidate to replace it.

A third of the rows, chosen by a hash of their names, is held back: ``--held`` runs it. Do not tune
on it.
"""

import argparse
import csv
import dataclasses
import hashlib
import math
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparse_losses as sl

V, TOPICS, PER_TOPIC, HELD_OUT = 4000, 300, 8, 200
LONGEST = {"query": 8, "document": 64}


@dataclasses.dataclass(frozen=True)
class Row:
    """One training."""

    model: str = "bert"  # bert, bag or static
    similarity: str = "cosine"  # its temperature is 0.05, that of "dot" 1
    lr: float = 2e-3
    decay: bool = False  # linearly to 0
    batch: int = 32
    steps: int = 300
    target: float = 32
    weight: float = 0.01  # the first FLOPS weight of the documents
    query_weight: float = 0.0
    bias: float = 0.0  # below 0: a sparse start

    @property
    def name(self) -> str:
        """What differs from the first row."""
        plain = Row()
        fields = [f.name for f in dataclasses.fields(self)][2:]
        changed = [
            f"{f}={getattr(self, f)}" for f in fields if getattr(self, f) != getattr(plain, f)
        ]
        return " ".join([self.model, self.similarity, *changed])

    @property
    def held_back(self) -> bool:
        """Whether the row is not for tuning."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 3 == 0


BERT = [
    *(Row(lr=lr, weight=w) for lr in (2e-3, 5e-4) for w in (0.01, 3e-4)),
    *(Row(lr=lr, decay=True) for lr in (1e-3, 3e-3)),
    *(Row(target=target) for target in (64, 128)),
    *(Row(steps=100), Row(steps=100, target=64, decay=True)),
    *(Row(steps=1000), Row(steps=1000, lr=5e-4, decay=True, target=64)),
    *(Row(batch=8), Row(batch=64, steps=200)),
    *(Row(bias=-2.0), Row(bias=-2.0, target=64, lr=1e-3)),
]
DOT = [
    *(Row(similarity="dot", lr=lr) for lr in (2e-3, 5e-4)),
    *(Row(similarity="dot", weight=w, query_weight=w) for w in (3e-3, 0.1, 3e-4)),
    Row(similarity="dot", weight=3e-4, query_weight=3e-4, lr=5e-4),
    *(Row(similarity="dot", lr=1e-3, target=target) for target in (64, 128)),
    *(Row(similarity="dot", lr=1e-3, decay=True), Row(similarity="dot", lr=1e-3, steps=100)),
    *(Row(similarity="dot", lr=5e-4, steps=1000), Row(similarity="dot", lr=1e-3, batch=8)),
    Row(similarity="dot", lr=1e-3, bias=-2.0),
]
BAG = [
    *(Row("bag"), Row("bag", lr=5e-3), Row("bag", "dot")),
    Row("bag", "dot", weight=3e-3, query_weight=3e-3),
    *(Row("bag", target=64, steps=1000), Row("bag", steps=100), Row("bag", bias=-1.0, target=64)),
]
STATIC = [
    *(Row("static", "dot"), Row("static", "dot", lr=5e-4), Row("static", "dot", bias=-2.0)),
    *(Row("static", "dot", target=64, decay=True), Row("static", "dot", target=64, steps=1000)),
]
ROWS = [*BERT, *DOT, *BAG, *STATIC]


class Texts:
    """Documents and queries of topics; half of a document's words are anybody's (Zipf)."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(7)
        anybody = 1.0 / torch.arange(1, V - 4)
        words = [torch.randperm(V - 205, generator=g)[:24] + 205 for _ in range(TOPICS)]
        self.documents, self.queries = [], []
        document_frequency = torch.zeros(V)
        for topic in range(TOPICS * PER_TOPIC):
            own = words[topic // PER_TOPIC][torch.randperm(24, generator=g)[:8]]
            for kind, shortest, longest, share in (
                (self.documents, 12, 65, 0.5),
                (self.queries, 3, 7, 0.7),
            ):
                n = int(torch.randint(shortest, longest, (1,), generator=g))
                topical = own[torch.randint(8, (n,), generator=g)]
                others = torch.multinomial(anybody, n, replacement=True, generator=g) + 5
                kind.append(torch.where(torch.rand(n, generator=g) < share, topical, others))
            document_frequency[self.documents[-1].unique()] += 1
        n = len(self.documents)
        self.idf = ((n - document_frequency + 0.5) / (document_frequency + 0.5) + 1).log()
        order = torch.randperm(n, generator=g).tolist()
        self.held_out, self.training = order[:HELD_OUT], order[HELD_OUT:]

    def batch(self, side: str, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return ids between two special tokens, and the mask."""
        texts = [
            getattr(self, {"query": "queries", "document": "documents"}[side])[i] for i in numbers
        ]
        ends = torch.tensor([2]), torch.tensor([3])
        rows = [torch.cat([ends[0], text[: LONGEST[side]], ends[1]]) for text in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return ids, (ids > 0).long()


class Tower(nn.Module):
    """An encoder with the package's head; ``static`` is the query side without a model."""

    def __init__(self, kind: str, bias: float, idf: Tensor) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("idf", idf)
        if kind == "bert":
            from transformers import BertConfig, BertForMaskedLM

            sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
            config = BertConfig(
                vocab_size=V, intermediate_size=128, max_position_embeddings=80, **sizes
            )
            self.model = BertForMaskedLM(config)
            self.head = sl.SpladeHead.from_masked_lm(self.model)
            with torch.no_grad():
                self.model.get_output_embeddings().bias.fill_(0.15 * bias)
        elif kind == "bag":
            self.words, self.out = nn.Embedding(V, 64), nn.Linear(64, V)
            nn.init.normal_(self.words.weight, std=0.3)
            with torch.no_grad():
                self.out.bias.fill_(bias)
            self.head = sl.SpladeHead(self.out.weight, self.out.bias)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors."""
        if self.kind == "static":
            weights = self.idf[ids] * mask * (ids > 4)
            return torch.zeros(len(ids), V).scatter_(1, ids, weights)
        hidden = self.model.base_model(ids, mask)[0] if self.kind == "bert" else self.words(ids)
        vectors: Tensor = self.head(hidden, mask)
        return vectors


class Planned:
    """A controller that waits, plans a descent over the run, and comes from above.

    FLOPS is off until the active dimensions have stopped falling by themselves and InfoNCE is below
    85% of chance. Then its weight starts at 3% of the ranking loss, and follows the plan that
    log(active) falls in a line to 1.12 times the target after 55% of the remaining steps. It pauses
    (weight 0) while a fall would end below the target, or while texts die.
    """

    def __init__(self, objective: Any, row: Row) -> None:
        self.objective, self.target, self.steps = objective, row.target, row.steps
        self.number, self.status, self.started = 0, "waiting", 0
        self.level = self.trend = self.log_weight = self.first = self.loss = self.dead = 0.0
        objective.weights["document_flops"] = 0.0

    def attach(self, optimizer: Any) -> None:
        """Follow the objective's batches and the optimiser's steps."""
        self.objective.register_forward_hook(self._watch)
        optimizer.register_step_post_hook(lambda *_: self._step())

    def report(self) -> dict[str, str]:
        """Return the status."""
        return {"status": self.status}

    def _watch(self, objective: Any, inputs: Any, output: Any) -> None:
        x = inputs[0].positive.activations.detach()
        active = (x > 0).sum(1).float()
        live = (active > 0).float().mean().item()
        self.seen = active.sum().item() / max(live * len(x), 1), 1 - live
        self.flops, self.chance = x.mean(0).square().sum().item(), math.log(len(x))
        self.ranking = output.terms["info_nce"].item()

    def _step(self) -> None:
        (active, dead), self.number = self.seen, self.number + 1
        level = math.log(max(active, 0.5) / self.target)
        if self.number == 1:
            self.level, self.loss, self.dead = level, self.ranking, dead
        window = min(max(self.steps / 40, 4.0), 12.0)
        kept = math.exp(-1 / window) if self.number > 5 else 0.5
        expected = self.level + self.trend
        self.level = expected + (1 - kept**2) * (level - expected)
        self.trend += (1 - kept) ** 2 * (level - expected)
        self.loss += 0.2 * (self.ranking - self.loss)
        self.dead += 0.3 * (dead - self.dead)
        if not self.started:
            learns = self.loss < 0.85 * self.chance
            if not (learns and self.number >= 5 and self.trend > -0.03 and self.level > 0):
                self.status = "waiting" if learns or self.number < 50 else "ranking loss at chance"
                return
            self.started, self.first = self.number, self.level
            self.log_weight = math.log(0.03 * max(self.loss, 0.05) / max(self.flops, 1e-12))
            self.lowest = self.log_weight - 7
        self._steer()

    def _steer(self) -> None:
        aim, length = math.log(1.12), 0.55 * (self.steps - self.started)
        left = max(self.started + length - self.number, 0.0)
        planned = aim + max(self.first - aim, 0.0) * left / length
        slope = -(self.first - aim) / length if left else 0.0
        gain, most = min(max(15 / self.steps, 0.02), 0.15), min(max(40 / self.steps, 0.06), 0.4)
        change = gain * (self.level - planned) + (self.trend - slope)
        change = max(min(change, most), -0.4)
        pauses = (self.trend < -0.02 and self.level + 8 * self.trend < -0.1) or self.dead > 0.05
        self.log_weight = max(
            self.log_weight + (min(change, -0.05) if pauses else change), self.lowest
        )
        is_off = pauses or self.log_weight == self.lowest
        self.objective.weights["document_flops"] = 0.0 if is_off else math.exp(self.log_weight)
        names = (
            ("pausing", pauses),
            ("sparsifying", self.level > 0.3),
            ("relaxing", self.level < -0.05),
        )
        self.status = next((name for name, applies in names if applies), "on target")


def present(objective: Any, row: Row) -> Any:
    """Return the package's controller, as a user would make it."""
    return sl.SparsityController(objective, target_active=row.target)


CONTROLLERS: dict[str, Callable[[Any, Row], Any] | None] = {
    "none": None,
    "present": present,
    "planned": Planned,
}


def train(row: Row, way: str) -> dict[str, Any]:
    """Train once; return the row's figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts, make = Texts(), CONTROLLERS[way]
    kinds = {"bert": ("bert", "bert"), "bag": ("bag", "bag"), "static": ("static", "bert")}[
        row.model
    ]
    document = Tower(kinds[1], row.bias, texts.idf)
    query = document if row.model == "bert" else Tower(kinds[0], row.bias, texts.idf)
    weights = {"info_nce": 1.0} | ({"document_flops": row.weight} if make else {})
    weights |= {"query_flops": row.query_weight} if make and row.query_weight else {}
    temperature = 0.05 if row.similarity == "cosine" else 1.0
    info_nce = sl.InfoNCELoss(temperature=temperature, similarity=row.similarity)  # type: ignore[arg-type]
    objective = sl.SpladeObjective(weights, info_nce=info_nce)
    towers = nn.ModuleList({id(tower): tower for tower in (query, document)}.values())
    optimizer = torch.optim.AdamW(towers.parameters(), lr=row.lr)
    factor = (lambda n: 1 - n / row.steps) if row.decay else (lambda n: 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    controller = make(objective, row) if make else None
    if controller is not None:
        controller.attach(optimizer)
    g, counts, status = torch.Generator().manual_seed(1000), [], ""
    try:
        for _ in range(row.steps):
            chosen = torch.randint(len(texts.training), (row.batch,), generator=g)
            pick = [texts.training[i] for i in chosen]
            vectors = query(*texts.batch("query", pick)), document(*texts.batch("document", pick))
            optimizer.zero_grad()
            objective(sl.SpladeBatch(*map(sl.Texts, vectors))).total.backward()
            optimizer.step()
            schedule.step()
            counts.append((vectors[1] > 0).sum(1).float().mean().item())
            status = controller.report()["status"] if controller else ""
    except sl.CollapseError:
        status = "CollapseError"
    return _figures(row, way, counts, status, texts, towers.eval(), query, document)


@torch.no_grad()
def _figures(
    row: Row, way: str, counts: list[float], status: str, texts: Texts, *towers: nn.Module
) -> dict[str, Any]:
    _, query, document = towers
    q, d = (
        query(*texts.batch("query", texts.held_out)),
        document(*texts.batch("document", texts.held_out)),
    )
    if row.similarity == "cosine":
        q, d = nn.functional.normalize(q), nn.functional.normalize(d)
    scores = q @ d.T
    positive = scores.diagonal()[:, None]
    rank = (scores > positive).sum(1) + ((scores == positive).sum(1) - 1) / 2  # ties count half
    ratios = [max(count, 0.01) / row.target for count in counts]
    first = next((n for n, ratio in enumerate(ratios) if 1 / 1.5 <= ratio <= 1.5), None)
    tail = counts[-max(len(counts) // 20, 5) :]
    return {
        "name": row.name,
        "held_back": row.held_back,
        "controller": way,
        "steps": row.steps,
        "target": row.target,
        "training": round(sum(tail) / len(tail), 1),
        "held_out": round((d > 0).sum(1).float().mean().item(), 1),
        "query": round((q > 0).sum(1).float().mean().item(), 1),
        "first_within_1.5": first,
        "largest_excursion": None
        if first is None
        else round(max(max(r, 1 / r) for r in ratios[first:]), 2),
        "recall_10": round((rank < 10).float().mean().item(), 3),
        "status": status,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows, print each, and write the CSV."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.studies.battery")
    options.add_argument("--controllers", nargs="+", choices=CONTROLLERS, default=[*CONTROLLERS])
    options.add_argument("--only", nargs="+", default=[], help="names of rows")
    options.add_argument("--held", action="store_true", help="the rows that are held back, alone")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--output", type=Path, default=Path("battery.csv"))
    args = options.parse_args(arguments)
    chosen = [
        row
        for row in ROWS
        if row.name in args.only or (not args.only and row.held_back == args.held)
    ]
    results = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        runs = [pool.submit(train, row, way) for row in chosen for way in args.controllers]
        for run in runs:
            results.append(run.result())
            print(*results[-1].values(), flush=True)
    with args.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, results[0])
        writer.writeheader()
        writer.writerows(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
