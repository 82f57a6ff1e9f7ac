"""The accuracy of the sparsity controller, and the cost of fewer dimensions in recall.

The study covers two corpora, a dense and a sparse start, several targets, numbers of steps and
seeds. Every model is then calibrated to its own target and to smaller ones, to compare a threshold
after training with training to the same sparsity.
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console
from torch import Tensor

from benchmarks.studies.runs import Result, markdown, run_all, study_parser, write_csv
from sparse_losses import calibrate_threshold
from sparse_losses._core.files import replaced_file
from sparse_losses.demo.command import LOADERS
from sparse_losses.demo.corpus import Corpus, pair_texts
from sparse_losses.demo.evaluation import ranking, similarities
from sparse_losses.demo.model import ModelSize
from sparse_losses.demo.options import STEPS, guarded
from sparse_losses.demo.training import Run, Settings, Step

STARTS = {"dense": 0.0, "sparse": -2.0}  # the bias; with -2 about 100 dimensions are active
TARGETS = (32, 64, 128, 256)
CALIBRATED = (32, 64, 128)
GIVEN = 1000  # maximal number of documents for the calibration of a threshold
SPLITS = ("train", "validation")  # held-out documents are longer than those of training
LIFT = 4.0  # added to all logits in encoding, so that a threshold may be negative
VARIANTS: dict[str, tuple[str, int | None]] = {
    f"{start}, {f'target {target}' if target else 'a fixed weight'}": (start, target)
    for start, target in itertools.product(STARTS, (None, *TARGETS))
}
DEFAULT = [name for name, (_, target) in VARIANTS.items() if target in (32, 64, 128)]
SAID_AT = 100  # step by which the controller should report an unreachable target
WORDS = ("corpus", "sources", "start", "given", "said_early", "status")
RUN = ("corpus", "start", "steps", "target", "seed")  # columns that identify a training


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then write table and plot; return an exit code as the demo does."""
    parser = study_parser(
        "targets",
        "Train the demo's model with RECOMMENDED, at its FLOPS weight and with a controller of the "
        "documents' active dimensions, on two corpora, from a dense and a sparse start.",
        list(VARIANTS),
        steps=(STEPS // 2, STEPS),
        only=DEFAULT,
        corpora=True,
    )
    return guarded(_run, parser, arguments)


def settings_of(variant: str, seed: int, steps: int) -> Settings:
    """Return the settings of a start and a target."""
    start, target = VARIANTS[variant]
    return Settings(
        steps=steps,
        seed=seed,
        target_active=target,
        size=ModelSize(bias=STARTS[start]),
        probe_every=steps,  # the probes are not used
        probe_rows=1,
    )


def run_one(settings: Settings, corpus: Corpus) -> Result:
    """Train once; return the controller's early and final reports, and the test figures.

    The figures are those of the trained model, and after calibration to its target and smaller
    ones.
    """
    run = Run(corpus, settings)
    early: dict[str, Any] = {}

    def listen(step: Step) -> None:
        if step.step == SAID_AT:
            early.update({side: one.report() for side, one in run.controllers.items()})

    run.train(listen)
    tests = [
        [lifted_logits(run, texts) for texts in pair_texts(corpus.test, number)]
        for number in range(len(corpus.tasks))
    ]
    calibrated = []
    for name in SPLITS:
        documents = [pair.document for row in getattr(corpus, name) for pair in row.pairs]
        given = lifted_logits(run, documents[:: max(len(documents) // GIVEN, 1)][:GIVEN])
        for target in CALIBRATED:
            if settings.target_active is not None and target <= settings.target_active:
                threshold = calibrate_threshold(given.log1p(), target) - LIFT
                found = {"threshold": threshold, "active_given": active(given, threshold)}
                found |= figures(threshold, tests, settings.preset.similarity)
                calibrated.append({"to": target, "given": name, **found})
    return {
        "sources": corpus.sources,
        "seconds": round(run.seconds, 1),
        "controllers": {side: one.report() for side, one in run.controllers.items()},
        "early": early,
        "trained": figures(0.0, tests, settings.preset.similarity),
        "calibrated": calibrated,
    }


def lifted_logits(run: Run, texts: Sequence[str]) -> Tensor:
    """Return the pooled logits ``[texts, V]`` with a raised bias, 0 where negative."""
    with torch.no_grad():
        run.model.bias.add_(LIFT)
        logits = run.encode(texts).expm1()
        run.model.bias.sub_(LIFT)
    return logits


def active(lifted: Tensor, threshold: float) -> float:
    """Return the mean number of dimensions above the threshold."""
    return (lifted > threshold + LIFT).sum(1).double().mean().item()


def figures(
    threshold: float, tests: Sequence[Sequence[Tensor]], similarity: str
) -> dict[str, float]:
    """Return active dimensions and ranking after subtracting ``threshold``; means over tasks.

    Queries and documents share one bias, so the threshold applies to both.
    """
    ranked = []
    for sides in tests:
        queries, documents = ((lifted - threshold - LIFT).relu().log1p() for lifted in sides)
        ranked.append(ranking(similarities(queries, documents, similarity)))
    return {
        "active": statistics.mean(active(documents, threshold) for _, documents in tests),
        "active_query": statistics.mean(active(queries, threshold) for queries, _ in tests),
        "recall_10": statistics.mean(one.recall_10 for one in ranked),
        "mrr_10": statistics.mean(one.mrr_10 for one in ranked),
    }


def _run(options: argparse.Namespace) -> None:
    rows, calibrated = [], []
    for corpus in options.corpora:
        load = functools.cache(LOADERS[corpus].load)
        for steps in options.steps:
            Console().print(f"{corpus}, {steps} steps", highlight=False)
            own = copy.copy(options)
            own.steps, own.output = steps, options.output / f"{corpus}-{steps}"
            results = run_all(own, list(VARIANTS), settings_of, run_one, load=load)
            for result in results:
                row = _row(corpus, result)
                rows.append(row)
                calibrated += [
                    {**{key: row[key] for key in RUN}, **one} for one in result["calibrated"]
                ]
    write_csv(options.output / "targets.csv", rows)
    if calibrated:
        write_csv(options.output / "calibrated.csv", calibrated)
    table = asked_and_got(rows) + "\n" + calibration(calibrated, rows)
    with replaced_file(options.output / "targets.md", text=True) as page:
        page.write(table)
    draw(options.output / "front.svg", rows)
    Console().print(table, markup=False, highlight=False, soft_wrap=True)


def _row(corpus: str, result: Result) -> dict[str, Any]:
    """Return the row of a training: its settings, active dimensions and ranking."""
    start, target = VARIANTS[result["variant"]]

    def said(when: str) -> str:
        return str(result[when].get("document", {"status": ""})["status"])

    return {
        "corpus": corpus,
        "sources": " ".join(f"{name} {version}" for name, version in result["sources"].items()),
        "start": start,
        "steps": result["settings"]["steps"],
        "target": target,
        "seed": result["seed"],
        **result["trained"],
        "said_early": said("early"),
        "status": said("controllers"),
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


def calibration(calibrated: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    """Return one line per target of training and of calibration, over seeds and starts.

    The columns are the largest misses, the ranking of the models calibrated on validation documents
    and that of models trained to this target.
    """
    keys = ("corpus", "steps", "target", "to")
    cells = []
    ordered = sorted(calibrated, key=lambda one: [str(one[key]).zfill(4) for key in keys])
    for key, group in itertools.groupby(ordered, lambda one: tuple(one[name] for name in keys)):
        corpus, steps, trained, to = key
        by_split: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        for one in group:
            by_split[one["given"]].append(one)
        train, own = by_split["train"], by_split["validation"]
        same = [
            row
            for row in rows
            if (row["corpus"], row["steps"], row["target"]) == (corpus, steps, to)
        ]
        misses = [_miss(own, "active_given"), _miss(own, "active"), _miss(train, "active")]
        found = [_mean(own, name) for name in ("recall_10", "mrr_10")]
        found += [_mean(same, name) if trained != to else "" for name in ("recall_10", "mrr_10")]
        cells.append([*map(str, key), str(len(own)), *misses, *found])
    missed = ("miss, texts given", "miss, held out", "miss, given training texts")
    recall = ("R@10", "MRR@10", "R@10, trained to it", "MRR@10, trained to it")
    asked = ("corpus", "steps", "trained to", "calibrated to", "runs")
    return markdown((*asked, *missed, *recall), cells, left=1)


def _miss(calibrated: Sequence[dict[str, Any]], name: str) -> str:
    largest = max((one[name] / one["to"] - 1 for one in calibrated), key=abs)
    return f"{round(largest, 3) + 0.0:+.1%}"  # no -0.0


def _mean(rows: Sequence[dict[str, Any]], name: str) -> str:
    return f"{statistics.mean(row[name] for row in rows):.3f}" if rows else ""


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Plot recall against active dimensions, one mark per training; targets are dotted lines."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    corpora = list(dict.fromkeys(row["corpus"] for row in rows))
    targets = sorted({row["target"] for row in rows if row["target"]})
    panels = figure.subplots(1, len(corpora), sharex=True, squeeze=False)[0]
    for axis, corpus in zip(panels, corpora, strict=True):
        marks = dict(zip(itertools.product(STARTS, (True, False)), "os^D", strict=True))
        for (start, steered), marker in marks.items():
            own = [
                row
                for row in rows
                if (row["corpus"], row["start"], bool(row["target"])) == (corpus, start, steered)
            ]
            label = f"{start} start, {'steered' if steered else 'a fixed weight'}"
            active, recall = ([row[key] for row in own] for key in ("active", "recall_10"))
            if own:
                axis.scatter(active, recall, marker=marker, label=label, zorder=3)
        for target in targets:
            axis.axvline(target, linestyle=":", color="grey", linewidth=1)
        axis.set_xscale("log")
        axis.set_xticks(targets, [str(target) for target in targets])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("active dimensions of held-out documents")
        axis.set_ylabel("Recall@10")
        axis.set_title(corpus, fontsize=10)
        axis.grid(visible=True, axis="y", alpha=0.25)
    panels[0].legend(fontsize=8)
    with rc_context({"svg.hashsalt": "sparse-losses", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
