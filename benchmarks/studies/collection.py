"""Test collections in the format of BEIR: our recipe beside BM25 and sentence-transformers.

Training sees the documents alone, never the queries, which then rank all documents. The controller
of the sparsity, and the threshold that prunes, are given the documents that are ranked, as when an
index is built.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.run.table import circumstances, write
from benchmarks.studies.against_sentence_transformers import (
    BASELINES,
    OURS,
    TEACHER,
    THEIRS,
    Arm,
    TheirRun,
)
from benchmarks.studies.beir import Collection, costs, difference, load, ranked
from benchmarks.studies.runs import Result, markdown, publish, run_all, sources_of, spread
from examples.demo.corpus import Corpus
from examples.demo.evaluation import bm25_scores
from examples.demo.tokens import Tokens, pad
from examples.demo.training import Run
from sparse_losses import (
    RECOMMENDED,
    ActivationFrequency,
    FlopsLoss,
    Preset,
    SparsityController,
    SpladeBatch,
    SpladeEncoder,
)
from sparse_losses.functional import calibrate_threshold, flops_loss

QUERY_LENGTH = 32  # tokens; documents are cut at the demo's 64
DECAY = 0.9  # of the posting lists that DF-FLOPS sees: ten batches
SETTINGS = ("model", "steps", "seed")  # those in the table
FORMS = {  # of the figures in the table
    "ndcg_10": "{:.3f}",
    "mrr_10": "{:.3f}",
    "recall_100": "{:.3f}",
    "active_query": "{:.1f}",
    "active_document": "{:.1f}",
    "products": "{:.2f}",
    "longest_list": "{:.3f}",
}


@dataclasses.dataclass(frozen=True)
class Training(Arm):
    """The settings of a training.

    Attributes:
        model: a masked language model of transformers; if empty, the demo's transformer.
        calibrate: active dimensions to which the documents are pruned afterwards.
    """

    model: str = ""
    calibrate: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class PostingTraining(Training):
    """The settings of a training whose FLOPS of the documents sees posting lists (DF-FLOPS).

    Attributes:
        posting: the share of the documents that the controller lets the longest list hold; if 0,
            its target are active dimensions.
    """

    posting: float = 0.0


@dataclasses.dataclass(frozen=True)
class ChangedTraining(Training):
    """The settings of a training with a changed control of the sparsity.

    Attributes:
        one_weight: whether the controller of the documents sets the weight of the queries' FLOPS.
        planned: the steps for which the descent is planned, over those of the training.
    """

    one_weight: bool = False
    planned: float = 1.0


class CollectionRun(Run):
    """The demo's training with short queries, and without dropout if the model is pretrained."""

    def __init__(self, corpus: Corpus, settings: Training) -> None:
        self.pretrained = pretrained(settings.model) if settings.model else None
        super().__init__(corpus, settings)
        self.query_tokens = copy.copy(self.tokens)
        self.query_tokens.max_length = QUERY_LENGTH
        self.queries = self.query_tokens.ids([row.pairs[0].query for row in corpus.train])
        self.held_out["query"] = self.queries  # the collection's own queries are for the test alone

    def learn(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of the pretrained model, or learn them."""
        if self.pretrained is None:
            return super().learn(texts)
        tokenizer = self.pretrained.tokenizer
        plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        plain.post_processor = None
        plain.no_truncation()
        tokens = Tokens(plain, self.settings.size.max_length)
        tokens.marks = tokenizer.cls_token_id, tokenizer.sep_token_id
        tokens.special_ids = tuple(tokenizer.all_special_ids)
        tokens.vocab_size = self.pretrained.vocab_size
        return tokens

    def untrained(self) -> Any:
        """Return the model as it was before the first step."""
        return super().untrained() if self.pretrained is None else copy.deepcopy(self.pretrained)


class PostingRun(CollectionRun):
    """The same training with the weight of DF-FLOPS in the documents' FLOPS."""

    def __init__(self, corpus: Corpus, settings: PostingTraining) -> None:
        super().__init__(corpus, settings)
        self.frequency = ActivationFrequency(self.tokens.vocab_size, decay=DECAY)
        self.token_weight = torch.zeros(self.tokens.vocab_size)
        self.objective.flops = FlopsLoss(self.token_weight)
        if settings.posting:
            steps, posting = settings.steps, settings.posting
            controller = SparsityController(self.objective, target_posting=posting, steps=steps)
            controller.attach(self.optimizer, observe=False)
            self.controllers["document"] = controller

    def loss(self, batch: SpladeBatch) -> tuple[Tensor, dict[str, float]]:
        """Return the objective's value; the queries' FLOPS, of the same module, is unweighted."""
        self.frequency.update(batch.positive.activations)
        self.token_weight.copy_(self.frequency.penalty() ** 2)
        total, terms = super().loss(batch)
        queries, weight = batch.anchor.activations, self.objective.weights["query_flops"]
        plain, weighted = flops_loss(queries), flops_loss(queries, self.token_weight)
        terms["query_flops"] = (weight * plain).item()
        return total + weight * (plain - weighted), terms


class ChangedRun(CollectionRun):
    """The same training with one weight for the FLOPS of both sides, or a slower descent."""

    def __init__(self, corpus: Corpus, settings: ChangedTraining) -> None:
        super().__init__(corpus, settings)
        self.controllers["document"].steps = int(settings.planned * settings.steps)
        self.one_weight = settings.one_weight

    def loss(self, batch: SpladeBatch) -> tuple[Tensor, dict[str, float]]:
        """Return the objective's value."""
        if self.one_weight:
            self.objective.weights["query_flops"] = self.objective.weights["document_flops"]
        return super().loss(batch)


class TheirCollectionRun(CollectionRun, TheirRun):
    """The same training with the losses of sentence-transformers."""


RUNS = {OURS: CollectionRun, THEIRS: TheirCollectionRun}
OF_SETTINGS = {PostingTraining: PostingRun, ChangedTraining: ChangedRun}
# Changes of RECOMMENDED, and of the control of its sparsity.
HOTTER = RECOMMENDED.replace(temperature=2.0)
CHANGES: dict[str, tuple[Preset, dict[str, Any]]] = {
    "temperature 2": (HOTTER, {}),
    "temperature 2, query target 24": (HOTTER.replace(target_active={"query_flops": 24}), {}),
    "temperature 2, one weight": (
        HOTTER.replace(warmup={"document_flops": 0.5}),
        {"one_weight": True},
    ),
    "temperature 2, a slower descent": (HOTTER, {"planned": 1.5}),
}


def pretrained(name: str) -> SpladeEncoder:
    """Return a masked language model and its tokenizer, or exit with the reason why not."""
    try:
        from transformers import AutoModelForMaskedLM, AutoTokenizer

        model, tokenizer = (
            kind.from_pretrained(name) for kind in (AutoModelForMaskedLM, AutoTokenizer)
        )
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"error: cannot load the --model {name}: {error}") from error
    if not tokenizer.is_fast or None in (tokenizer.cls_token_id, tokenizer.sep_token_id):
        raise SystemExit(f"error: the --model {name} lacks a fast tokenizer with [CLS] and [SEP]")
    return SpladeEncoder(model, tokenizer)


def run_one(settings: Training, collection: Collection) -> Result:
    """Train once; return the figures of the model, of its pruned documents and of BM25."""
    run = OF_SETTINGS.get(type(settings), RUNS[settings.system])(collection, settings)
    run.train()
    sides = [(run.query_tokens, collection.queries), (run.tokens, collection.documents)]
    queries, documents = (vectors(run, tokens.ids(texts)) for tokens, texts in sides)

    def figures(of_queries: Tensor, of_documents: Tensor) -> dict[str, Any]:
        both = (of_queries, of_documents)
        active = [[one.nonzero().flatten().tolist() for one in x] for x in both]
        return {**ranked(of_queries @ of_documents.T, collection.relevant), **costs(*active)}

    rows = {"": figures(queries, documents)}
    for target in settings.calibrate:
        if settings.system == OURS and 0 < settings.number <= target:
            continue
        if rows[""]["active_document"] <= target:
            rows[f", pruned to {target}"] = rows[""]
            continue
        for method, vectors_of in fewer(queries, documents, target).items():
            if method == "pruned" or settings.system == OURS:
                rows[f", {method} to {target}"] = figures(*vectors_of)
    baselines = {}
    for name, split in zip(BASELINES, (Tokens.words, Tokens.pieces), strict=True):
        terms = [split(*side) for side in sides]
        baselines[name] = {**ranked(bm25_scores(*terms), collection.relevant), **costs(*terms)}
    packages = ("bm25s", "tokenizers", *["transformers"] * bool(settings.model))
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "sources": collection.sources,
        "seconds": round(run.seconds, 1),
        "controllers": {side: one.report() for side, one in run.controllers.items()},
        "rows": rows,
        "baselines": baselines,
        "machine": circumstances(torch.device("cpu"), "collection") | versions,
    }


def fewer(queries: Tensor, documents: Tensor, target: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return queries and documents by the method that leaves documents ``target`` dimensions."""
    threshold = calibrate_threshold(documents, target)
    top = documents.topk(target)
    largest = torch.zeros_like(documents).scatter_(1, top.indices, top.values)
    shifted = [(x.expm1() - threshold).relu().log1p() for x in (queries, documents)]
    return {
        "pruned": (queries, documents.where(documents.expm1() > threshold, 0.0)),
        "cut": (queries, largest),
        "shifted": (shifted[0], shifted[1]),
    }


def vectors(run: Run, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the vectors ``[texts, V]`` of token ids."""
    with torch.no_grad():
        return torch.cat([run.model(**pad(rows[i : i + 64])) for i in range(0, len(rows), 64)])


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line and read the folders."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.collection",
        description=f"{__doc__} Finished runs are kept: repeat the command to continue.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="folders in BEIR's format")
    add("--split", default="test", help="the judgements: qrels/SPLIT.tsv")
    add("--model", default="", help="a masked language model; default: the demo's transformer")
    add("--target", type=int, nargs="+", default=[64, 32], help="targets of RECOMMENDED")
    add("--calibrate", type=int, nargs="*", default=[32], help="prune documents to these")
    posting = "train RECOMMENDED with DF-FLOPS too, and to these shares of the longest list"
    add("--posting", type=float, nargs="*", metavar="SHARE", help=posting)
    add(
        "--change", nargs="*", choices=CHANGES, default=[], help="train RECOMMENDED with these, too"
    )
    weights = "weights of their regularisers, if sentence-transformers is installed"
    add("--weights", type=float, nargs="*", default=[0.1, 0.3], help=weights)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of every training")
    add("--steps", type=int, nargs=1, default=[250], help="steps per training")
    add("--jobs", type=int, default=1, help="parallel trainings")
    add("--reference", help="the row to compare with (by default the first)")
    add("--output", type=Path, default=Path("collection"), help="folder for runs and tables")
    options = parser.parse_args(arguments)
    if options.model:
        pretrained(options.model)  # its error ends this process, not one of the trainings
    if options.weights and importlib.util.find_spec("sentence_transformers") is None:
        print("sentence-transformers is not installed: its rows are left out (make bench-peers)")
        options.weights = []
    options.collections = {}
    for folder in options.data:
        collection = load(folder, options.split)
        (name,) = collection.sources
        if name in options.collections:
            parser.error(f"two folders of --data are called {name}")
        options.collections[name] = collection
    options.corpora = list(options.collections)
    options.variants = {f"RECOMMENDED, target {n}": (OURS, n, True) for n in options.target} | {
        f"{THEIRS}, weight {weight:g}{TEACHER * teacher}": (THEIRS, weight, teacher)
        for teacher in (True, False)
        for weight in options.weights
    }
    if options.posting is not None:  # the last field: the share
        options.variants |= {
            f"RECOMMENDED, target {n}, DF-FLOPS": (OURS, n, True, 0.0) for n in options.target
        } | {
            f"RECOMMENDED, longest list {share:g}, DF-FLOPS": (OURS, 0, True, share)
            for share in options.posting
        }
    options.variants |= {
        f"RECOMMENDED, target {n}, {change}": (OURS, n, True, change)
        for change in options.change
        for n in options.target
    }
    options.only = list(options.variants)
    return options


def settings_of(options: argparse.Namespace, variant: str, seed: int, steps: int) -> Training:
    """Return the settings of one of ``options.variants``."""
    system, number, teacher, *more = options.variants[variant]
    preset, kind, own = RECOMMENDED, Training, {}
    if more and isinstance(more[0], str):
        kind, (preset, own) = ChangedTraining, CHANGES[more[0]]
    elif more:
        kind, own = PostingTraining, {"posting": more[0]}
    targets = {**preset.target_active, "document_flops": number}
    preset = preset.replace(target_active=targets if system == OURS and number else {})
    if more and not number:  # nothing but the controller of the lists sets the documents' weight
        preset = preset.replace(warmup={"query_flops": 0.5})
    return kind(
        steps,
        seed,
        preset,
        batch_size=24,
        learning_rate=5e-5 if options.model else 1e-3,
        vocab_size=3_000,  # of the demo's transformer
        probe_every=steps,  # the probes are not used
        probe_rows=1,
        system=system,
        number=number,
        teacher=teacher,
        model=options.model,
        calibrate=tuple(options.calibrate),
        **own,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then write the tables."""
    options = options_of(arguments)
    read = options.collections
    loaders = {name: functools.partial(read.get, name) for name in read}
    settings = functools.partial(settings_of, options)
    rows: list[dict[str, Any]] = []
    for name, results in run_all(options, options.only, settings, run_one, loaders):
        if any(one["sources"] != read[name].sources for one in results):
            raise SystemExit(f"error: runs in {options.output} are of other texts named {name}")
        for row, result, figures in _figures(results):
            trained = row not in BASELINES
            about = {"collection": name, "sources": sources_of(result), "row": row}
            about |= {key: result["settings"][key] if trained else "" for key in SETTINGS}
            about["seconds"] = result["seconds"] if trained else ""
            # A run that was stored before a figure was added lacks it.
            means = {k: round(float(np.mean(figures[k])), 4) if k in figures else "" for k in FORMS}
            by_query = {"by_query": figures["ndcg_10"]}
            rows.append(about | means | by_query | result["machine"])
    tables = summary(rows), comparison(rows, options.reference or options.only[0])
    written = [{key: row[key] for key in row if key != "by_query"} for row in rows]
    write(options.output / "collection.csv", written)
    publish(options.output / "collection.md", "\n".join(tables))


def _figures(results: Sequence[Result]) -> Iterator[tuple[str, Result, dict[str, Any]]]:
    yield from ((name, results[0], one) for name, one in results[0]["baselines"].items())
    for result in results:
        for ending, figures in result["rows"].items():
            yield result["variant"] + ending, result, figures


def _grouped(rows: Sequence[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table per collection, a line per row: means over seeds, with nDCG's deviation."""
    found, cost = ("nDCG@10", "MRR@10", "Recall@100"), ("products", "longest list")
    headings = (*found, "active, query", "active, document", *cost)
    tables = []
    for collection, of_collection in _grouped(rows, "collection").items():
        cells = []
        for name, own in _grouped(of_collection, "row").items():
            figures = {key: [row[key] for row in own] for key in FORMS}
            shown = [
                "" if "" in figures[key] else form.format(np.mean(figures[key]))
                for key, form in FORMS.items()
            ]
            shown[0] = spread(figures["ndcg_10"], FORMS["ndcg_10"])
            cells.append([name, str(len(own)) if own[0]["seed"] != "" else "", *shown])
        tables.append(markdown((collection, "seeds", *headings), cells))
    return "\n".join(tables)


def comparison(rows: Sequence[dict[str, Any]], reference: str) -> str:
    """Return a table of the differences to a row in nDCG@10, with their 95% intervals."""
    figures = {
        name: [
            np.mean([row["by_query"] for row in one], 0)
            for one in _grouped(own, "collection").values()
        ]
        for name, own in _grouped(rows, "row").items()
    }
    if reference not in figures:
        raise SystemExit(f"error: --reference {reference} is none of {', '.join(figures)}")
    cells = [
        [name, *(f"{one:+.3f}" for one in difference(own, figures[reference]))]
        for name, own in figures.items()
        if name != reference and len(own) == len(figures[reference])  # of all collections
    ]
    return markdown((f"nDCG@10 less that of {reference}", "mean", "from", "to"), cells)


if __name__ == "__main__":
    main()
