"""``python -m benchmarks.studies.battery``: short trainings of small models on artificial topics.

A tiny BERT with dropout, a decoder with LoRA, a bag of embeddings with two towers, and static
queries; sparse and dense starts, several learning rates, batches and lengths of the run. A third of
the rows, chosen by a hash of their names, and all of ``NEW`` are held back: nothing was tuned on
them. Rows that differ only in what an arm does not use are one training. ``--start`` varies where
the models start instead.
"""

import argparse
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparse_losses as sl
from benchmarks.run.table import read
from benchmarks.studies.learn import Results, Settings, Towers, figures_at, table, train

V, TOPICS, PER_TOPIC, HELD_OUT = 4000, 300, 8, 600


@dataclasses.dataclass(frozen=True)
class Row:
    """A model and how it is trained."""

    model: str = "bert"  # bert, decoder, bag or static
    similarity: str = "cosine"  # its temperature is 0.05, that of "dot" 1
    lr: float = 2e-3
    decay: bool = False  # linearly to 0
    batch: int = 32
    steps: int = 300
    target: float = 32
    bias: float = 0.0  # below 0: a sparse start

    @property
    def name(self) -> str:
        """What differs from the first row."""
        fields = dataclasses.fields(self)[2:]
        changed = [(f.name, getattr(self, f.name), f.default) for f in fields]
        named = [f"{name}={value}" for name, value, default in changed if value != default]
        return " ".join([self.model, self.similarity, *named])

    @property
    def held_back(self) -> bool:
        """Whether nothing was tuned on the row."""
        return self in NEW or int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 3 == 0


BERT = [
    *(Row(lr=lr) for lr in (2e-3, 5e-4)),
    *(Row(lr=lr, decay=True) for lr in (1e-3, 3e-3)),
    *(Row(target=target) for target in (64, 128)),
    *(Row(batch=8), Row(batch=64, steps=200)),
    *(Row(bias=-2.0), Row(bias=-2.0, target=64, lr=1e-3)),
    *(Row(decay=True), Row(decay=True, target=64, bias=-2.0)),  # former rows of a trainer
    Row(lr=1e-3, decay=True, target=128),
    *(Row(similarity="dot", lr=lr) for lr in (2e-3, 5e-4)),
    *(Row(similarity="dot", lr=1e-3, target=64), Row(similarity="dot", lr=1e-3, bias=-2.0)),
]
OTHERS = [
    *(Row("bag"), Row("bag", lr=5e-3), Row("bag", lr=5e-3, bias=-1.0, target=64)),
    *(Row("static", "dot"), Row("static", "dot", lr=5e-4), Row("static", "dot", bias=-2.0)),
    Row("static", "dot", target=64, decay=True),
    *(Row("decoder"), Row("decoder", target=64)),
]
SHORT = [Row(steps=100), Row(steps=100, target=64, decay=True), Row("bag", lr=5e-3, steps=100)]
LONG = [
    Row(steps=1000, lr=5e-4, decay=True, target=64),
    *(Row("bag", lr=5e-3, steps=1000), Row("static", "dot", target=64, steps=1000)),
]
NEW = [
    *(Row(lr=1e-3, batch=16, target=16), Row(similarity="dot", lr=1e-3, decay=True, target=16)),
    *(Row("bag", "dot", lr=5e-3, target=16), Row("static", "cosine", lr=1e-3, target=16)),
]
ROWS = [*NEW, *BERT, *OTHERS, *SHORT, *LONG]
SPARSE = 1 / 4  # the start of all arms that shift: it suits all models but static queries
ARMS: dict[str, dict[str, Any]] = {
    "prune": {},
    "shift": {"start": SPARSE},
    "gain": {"start": SPARSE, "acts": "gain"},
    "topk": {"start": SPARSE, "acts": "topk"},
    "topk90": {"start": SPARSE, "acts": "topk", "late": (0.9, 0.95)},
    "fixed": {"acts": "fixed"},
    "flops": {"start": SPARSE, "acts": "fixed", "weight": 1000.0},
}
STARTS = (0.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 64)
STARTED = [
    *(Row(), Row("static", "dot"), Row("bag"), Row(similarity="dot"), Row("static")),
    *(Row("bag", "dot", lr=5e-3), Row(lr=5e-4), Row("bag", lr=5e-3)),
]


class Texts:
    """Documents and queries of topics; half of a document's words are anybody's (Zipf)."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(7)
        anybody = 1.0 / torch.arange(1, V - 4)
        words = [torch.randperm(V - 205, generator=g)[:24] + 205 for _ in range(TOPICS)]
        documents, queries = list[Tensor](), list[Tensor]()
        document_frequency = torch.zeros(V)
        for topic in range(TOPICS * PER_TOPIC):
            own = words[topic // PER_TOPIC][torch.randperm(24, generator=g)[:8]]
            for kind, shortest, longest, share in ((documents, 12, 65, 0.5), (queries, 3, 7, 0.7)):
                n = int(torch.randint(shortest, longest, (1,), generator=g))
                topical = own[torch.randint(8, (n,), generator=g)]
                others = torch.multinomial(anybody, n, replacement=True, generator=g) + 5
                kind.append(torch.where(torch.rand(n, generator=g) < share, topical, others))
            document_frequency[torch.unique(documents[-1])] += 1
        n = len(documents)
        self.idf = ((n - document_frequency + 0.5) / (document_frequency + 0.5) + 1).log()
        order = torch.randperm(n, generator=g).tolist()
        start, end = torch.tensor([2]), torch.tensor([3])
        made = zip(queries, documents, strict=True)
        pairs = [(torch.cat([start, q[:8], end]), torch.cat([start, d[:64], end])) for q, d in made]
        self.pairs = [pairs[i] for i in order[HELD_OUT:]]
        self.queries, self.documents = ([pairs[i][n] for i in order[:HELD_OUT]] for n in (0, 1))


class Tower(nn.Module):
    """An encoder with the package's head; ``static`` is the query side without a model."""

    def __init__(self, kind: str, bias: float, idf: Tensor) -> None:
        super().__init__()
        self.kind, self.bias = kind, nn.Parameter(torch.zeros(V)) if kind != "static" else None
        self.idf: Tensor
        self.register_buffer("idf", idf)
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 128, "vocab_size": V}
        model: Any
        if kind == "bert":
            from transformers import BertConfig, BertForMaskedLM

            model = BertForMaskedLM(BertConfig(max_position_embeddings=80, **sizes))
            transform, weight = (
                model.cls.predictions.transform,
                model.cls.predictions.decoder.weight,
            )
            self.model = model.base_model
            self.head = sl.SpladeHead(weight, self.bias, transform=transform)
        elif kind == "decoder":
            from peft import LoraConfig, get_peft_model
            from transformers import Qwen3Config, Qwen3ForCausalLM

            sizes |= {"num_key_value_heads": 2, "head_dim": 16}
            config = Qwen3Config(tie_word_embeddings=True, **sizes)
            config.is_causal = False
            adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
            model = get_peft_model(Qwen3ForCausalLM(config), adapters).get_base_model()
            self.model = model.base_model
            self.head = sl.SpladeHead(model.get_output_embeddings().weight, self.bias)
        elif kind == "bag":
            self.model, out = nn.Embedding(V, 64), nn.Linear(64, V)
            nn.init.normal_(self.model.weight, std=0.3)
            self.head = sl.SpladeHead(out.weight, self.bias)
        if self.bias is not None:
            nn.init.constant_(self.bias, 0.15 * bias if kind == "bert" else bias)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors."""
        if self.kind == "static":
            weights = self.idf[ids] * mask * (ids > 4)
            return torch.zeros(len(ids), V).scatter_(1, ids, weights)
        hidden = self.model(ids) if self.kind == "bag" else self.model(ids, mask)[0]
        return self.head(hidden, mask)  # type: ignore[no-any-return]


def towers_of(row: Row, texts: Texts) -> Towers:
    """Return the towers of both sides: one, but for a bag or static queries."""
    document = Tower("bert" if row.model == "static" else row.model, row.bias, texts.idf)
    shared = row.model in ("bert", "decoder")
    query = document if shared else Tower(row.model, row.bias, texts.idf)
    return {"query": query, "document": document}


def recall_10(similarity: str) -> Callable[[Tensor, Tensor], Mapping[str, float]]:
    """Return the share of queries whose document is among the first ten; ties count half."""

    def rank(q: Tensor, d: Tensor) -> Mapping[str, float]:
        if similarity == "cosine":
            q, d = nn.functional.normalize(q), nn.functional.normalize(d)
        scores = q @ d.T
        positive = scores.diagonal()[:, None]
        place = (scores > positive).sum(1) + ((scores == positive).sum(1) - 1) / 2
        return {"recall_10": (place < 10).float().mean().item()}

    return rank


def run(row: Row, arm: Mapping[str, Any], texts: Texts, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Train once; yield the figures, unpruned and pruned for the targets that share it."""
    settings = _settings(row, arm, seed)
    same = _alone(row), settings
    torch.manual_seed(seed)
    about, encode = train(towers_of(row, texts), texts.pairs, settings)
    q, d = encode("query", texts.queries), encode("document", texts.documents)
    alike = [one for one in ROWS if (_alone(one), _settings(one, arm, seed)) == same]
    targets = [row.target, *(one.target for one in alike)]
    asked = [point for n in targets for point in ((0.75 * n, n), (n / 2, n / 2))]
    first = {"row": _alone(row), "bias": row.bias, "decay": row.decay, "held_back": row.held_back}
    for figures in figures_at(q, d, asked, recall_10(row.similarity)):
        yield first | about | figures


def _settings(row: Row, arm: Mapping[str, Any], seed: int) -> Settings:
    steered = arm.get("acts") in ("gain", "topk")
    same = {key: getattr(row, key) for key in ("steps", "batch", "lr", "decay", "similarity")}
    same |= {"target": row.target, "query_target": 0.75 * row.target} if steered else {}
    temperature = 0.05 if row.similarity == "cosine" else 1.0
    return Settings(temperature=temperature, seed=seed, **same, **arm)


def _alone(row: Row) -> str:
    return dataclasses.replace(row, target=32.0).name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing in the CSV."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.studies.battery")
    options.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    options.add_argument("--only", nargs="+", default=[], help="names of rows")
    options.add_argument("--start", action="store_true", help="vary the start, alone")
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--output", type=Path, help="the CSV; default: battery.csv or start.csv")
    args = options.parse_args(arguments)
    torch.set_num_threads(1)
    study = "start" if args.start else "battery"
    results = Results(args.output or Path(f"{study}.csv"), study, ("row", "arm", "seed"))
    arms = [{"start": share} for share in STARTS] if args.start else [ARMS[a] for a in args.arms]
    rows = STARTED if args.start else ROWS
    texts = Texts()
    for seed in args.seeds:
        for row in [row for row in rows if not args.only or row.name in args.only]:
            for arm in arms:
                named = _settings(row, arm, seed).arm
                if results.missing(row=_alone(row), arm=named, seed=seed):
                    results.add(run(row, arm, texts, seed))
    print(table(read(results.path), ["row"], "recall_10"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
