"""Train a sparse retriever, compare it with BM25 on test queries, and ask it questions.

The pairs come from the docstrings of the installed Python, torch, numpy, sympy and networkx;
nothing is downloaded. It takes about five minutes on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

import sparse_losses
from examples.demo import docstrings, report
from examples.demo.evaluation import Index, measure, top_tokens
from examples.demo.training import STEPS, Run, Settings, Step
from sparse_losses import RECOMMENDED

QUESTIONS = (
    "shortest path between two nodes",
    "inverse of a matrix",
    "remove spaces from both ends",
)
FIRST_LOOK = 10  # a wrong weight is visible by then, before it does damage; then every 50 steps


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, terms = options.add_argument, RECOMMENDED.weights
    add("--steps", type=int, default=STEPS, help="training steps")
    add("--seed", type=int, default=0, help="seed of weights and batches")
    switched_off = f"terms of the loss to switch off, out of {', '.join(terms)}"
    add("--without", nargs="+", choices=terms, default=[], metavar="TERM", help=switched_off)
    target = "active dimensions of a document, by its FLOPS weight; 0 keeps the weight fixed"
    default = int(RECOMMENDED.target_active["document_flops"])
    add("--target-active", type=int, default=default, metavar="N", help=target)
    question = "a question for the trained model, repeatable; by default a few, and a prompt"
    add("--query", action="append", metavar="TEXT", help=question)
    output = Path("sparse-losses-demo")
    add("--output", type=Path, default=output, help="the folder for the figures")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    target = {"document_flops": options.target_active} if options.target_active else {}
    preset = RECOMMENDED.replace(target_active=target).without(*options.without)
    return Settings(steps=options.steps, seed=options.seed, preset=preset)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, train, measure, answer, and write the figures to the folder."""
    options = parser().parse_args(arguments)
    folder, settings = options.output, settings_of(options)
    folder.mkdir(parents=True, exist_ok=True)  # an error here comes before the work
    started = time.perf_counter()
    torch.set_num_threads(1)  # makes figures reproducible, and is faster on texts this small
    console = Console(highlight=False)
    console.print("Reading the texts")
    corpus = docstrings.load()
    pairs = sum(len(row.pairs) for row in corpus.train)
    versions = ", ".join(f"{name} {version}" for name, version in corpus.sources.items())
    console.print(
        f"{pairs:,} training pairs, {len(corpus.validation)} validation and {len(corpus.test)} "
        f"test rows from {versions}"
    )
    console.print("Learning subwords and building the model")
    trained = Run(corpus, settings)
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    console.print(
        f"A transformer of {parameters / 1e6:.1f} million parameters over "
        f"{trained.tokens.vocab_size:,} subwords, seed {settings.seed}."
    )
    train(console, trained)

    console.print("Ranking the test queries and indexing all documents")
    queries = [row.pairs[0].query for row in corpus.test]
    queries = [query for query in queries if " " in query][:5] or queries[:5]
    index = Index(trained, corpus)
    results = {
        "versions": {"sparse-losses": sparse_losses.__version__, "torch": torch.__version__},
        "sources": corpus.sources,
        "rows": {part: len(getattr(corpus, part)) for part in ("train", "validation", "test")},
        "settings": dataclasses.asdict(settings),
        "test": measure(trained, corpus),
        "top_tokens": dict(zip(queries, top_tokens(trained, queries), strict=True)),
        "answers": {text: index.search(text) for text in options.query or QUESTIONS},
        "validation": trained.probes,
        "history": [dataclasses.asdict(step) for step in trained.history],
    }
    seconds = {"training": trained.seconds, "this call": time.perf_counter() - started}
    results["seconds"] = {name: round(value, 1) for name, value in seconds.items()}
    report.show(console, results)
    content = json.dumps(results, indent=2, ensure_ascii=False) + "\n"
    (folder / "figures.json").write_text(content, encoding="utf-8")
    console.print(
        f"\nTrained in {trained.seconds:.0f} s, {seconds['this call']:.0f} s in all. "
        f"Wrote figures.json to {folder}.",
        soft_wrap=True,
    )
    if sys.stdin.isatty() and not options.query:
        console.print("\nAsk your documentation (an empty line ends):")
        while question := console.input("[bold]? [/]").strip():
            report.show_answers(console, question, index.search(question))


def train(console: Console, run: Run) -> None:
    """Train; print the terms at every look, each finding of ``advise`` once, and the targets."""
    known: set[tuple[str, str]] = set()
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("steps", total=run.settings.steps)

        def after(step: Step) -> None:
            bar.update(task, completed=step.step)
            if step.step != FIRST_LOOK and step.step % 50:
                return
            terms = " ".join(f"{name} {value:.2f}" for name, value in step.terms.items())
            active = f"active q {step.active_query:,.0f} d {step.active_document:,.0f}"
            console.print(f"step {step.step}: {terms} · {active}")
            for side, findings in run.findings().items():
                for finding in findings:
                    if (side, finding.symptom) not in known:
                        known.add((side, finding.symptom))
                        console.print(f"step {step.step}, {side}: {finding}", markup=False)

        run.train(after)
    for controller in run.controllers.values():
        console.print(str(controller), markup=False)


if __name__ == "__main__":
    main()
