"""The accuracy of the sparsity controller, and the cost of fewer dimensions in recall.

The study covers two corpora, a dense and a sparse start, several targets, numbers of steps and
seeds. Every model is then calibrated to its own target and to smaller ones, to compare training to
a sparsity with three ways to get it afterwards: a shifted bias (of queries and documents, which
share it), documents pruned by a threshold, and each document's largest weights.
"""

from __future__ import annotations

import csv
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.run.table import write
from benchmarks.studies.runs import Result, markdown, publish, run_all, sources_of, study_parser
from examples.demo.corpus import Corpus, pair_texts
from examples.demo.evaluation import ranking, similarities
from examples.demo.model import ModelSize
from examples.demo.training import STEPS, Run, Settings
from sparse_losses import RECOMMENDED, calibrate_threshold

STARTS = {"dense": 0.0, "sparse": -2.0}  # the bias; with -2 about 100 dimensions are active
TARGETS = (16, 32, 64, 128, 256)
CALIBRATED = (16, 32, 64, 128)
CALIBRATION_TEXTS = 1000  # maximal number of documents for the calibration of a threshold
METHODS = ("train", "prune", "shift", "largest")
SPLITS = ("train", "validation")  # held-out documents are longer than those of training
LIFT = 4.0  # added to all logits in encoding, so that a threshold may be negative
VARIANTS: dict[str, tuple[str, int | None]] = {
    f"{start}, {f'target {target}' if target else 'a fixed weight'}": (start, target)
    for start, target in itertools.product(STARTS, (None, *TARGETS))
}
DEFAULT = [name for name, (_, target) in VARIANTS.items() if target in (32, 64, 128)]
WORDS = ("corpus", "sources", "start", "given", "method", "said_early", "status")
RUN = ("corpus", "start", "steps", "target", "seed")  # columns that identify a training


def settings_of(variant: str, seed: int, steps: int) -> Settings:
    """Return the settings of a start and a target."""
    start, target = VARIANTS[variant]
    return Settings(
        steps=steps,
        seed=seed,
        preset=RECOMMENDED.replace(target_active={"document_flops": target} if target else {}),
        size=ModelSize(bias=STARTS[start]),
        probe_every=steps,  # the probes are not used
        probe_rows=1,
    )


def run_one(settings: Settings, corpus: Corpus) -> Result:
    """Train once; return the controller's report and the test figures.

    The figures are those of the trained model, and after calibration to its target and smaller
    ones.
    """
    run = Run(corpus, settings)
    run.train()
    tests = [
        [lifted_logits(run, texts) for texts in pair_texts(corpus.test, number)]
        for number in range(len(corpus.tasks))
    ]
    calibrated = []
    trained_to = settings.preset.target_active.get("document_flops", 0)
    rank = functools.partial(figures, tests, settings.preset.similarity)
    for name in SPLITS:
        documents = [pair.document for row in getattr(corpus, name) for pair in row.pairs]
        lifted = lifted_logits(
            run, documents[:: max(len(documents) // CALIBRATION_TEXTS, 1)][:CALIBRATION_TEXTS]
        )
        for target in CALIBRATED:
            if target > trained_to:
                continue
            threshold = calibrate_threshold(lifted.log1p(), target) - LIFT
            for method, (queries, documents_) in methods(threshold, target).items():
                kept = (documents_(lifted) > 0).sum(1).double().mean().item()
                row = {"to": target, "method": method, "given": name, "threshold": threshold}
                calibrated.append(row | {"active_given": kept} | rank(queries, documents_))
    return {
        "sources": corpus.sources,
        "seconds": round(run.seconds, 1),
        "controllers": {side: one.report() for side, one in run.controllers.items()},
        "trained": rank(shifted(0.0), shifted(0.0)),
        "calibrated": calibrated,
    }


def lifted_logits(run: Run, texts: Sequence[str]) -> Tensor:
    """Return the pooled logits ``[texts, V]`` with a raised bias, 0 where negative."""
    with torch.no_grad():
        run.model.bias.add_(LIFT)
        logits = run.encode(texts).expm1()
        run.model.bias.sub_(LIFT)
    return logits


Vectors = Callable[[Tensor], Tensor]


def methods(threshold: float, target: int) -> dict[str, tuple[Vectors, Vectors]]:
    """Return how each method makes vectors of lifted logits, of queries and of documents."""
    plain = shifted(0.0)

    def pruned(lifted: Tensor) -> Tensor:
        return plain(lifted).where(lifted > max(threshold, 0.0) + LIFT, 0.0)

    def largest(lifted: Tensor) -> Tensor:
        vectors = plain(lifted)
        top = vectors.topk(target)
        return torch.zeros_like(vectors).scatter_(1, top.indices, top.values)

    return {
        "shift": (shifted(threshold), shifted(threshold)),
        "prune": (plain, pruned),
        "largest": (plain, largest),
    }


def shifted(threshold: float) -> Vectors:
    """Return the function that subtracts ``threshold`` from all logits."""
    return lambda lifted: (lifted - threshold - LIFT).relu().log1p()


def figures(
    tests: Sequence[Sequence[Tensor]], similarity: str, of_query: Vectors, of_document: Vectors
) -> dict[str, float]:
    """Return active dimensions and ranking; means over tasks."""
    ranked, active = [], []
    for sides in tests:
        queries, documents = of_query(sides[0]), of_document(sides[1])
        ranked.append(ranking(similarities(queries, documents, similarity)))
        active.append([(x > 0).sum(1).double().mean().item() for x in (queries, documents)])
    return {
        "active": statistics.mean(documents for _, documents in active),
        "active_query": statistics.mean(queries for queries, _ in active),
        "recall_10": statistics.mean(one.recall_10 for one in ranked),
        "mrr_10": statistics.mean(one.mrr_10 for one in ranked),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then write the tables."""
    options = study_parser(
        "targets",
        "Train the demo's model with RECOMMENDED, at its FLOPS weight and with a controller of the "
        "documents' active dimensions, on two corpora, from a dense and a sparse start.",
        list(VARIANTS),
        steps=[STEPS // 2, STEPS],
        only=DEFAULT,
    ).parse_args(arguments)
    rows, calibrated = [], []
    for corpus, results in run_all(options, list(VARIANTS), settings_of, run_one):
        for result in results:
            row = _row(corpus, result)
            rows.append(row)
            key = {name: row[name] for name in RUN}
            if row["target"] in CALIBRATED:
                trained = {"to": row["target"], "method": "train", "given": "training"}
                active = result["trained"]["active"]
                trained |= {"threshold": 0.0, "active_given": active, **result["trained"]}
                calibrated.append(key | trained)
            calibrated += [key | one for one in result["calibrated"]]
    write(options.output / "targets.csv", rows)
    if calibrated:
        write(options.output / "calibrated.csv", calibrated)
    table = asked_and_got(rows) + "\n" + calibration(calibrated)
    publish(options.output / "targets.md", table)


def _row(corpus: str, result: Result) -> dict[str, Any]:
    """Return the row of a training: its settings, active dimensions and ranking."""
    start, target = VARIANTS[result["variant"]]
    return {
        "corpus": corpus,
        "sources": sources_of(result),
        "start": start,
        "steps": result["settings"]["steps"],
        "target": target,
        "seed": result["seed"],
        **result["trained"],
        "status": result["controllers"].get("document", {"status": ""})["status"],
        "seconds": result["seconds"],
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a table that this study wrote, with numbers parsed."""

    def parse(key: str, cell: str) -> Any:
        if key in ("steps", "target", "seed", "to"):
            return int(cell) if cell else None
        return cell if key in WORDS else float(cell)

    with path.open(encoding="utf-8", newline="") as file:
        return [
            {key: parse(key, cell) for key, cell in row.items()} for row in csv.DictReader(file)
        ]


def asked_and_got(rows: Sequence[dict[str, Any]]) -> str:
    """Return one line per target: every seed's result, largest miss, and the final status."""
    keys = ("corpus", "start", "steps", "target")
    cells = []
    for key, group in itertools.groupby(rows, lambda row: tuple(row[name] for name in keys)):
        own, target = list(group), key[-1]
        active = [row["active"] for row in own]
        miss = max((one / target - 1 for one in active), key=abs) if target else None
        cells.append(
            [
                *map(str, key[:-1]),
                str(target or "a fixed weight"),
                " ".join(f"{one:.1f}" for one in active),
                "" if miss is None else f"{miss:+.1%}",
                ", ".join(sorted({row["status"].partition(":")[0] for row in own})),
            ]
        )
    got = ("got, by seed", "largest miss", "status")
    return markdown(("corpus", "start", "steps", "asked", *got), cells, left=2)


def calibration(calibrated: Sequence[dict[str, Any]]) -> str:
    """Return one line per corpus, sparsity of documents and target of training, over seeds.

    The misses are the largest of pruning: on the texts given, validation documents; on test
    documents; and there if the texts given were training documents. Recall and the active
    dimensions of queries are means over seeds and starts.
    """
    keys = ("corpus", "steps", "to", "target")
    cells = []
    ordered = sorted(calibrated, key=lambda one: [str(one[key]).zfill(4) for key in keys])
    for key, group in itertools.groupby(ordered, lambda one: tuple(one[name] for name in keys)):
        rows = {(name, given): [] for name in METHODS for given in (*SPLITS, "training")}
        for row in group:
            rows[row["method"], row["given"]].append(row)
        pruned = rows["prune", "validation"]
        misses = [_miss(pruned, "active_given"), _miss(pruned, "active")]
        misses.append(_miss(rows["prune", "train"], "active"))
        ways = {name: rows[name, "validation"] or rows[name, "training"] for name in METHODS}
        recall = [_mean(own, "recall_10") for own in ways.values()]
        queries = [_mean(ways[name], "active_query") for name in ("prune", "shift")]
        cells.append([*map(str, key), str(len(pruned)), *misses, *queries, *recall])
    asked = ("corpus", "steps", "documents at", "trained to", "runs")
    missed = ("miss, texts given", "miss, held out", "miss, given training texts")
    ranked = tuple(f"R@10 {name}" for name in ("as trained", "pruned", "shifted", "k largest"))
    queries = ("query, pruned", "query, shifted")
    return markdown((*asked, *missed, *queries, *ranked), cells, left=1)


def _miss(calibrated: Sequence[dict[str, Any]], name: str) -> str:
    largest = max((one[name] / one["to"] - 1 for one in calibrated), key=abs)
    return f"{round(largest, 3) + 0.0:+.1%}"  # no -0.0


def _mean(rows: Sequence[dict[str, Any]], name: str) -> str:
    if not rows:
        return ""
    form = ".0f" if name == "active_query" else ".3f"
    return f"{statistics.mean(row[name] for row in rows):{form}}"


if __name__ == "__main__":
    main()
