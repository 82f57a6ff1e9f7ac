"""``python -m benchmarks.studies.battery``: does a target hold at first use?

Small models that the controller was not tuned to, trained by InfoNCE and FLOPS on the documents: a
tiny BERT with dropout, the same in a ``SparseEncoder`` and its trainer, a decoder with LoRA, a bag
of embeddings with two towers in a loop without an objective, and static queries; sparse and dense
starts, several learning rates, batches and lengths of the run. ``none`` trains without FLOPS: what
the ranking loss leaves by itself, and whether the run learns anything.

A third of the rows, chosen by a hash of their names, is held back: ``--held`` runs it. Do not tune
on it. After training the vectors of half of the held-out documents are pruned to two thirds of the
target, as the pages advise; the other half is measured.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparse_losses as sl
from benchmarks.run.table import circumstances, markdown, write
from sparse_losses.functional import flops_loss

V, TOPICS, PER_TOPIC, HELD_OUT = 4000, 300, 8, 600
LONGEST = {"query": 8, "document": 64}


@dataclasses.dataclass(frozen=True)
class Row:
    """One training."""

    model: str = "bert"  # bert, trainer, decoder, bag or static
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
    Row(steps=1000, lr=5e-4, decay=True, target=64),
    *(Row(batch=8), Row(batch=64, steps=200)),
    *(Row(bias=-2.0), Row(bias=-2.0, target=64, lr=1e-3)),
]
DOT = [
    *(Row(similarity="dot", lr=lr) for lr in (2e-3, 5e-4)),
    Row(similarity="dot", weight=3e-3, query_weight=3e-3),
    *(Row(similarity="dot", lr=1e-3, target=64), Row(similarity="dot", lr=1e-3, bias=-2.0)),
]
OTHERS = [
    *(Row("bag"), Row("bag", lr=5e-3), Row("bag", weight=1.0), Row("bag", lr=5e-3, steps=1000)),
    *(Row("bag", lr=5e-3, steps=100), Row("bag", lr=5e-3, bias=-1.0, target=64)),
    *(Row("static", "dot"), Row("static", "dot", lr=5e-4), Row("static", "dot", bias=-2.0)),
    *(Row("static", "dot", target=64, decay=True), Row("static", "dot", target=64, steps=1000)),
    *(Row("trainer", decay=True), Row("trainer", decay=True, target=64, bias=-2.0)),
    *(Row("trainer", lr=1e-3, decay=True, target=128), Row("decoder"), Row("decoder", target=64)),
]
ROWS = [*BERT, *DOT, *OTHERS]


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
        elif kind == "decoder":
            from peft import LoraConfig, get_peft_model
            from transformers import Qwen3Config, Qwen3ForCausalLM

            sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
            sizes |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
            config = Qwen3Config(vocab_size=V, tie_word_embeddings=True, **sizes)
            config.is_causal = False
            adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
            self.model = get_peft_model(Qwen3ForCausalLM(config), adapters)
            self.head = sl.SpladeHead.from_masked_lm(self.model)
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
        if self.kind == "bag":
            hidden = self.words(ids)
        else:
            lm = self.model.get_base_model() if self.kind == "decoder" else self.model
            hidden = lm.base_model(ids, mask)[0]
        vectors: Tensor = self.head(hidden, mask)
        return vectors


Encode = Callable[[str, Sequence[int]], Tensor]
CONTROLLERS = ("none", "controller")


def controller_of(row: Row, way: str, objective: sl.SpladeObjective | None) -> Any:
    """Return the package's controller, as a user would make it, or ``None``."""
    if way == "none":
        return None
    weight = {"weight": row.weight} if objective is None else {}
    return sl.SparsityController(objective, target_active=row.target, steps=row.steps, **weight)


def objective_of(row: Row, way: str) -> sl.SpladeObjective:
    """Return InfoNCE and the FLOPS of the documents, perhaps of the queries."""
    weights = {"info_nce": 1.0} | ({"document_flops": row.weight} if way != "none" else {})
    weights |= {"query_flops": row.query_weight} if way != "none" and row.query_weight else {}
    temperature = 0.05 if row.similarity == "cosine" else 1.0
    info_nce = sl.InfoNCELoss(temperature=temperature, similarity=row.similarity)  # type: ignore[arg-type]
    return sl.SpladeObjective(weights, info_nce=info_nce)


def in_a_loop(row: Row, way: str, texts: Texts) -> tuple[list[float], Any, Encode]:
    """Train; return the active dimensions by step, the controller and the encoder."""
    kind = "bert" if row.model == "static" else row.model
    document = Tower(kind, row.bias, texts.idf)
    query = document if row.model in ("bert", "decoder") else Tower(row.model, row.bias, texts.idf)
    objective = objective_of(row, way)
    controller = controller_of(row, way, None if row.model == "bag" else objective)
    towers = nn.ModuleList({id(tower): tower for tower in (query, document)}.values())
    optimizer = torch.optim.AdamW([p for p in towers.parameters() if p.requires_grad], lr=row.lr)
    factor = (lambda n: 1 - n / row.steps) if row.decay else (lambda n: 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    if controller is not None:
        controller.attach(optimizer)
    g, counts = torch.Generator().manual_seed(1000), []

    def encode(side: str, numbers: Sequence[int]) -> Tensor:
        vectors: Tensor = {"query": query, "document": document}[side](*texts.batch(side, numbers))
        return vectors

    with contextlib.suppress(sl.CollapseError):
        for _ in range(row.steps):
            chosen = torch.randint(len(texts.training), (row.batch,), generator=g)
            pick = [texts.training[i] for i in chosen]
            q, d = encode("query", pick), encode("document", pick)
            optimizer.zero_grad()
            if row.model == "bag" and controller is not None:
                ranking = objective.info_nce(q, d)
                controller.observe(d, info_nce=ranking)
                loss = ranking + controller.weight * flops_loss(d)
            else:
                loss = objective(sl.SpladeBatch(sl.Texts(q), sl.Texts(d))).total
            loss.backward()
            optimizer.step()
            schedule.step()
            counts.append((d > 0).sum(1).float().mean().item())
    towers.eval()
    return counts, controller, encode


def in_a_trainer(row: Row, way: str, texts: Texts) -> tuple[list[float], Any, Encode]:
    """Train a ``SparseEncoder`` with ``use_splade_head``, as its trainer does."""
    from datasets import Dataset
    from sentence_transformers import (
        SparseEncoder,
        SparseEncoderTrainer,
        SparseEncoderTrainingArguments,
    )
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from sparse_losses.integrations.sentence_transformers import (
        SentenceTransformersLoss,
        use_splade_head,
    )
    from sparse_losses.integrations.transformers import TrainingState

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "unk_token": "w1"}

    def columns(side: str, numbers: Sequence[int]) -> list[str]:
        ids, mask = texts.batch(side, numbers)
        rows = zip(ids.tolist(), mask.sum(1).tolist(), strict=True)
        return [" ".join(f"w{i}" for i in row[:n]) for row, n in rows]

    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
        Tower("bert", row.bias, texts.idf).model.save_pretrained(folder)
        transformer = Transformer(folder, transformer_task="fill-mask", max_seq_length=66)
        model = SparseEncoder(modules=[transformer, SpladePooling("max")], device="cpu")
        use_splade_head(model)
        objective, counts = objective_of(row, way), []
        controller = controller_of(row, way, objective)

        def count(_: Any, inputs: Any, output: Any) -> None:
            active = (inputs[0].positive.activations > 0).sum(1)
            counts.append(active.float().mean().item())

        objective.register_forward_hook(count)
        loss = SentenceTransformersLoss(model, objective)
        pairs = {side: columns(side, texts.training) for side in ("query", "document")}
        settings = SparseEncoderTrainingArguments(
            output_dir=folder,
            max_steps=row.steps,
            per_device_train_batch_size=row.batch,
            learning_rate=row.lr,
            lr_scheduler_type="linear" if row.decay else "constant",
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        states = [TrainingState(*filter(None, [controller]), loss=loss)]
        data = Dataset.from_dict(pairs)
        trainer = SparseEncoderTrainer(model, settings, data, loss=loss, callbacks=states)
        with contextlib.suppress(sl.CollapseError):
            trainer.train()
    model.eval()
    return (
        counts,
        controller,
        lambda side, numbers: model.encode(
            columns(side, numbers), convert_to_sparse_tensor=False, show_progress_bar=False
        ),
    )


def train(row: Row, way: str) -> dict[str, Any]:
    """Train once; return the row's figures."""
    torch.set_num_threads(1)
    texts = Texts()
    torch.manual_seed(0)
    learn = in_a_trainer if row.model == "trainer" else in_a_loop
    counts, controller, encode = learn(row, way, texts)
    with torch.no_grad():
        q, d = encode("query", texts.held_out), encode("document", texts.held_out)
    ratios = [max(count, 0.01) / row.target for count in counts]
    first = next((n for n, ratio in enumerate(ratios) if 1 / 1.5 <= ratio <= 1.5), None)
    # Of a few steps in a row, because a single batch says little.
    level = [max(statistics.mean(ratios[n : n + 10]), 1e-4) for n in range(first or 0, len(ratios))]
    wanted, half = row.target / 1.5, HELD_OUT // 2
    active = (d > 0).sum(1).double()
    pruned, rest = None, d
    if active[:half].mean() >= wanted:
        t = sl.calibrate_threshold(d[:half], wanted)
        rest = d * (d.expm1() > t)
        pruned = (rest[half:] > 0).sum(1).double().mean().item()
    return {
        "name": row.name,
        "held_back": row.held_back,
        "controller": way,
        "steps": row.steps,
        "target": row.target,
        "training": round(statistics.mean(counts[-max(row.steps // 20, 10) :]), 1),
        "held_out": round(active.mean().item(), 1),
        "wanted": round(wanted, 1),
        "calibrated": None if pruned is None else round(pruned, 1),
        "query": round((q > 0).sum(1).float().mean().item(), 1),
        "first_within_1.5": first,
        "largest_excursion": None if first is None else round(max(max(r, 1 / r) for r in level), 2),
        "recall_10": recall_10(q, d, row.similarity),
        "recall_10_calibrated": None if pruned is None else recall_10(q, rest, row.similarity),
        "status": "" if controller is None else controller.report()["status"],
    }


def recall_10(q: Tensor, d: Tensor, similarity: str) -> float:
    """Return the share of queries whose document is among the first ten; ties count half."""
    if similarity == "cosine":
        q, d = nn.functional.normalize(q), nn.functional.normalize(d)
    scores = q @ d.T
    positive = scores.diagonal()[:, None]
    rank = (scores > positive).sum(1) + ((scores == positive).sum(1) - 1) / 2
    return round((rank < 10).float().mean().item(), 3)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return one line per training with the controller; beside it the same one without FLOPS.

    The two columns of the latter are there if such a training is.
    """
    alone = {row["name"]: row for row in results if row["controller"] == "none"}
    lines = []
    for row in results:
        if row["controller"] == "controller":
            plain = alone.get(_plain_name(row["name"]), {})
            numbers = [row["target"], row["training"], row["held_out"], row["wanted"]]
            numbers += [row["calibrated"], row["recall_10"], row["recall_10_calibrated"]]
            cells = [row["name"] + (" *" if row["held_back"] in (True, "True") else ""), *numbers]
            cells += [plain.get(name, "") for name in ("training", "recall_10")] if alone else []
            lines.append([*cells, row["status"]])
    heading = ("training", "target", "in training", "held out", "pruned to", "then")
    heading += ("R@10", "R@10 pruned")
    heading += ("without FLOPS", "R@10 without") if alone else ()
    return markdown(
        (*heading, "last status"), [["" if x is None else x for x in line] for line in lines]
    )


def _plain_name(name: str) -> str:
    changes = ("target=", "weight=", "query_weight=")
    return " ".join(part for part in name.split() if not part.startswith(changes))


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
    runs = [(row, "controller") for row in chosen if "controller" in args.controllers]
    if "none" in args.controllers:  # then neither target nor weights matter
        plain = (
            dataclasses.replace(row, target=32, weight=0.01, query_weight=0.0) for row in chosen
        )
        runs += [(row, "none") for row in dict.fromkeys(plain)]
    results, common = [], circumstances(torch.device("cpu"), "battery")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        for run in [pool.submit(train, *run) for run in runs]:
            results.append(run.result())
            print(*results[-1].values(), flush=True)
            write(args.output, [common | row for row in results])
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
