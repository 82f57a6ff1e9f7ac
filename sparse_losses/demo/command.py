"""The steps of the command: train, compare with BM25 on the test queries, answer questions."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import MofNCompleteColumn, Progress
from rich.text import Text

import sparse_losses
from sparse_losses import CollapseError, Finding
from sparse_losses._core.files import replaced_file
from sparse_losses.demo import debian, docstrings, report
from sparse_losses.demo.corpus import Corpus, read_pairs
from sparse_losses.demo.evaluation import Index, TaskFigures, measure, top_tokens
from sparse_losses.demo.model import ModelSize
from sparse_losses.demo.options import UserError, writable_folder
from sparse_losses.demo.training import Run, Settings, Step

EXAMPLES = {
    "docstrings": (
        "shortest path between two nodes",
        "inverse of a matrix",
        "remove spaces from both ends",
    ),
    "debian": (
        "play chess against the computer",
        "find duplicate files",
        "draw a graph of nodes and edges",
    ),
}
LOADERS = {"docstrings": docstrings, "debian": debian}
FIRST_LOOK = 10  # a wrong weight is visible by then, before it does damage; then every 50 steps
SIDES = {"document": "Documents", "query": "Queries"}


def execute(options: argparse.Namespace) -> None:
    """Read, train, measure, answer, and write the figures and the picture to the folder.

    Raises:
        UserError: for a user's mistake, or a training that collapsed.
    """
    started = time.perf_counter()
    torch.set_num_threads(1)  # makes figures reproducible, and is faster on texts this small
    console = Console(highlight=False)
    folder = writable_folder(options.output)
    settings = settings_of(options)
    if any(not query.strip() for query in options.query):
        raise UserError("expected a question after --query, got an empty string")

    if options.pairs:
        corpus = read_pairs(options.pairs)
    else:
        with console.status(f"Reading the corpus: {options.corpus}"):
            corpus = LOADERS[options.corpus].load()
    sizes = _sizes(corpus)
    console.print(
        f"{sizes['train pairs']:,} training pairs, {sizes['validation']} validation and "
        f"{sizes['test']} test rows from "
        + ", ".join(f"{name} {version}" for name, version in corpus.sources.items())
    )
    with console.status("Learning subwords and building the model"):
        run = Run(corpus, settings)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    console.print(
        f"A transformer of {parameters / 1e6:.1f} million parameters over "
        f"{run.tokens.vocab_size:,} subwords, seed {settings.seed}."
    )
    try:
        train(console, run)
    except CollapseError as error:
        raise UserError(str(error)) from error
    console.print()
    for side, controller in run.controllers.items():
        console.print(f"{SIDES[side]}: {controller}")

    with console.status("Ranking the test queries"):
        figures = measure(run, corpus)
    report.show_rankings(console, figures)
    report.show_anatomy(console, figures, run.tokens.vocab_size)
    queries = [row.pairs[0].query for row in corpus.test]
    queries = [query for query in queries if " " in query][:5] or queries[:5]
    tops = dict(zip(queries, top_tokens(run, queries), strict=True))
    report.show_top_tokens(console, tops)

    with console.status("Indexing all documents"):
        index = Index(run, corpus)
    questions = options.query or ([] if options.pairs else EXAMPLES[options.corpus])
    answers = {question: index.search(question) for question in questions}
    for question, found in answers.items():
        report.show_answers(console, question, found)

    report.show_limits(
        console, settings, docstrings=not options.pairs and options.corpus == "docstrings"
    )
    report.draw(folder / "training.png", run, figures)
    seconds = {"training": run.seconds, "this call": time.perf_counter() - started}
    _write(folder / "figures.json", run, corpus, seconds, figures, tops, answers)
    console.print(
        f"\nTrained in {run.seconds:.0f} s, {seconds['this call']:.0f} s in all. "
        f"Wrote {folder / 'training.png'} and {folder / 'figures.json'}.",
        soft_wrap=True,
    )
    if sys.stdin.isatty() and not options.query:
        _prompt(console, index)


def _sizes(corpus: Corpus) -> dict[str, int]:
    sizes = {part: len(getattr(corpus, part)) for part in ("train", "validation", "test")}
    return {**sizes, "train pairs": sum(len(row.pairs) for row in corpus.train)}


def _write(
    path: Path,
    run: Run,
    corpus: Corpus,
    seconds: dict[str, float],
    figures: Sequence[TaskFigures],
    tops: dict[str, list[tuple[str, float]]],
    answers: dict[str, list[tuple[float, str, str]]],
) -> None:
    """Write all results of the run as JSON."""
    content = {
        "versions": {"sparse-losses": sparse_losses.__version__, "torch": torch.__version__},
        "sources": corpus.sources,
        "rows": _sizes(corpus),
        "settings": dataclasses.asdict(run.settings),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "test": [dataclasses.asdict(figure) for figure in figures],
        "top_tokens": tops,
        "answers": {
            question: [{"score": round(score, 4), "title": title} for score, title, _ in found]
            for question, found in answers.items()
        },
        "validation": [dataclasses.asdict(probe) for probe in run.probes],
        "history": [dataclasses.asdict(step) for step in run.history],
    }
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with replaced_file(path, text=True) as file:
        file.write(text)


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings of the command line."""
    return Settings(
        steps=options.steps,
        seed=options.seed,
        without=tuple(sorted(set(options.without))),
        target_active=options.target_active or None,
        target_active_query=options.target_active_query or None,
        size=ModelSize(max_length=options.max_length),
    )


def train(console: Console, run: Run) -> None:
    """Train with a progress bar, and print what ``advise`` finds."""
    bar = Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console)
    task = bar.add_task("steps", total=run.settings.steps)
    line = Text(style="dim")
    known: dict[tuple[str, str], Finding] = {}

    def after(step: Step) -> None:
        bar.update(task, completed=step.step)
        terms = " ".join(
            f"{name.partition('_')[0]} {value:.2f}" for name, value in step.terms.items()
        )
        line.plain = f"{terms} · active q {step.active_query:,.0f} d {step.active_document:,.0f}"
        if step.step == FIRST_LOOK or step.step % 50 == 0:
            for said in news(known, run.findings()):
                console.print(f"step {step.step}, {said}", markup=False)

    with Live(Group(bar, line), console=console):
        run.train(after)


def news(known: dict[tuple[str, str], Finding], found: dict[str, list[Finding]]) -> Iterator[str]:
    """Yield a line for each finding that is new or gone, and update ``known``."""
    now = {(side, one.symptom): one for side, findings in found.items() for one in findings}
    for side, symptom in [gone for gone in known if gone not in now]:
        yield f"{SIDES[side].lower()}: no longer: {symptom}"
    for (side, symptom), finding in now.items():
        if (side, symptom) not in known:
            yield f"{SIDES[side].lower()}: {finding}"
    known.clear()
    known.update(now)


def _prompt(console: Console, index: Index) -> None:
    console.print("\nAsk your documentation (an empty line ends):")
    while True:
        try:
            question = console.input("[bold]? [/]").strip()
        except EOFError:
            return
        if not question:
            return
        report.show_answers(console, question, index.search(question))
