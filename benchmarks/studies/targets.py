"""Where the sparsity controller ends, and what fewer dimensions cost in recall.

Two corpora, a dense and a sparse start, several targets, lengths of training and seeds.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console

from benchmarks.studies.runs import Result, markdown, run_all, study_parser, write_csv
from sparse_losses._core.files import replaced_file
from sparse_losses.demo import debian, docstrings
from sparse_losses.demo.corpus import Corpus
from sparse_losses.demo.evaluation import MODEL, measure
from sparse_losses.demo.model import ModelSize
from sparse_losses.demo.options import CORPORA, STEPS, guarded
from sparse_losses.demo.training import Run, Settings, Step

STARTS = {"dense": 0.0, "sparse": -2.0}  # the bias; at -2 a text keeps about a hundred
TARGETS = (32, 64, 128, 256)
VARIANTS: dict[str, tuple[str, int | None]] = {
    f"{start}, {f'target {target}' if target else 'a fixed weight'}": (start, target)
    for start, target in itertools.product(STARTS, (None, *TARGETS))
}
DEFAULT = [name for name, (_, target) in VARIANTS.items() if target in (32, 64, 128)]
SAID_AT = 100  # steps, by which a target out of reach should be called so
LOADERS = {"docstrings": docstrings, "debian": debian}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is still missing, then write table and picture; exit codes as in the demo."""
    parser = study_parser(
        "targets",
        "Train the demo with its own FLOPS weight and with a controller that steers a document to "
        "so many active dimensions, on two corpora, from a dense and a sparse start.",
        list(VARIANTS),
        steps=(STEPS // 2, STEPS),
        only=DEFAULT,
    )
    parser.add_argument(
        "--corpora",
        nargs="+",
        choices=CORPORA,
        default=list(CORPORA),
        help="the texts to train on, each in a folder of its own (default: all)",
    )
    return guarded(_run, parser, arguments)


def settings_of(variant: str, seed: int, steps: int) -> Settings:
    """The demo's settings with a start and a target."""
    start, target = VARIANTS[variant]
    size = ModelSize(bias=STARTS[start])
    return Settings(steps=steps, seed=seed, target_active=target, size=size)


def run_one(settings: Settings, corpus: Corpus) -> Result:
    """One training, its test figures, and what its controller said early and at the end."""
    run = Run(corpus, settings)
    early: dict[str, Any] = {}

    def listen(step: Step) -> None:
        if step.step == SAID_AT:
            early.update({side: one.report() for side, one in run.controllers.items()})

    run.train(listen)
    return {
        "sources": corpus.sources,
        "seconds": round(run.seconds, 1),
        "controllers": {side: one.report() for side, one in run.controllers.items()},
        "early": early,
        "test": [dataclasses.asdict(figures) for figures in measure(run, corpus)],
    }


def _run(options: argparse.Namespace) -> None:
    rows = []
    for corpus in options.corpora:
        load = functools.cache(LOADERS[corpus].load)
        for steps in options.steps:
            Console().print(f"{corpus}, {steps} steps", highlight=False)
            own = copy.copy(options)
            own.steps, own.output = steps, options.output / f"{corpus}-{steps}"
            results = run_all(own, list(VARIANTS), settings_of, run_one, load=load)
            rows += [_row(corpus, result) for result in results]
    write_csv(options.output / "targets.csv", rows)
    table = asked_and_got(rows)
    with replaced_file(options.output / "targets.md", text=True) as page:
        page.write(table)
    draw(options.output / "front.svg", rows)
    Console().print(table, markup=False, highlight=False, soft_wrap=True)


def _row(corpus: str, result: Result) -> dict[str, Any]:
    """What was asked for, what came (means over the tasks' documents), and what it finds."""
    start, target = VARIANTS[result["variant"]]
    tasks = result["test"]

    def said(when: str) -> str:
        return result[when].get("document", {"status": ""})["status"]

    return {
        "corpus": corpus,
        "sources": " ".join(f"{name} {version}" for name, version in result["sources"].items()),
        "start": start,
        "steps": result["settings"]["steps"],
        "target": target,
        "seed": result["seed"],
        "active": statistics.mean(task["document_after"]["active"] for task in tasks),
        "recall_10": statistics.mean(task["rankings"][MODEL]["recall_10"] for task in tasks),
        "said_early": said("early"),
        "status": said("controllers"),
        "seconds": result["seconds"],
    }


def asked_and_got(rows: Sequence[dict[str, Any]]) -> str:
    """A line a target: what every seed got, the largest miss, and what the controller said."""
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
                f"{statistics.mean(row['recall_10'] for row in own):.3f}",
                ", ".join(sorted({row["said_early"] for row in own})),
                ", ".join(sorted({row["status"] for row in own})),
            ]
        )
    got = ("got, by seed", "largest miss", "R@10", f"said at step {SAID_AT}", "said at the end")
    return markdown(("corpus", "start", "steps", "asked", *got), cells, left=2)


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Recall against active dimensions, a mark a training; dotted: what was asked for."""
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
