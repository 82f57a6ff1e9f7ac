"""Train a sparse retriever by the recipe, compare it with BM25, and ask it questions.

The pairs come from the docstrings of the installed Python, torch, numpy, sympy and networkx;
nothing is downloaded. It takes about three minutes on one core, and saves the model: with --query
the next call answers at once.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

import sparse_losses
from examples.demo import docstrings, report
from examples.demo.evaluation import measure
from examples.demo.retriever import MODEL, Retriever
from examples.demo.training import STEPS, Run, Settings

QUESTIONS = (
    "shortest path between two nodes",
    "inverse of a matrix",
    "remove spaces from both ends",
)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, settings = options.add_argument, Settings()
    add("--steps", type=int, default=STEPS, help="training steps")
    add("--seed", type=int, default=0, help="seed of weights and batches")
    dimensions = "active dimensions of a {}, by pruning"
    for side in ("document", "query"):
        name = f"{side}_active"
        add(
            f"--{side}-active",
            type=int,
            default=getattr(settings, name),
            metavar="N",
            help=dimensions.format(side),
        )
    question = "a question, repeatable: a saved model answers it without training"
    add("--query", action="append", metavar="TEXT", help=question)
    output = Path("sparse-losses-demo")
    add("--output", type=Path, default=output, help="the folder for the model and the figures")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    names = ("steps", "seed", "document_active", "query_active")
    return Settings(**{name: getattr(options, name) for name in names})


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer by a saved model, or train one, measure it and save it."""
    options = parser().parse_args(arguments)
    folder = options.output
    folder.mkdir(parents=True, exist_ok=True)  # an error here comes before the work
    torch.set_num_threads(1)  # makes figures reproducible, and is faster on texts this small
    console = Console(highlight=False)
    if options.query and (folder / MODEL).exists():
        retriever = Retriever.load(folder)
        for question in options.query:
            report.show_answers(console, question, retriever.search(question))
        return
    started = time.process_time()
    retriever, results = trained(console, settings_of(options))
    results["answers"] = {text: retriever.search(text) for text in options.query or QUESTIONS}
    results["seconds"]["this call"] = round(time.process_time() - started, 1)
    report.show(console, results)
    retriever.save(folder)
    content = json.dumps(results, indent=2, ensure_ascii=False) + "\n"
    (folder / "figures.json").write_text(content, encoding="utf-8")
    where = "" if folder == parser().get_default("output") else f"--output {folder} "
    console.print(
        f"\nTrained in {results['seconds']['training']:.0f} s, "
        f"{results['seconds']['this call']:.0f} s in all. {folder} holds the model and "
        "figures.json.\nNext, ask it something:\n"
        f"  make demo ARGS='{where}--query \"parse a date from a string\"'\n"
        "and train on your own texts: examples/train_with_transformers.py",
        soft_wrap=True,
        markup=False,
    )
    if sys.stdin.isatty() and not options.query:
        console.print("\nAsk your documentation (an empty line ends):")
        while question := console.input("[bold]? [/]").strip():
            report.show_answers(console, question, retriever.search(question))


def trained(console: Console, settings: Settings) -> tuple[Retriever, dict[str, Any]]:
    """Return a trained retriever and its figures."""
    console.print("Reading the texts")
    corpus = docstrings.load()
    pairs = sum(len(row.pairs) for row in corpus.train)
    versions = ", ".join(f"{name} {version}" for name, version in corpus.sources.items())
    console.print(
        f"{pairs:,} training pairs, {len(corpus.validation)} validation and {len(corpus.test)} "
        f"test rows from {versions}"
    )
    console.print("Learning subwords and building the model")
    run = Run(corpus, settings)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    console.print(
        f"A transformer of {parameters / 1e6:.1f} million parameters over "
        f"{run.tokens.vocab_size:,} subwords, seed {settings.seed}."
    )
    start = run.start()
    console.print(f"1. Start sparse: one shift of the bias\n{start}", markup=False)
    untrained = Retriever(run.tokens, copy.deepcopy(run.model))
    console.print("2. Learn: InfoNCE of dot products, and nothing else")
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("steps", total=settings.steps)

        def after(step: int, loss: float) -> None:
            bar.update(task, completed=step)
            if step % 50 == 0:
                console.print(f"step {step}: loss {loss:.3f}")

        run.train(after)
    pruned = run.prune()
    console.print(f"3. Prune both sides, on validation texts\n{pruned}", markup=False)
    console.print("Ranking the test queries and indexing all documents")
    retriever = run.retriever()
    retriever.index(corpus.rows)
    queries = [row.pairs[0].query for row in corpus.test]
    queries = [query for query in queries if " " in query][:5] or queries[:5]
    results = {
        "versions": {"sparse-losses": sparse_losses.__version__, "torch": torch.__version__},
        "sources": corpus.sources,
        "rows": {part: len(getattr(corpus, part)) for part in ("train", "validation", "test")},
        "settings": dataclasses.asdict(settings),
        "start": start.after._asdict(),
        "calibration": {name: getattr(pruned, name)._asdict() for name in ("before", "after")},
        "test": measure(retriever, untrained, corpus, run.df.df),
        "top_tokens": dict(zip(queries, retriever.top_tokens(queries), strict=True)),
        "loss": [round(loss, 3) for loss in run.losses[:: max(1, settings.steps // 25)]],
        "seconds": {"training": round(run.seconds, 1)},
    }
    return retriever, results


if __name__ == "__main__":
    main()
