"""The command: train a sparse retriever on your Python's documentation, then search it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads must not spin; before torch

from sparse_losses.demo.errors import UserError
from sparse_losses.demo.switches import STEPS, SWITCHES

if TYPE_CHECKING:
    from rich.console import Console

    from sparse_losses.demo.corpus import Corpus
    from sparse_losses.demo.report import Index, TaskFigures
    from sparse_losses.demo.training import Run, Settings
    from sparse_losses.objective.advice import Finding

EXTRA = ("bm25s", "matplotlib", "rich", "tokenizers")
EXAMPLES = (
    "shortest path between two nodes",
    "inverse of a matrix",
    "remove spaces from both ends",
)
FIRST_LOOK = 10  # a weight that is far off shows before its damage does; then every 50 steps
CHECKPOINT, FIGURES, PICTURE = "checkpoint.pt", "figures.json", "training.png"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if all went well, 1 for a mistake of the user, 130 for Ctrl-C."""
    return guarded(_run, _parser(), arguments)


def guarded(
    run: Callable[[argparse.Namespace], None],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
) -> int:
    """Parse, run, and turn mistakes and Ctrl-C into one sentence and an exit code."""
    try:
        run(parser.parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"\n{interrupt or 'Interrupted.'}", file=sys.stderr)
        return 130
    return 0


def require_extra(names: Sequence[str] = ()) -> None:
    """Check for the optional packages.

    Raises:
        UserError: one is missing.
    """
    if missing := [name for name in names or EXTRA if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"the demo needs {', '.join(missing)}; install with: pip install 'sparse-losses[demo]'"
        )


def writable_folder(folder: Path) -> Path:
    """Make the folder if need be, and try to write in it before any work is done.

    Raises:
        UserError: it cannot be made or written to.
    """
    probe = folder / ".write-test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to the output folder {folder}: {error.strerror}") from error
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_losses.demo",
        description="Search your own Python's documentation with a sparse retriever that you "
        "trained yourself. Pairs are made of the docstrings of the installed Python, torch, numpy, "
        "sympy and networkx; nothing is downloaded. Takes three to four minutes on one core.",
    )
    add = parser.add_argument
    add(
        "--steps", type=positive_number, default=STEPS, help="training steps (default: %(default)s)"
    )
    add(
        "--seed",
        type=seed_number,
        default=0,
        help="decides weights and batches (default: %(default)s)",
    )
    add(
        "--start",
        choices=("dense", "sparse"),
        default="dense",
        help="begin with every token faintly active, which shows what each loss does, or with few "
        "(default: %(default)s)",
    )
    add(
        "--output",
        type=Path,
        default=Path("sparse-losses-demo"),
        metavar="FOLDER",
        help="where checkpoint, figures and picture go (default: %(default)s)",
    )
    add(
        "--without",
        action="append",
        choices=SWITCHES,
        default=[],
        metavar="NAME",
        help=f"switch a loss or an ingredient off, repeatable: {', '.join(SWITCHES)}",
    )
    add(
        "--target-active",
        type=positive_number,
        metavar="N",
        help="steer the documents' FLOPS weight so that a document keeps N active dimensions",
    )
    add(
        "--target-active-query",
        type=positive_number,
        metavar="N",
        help="the same for the queries and theirs",
    )
    add(
        "--flops-factor",
        type=positive_factor,
        default=1.0,
        metavar="X",
        help="multiply both FLOPS weights, to see a run go wrong: 100 collapses (with "
        "--without warmup), 0.001 stays dense (default: 1)",
    )
    add(
        "--pairs",
        type=Path,
        metavar="FILE.tsv",
        help="train on your own pairs instead, one 'query<TAB>document' a line, UTF-8",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in the output folder; repeat the other options of the "
        "first run. On one thread the figures are those of an uninterrupted run",
    )
    add(
        "--overwrite",
        action="store_true",
        help="start afresh although the output folder holds an unfinished run",
    )
    add(
        "--query",
        action="append",
        default=[],
        metavar="TEXT",
        help="a question to answer with the trained model, repeatable; without, a few examples, "
        "and a prompt where stdin is a terminal",
    )
    add(
        "--threads",
        type=positive_number,
        default=1,
        help="CPU threads; figures repeat exactly only for one (default: %(default)s)",
    )
    return parser


def positive_number(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def positive_factor(text: str) -> float:
    """A finite number above 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {text!r}")
    return number


def seed_number(text: str) -> int:
    """A whole number that torch takes as a seed, for argparse."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 up, got {text!r}")
    return int(text)


def _run(options: argparse.Namespace) -> None:
    require_extra()
    import torch
    from rich.console import Console

    from sparse_losses import CollapseError
    from sparse_losses.demo import report

    started = time.perf_counter()
    torch.set_num_threads(options.threads)
    console = Console()
    folder = writable_folder(options.output)
    checkpoint = folder / CHECKPOINT
    _check_checkpoint(options, checkpoint)
    if any(not query.strip() for query in options.query):
        raise UserError("expected a question after --query, got an empty text")

    corpus, run = _prepare(console, options)
    if options.resume:
        run.load(checkpoint)
        console.print(f"Going on from step {run.step} of {run.settings.steps}.")
    elif checkpoint.exists():
        console.print(f"Starting afresh: {checkpoint} will be replaced (--resume would go on).")
    try:
        train(console, run, checkpoint)
    except CollapseError as error:
        raise UserError(str(error)) from error
    console.print()
    for side, controller in run.controllers.items():
        console.print(f"{_SIDES[side]}: {controller}", highlight=False)

    with _doing(console, "Ranking the test queries"):
        measuring = time.perf_counter()
        figures = report.measure(run, corpus)
        measured = time.perf_counter() - measuring
    report.show_rankings(console, figures)
    report.show_anatomy(console, figures, run.tokens.vocab_size)
    queries = [row.pairs[0].query for row in corpus.test]
    queries = [query for query in queries if " " in query][:5] or queries[:5]
    tops = report.top_tokens(run, queries)
    report.show_top_tokens(console, queries, tops)

    with _doing(console, "Indexing all documents"):
        index = report.Index(run, corpus)
    questions = options.query or ([] if options.pairs else list(EXAMPLES))
    answers = {question: index.search(question) for question in questions}
    for question, found in answers.items():
        report.show_answers(console, question, found)

    console.print("\n[bold]What to expect of it[/]")
    if run.settings.steps < STEPS:
        console.print(
            f" • {run.settings.steps} steps are less than a training: the default is {STEPS}.",
            highlight=False,
        )
    for limit in report.LIMITS + (() if options.pairs else report.DOCSTRING_LIMITS):
        console.print(f" • {limit}", highlight=False)
    seconds = {
        "training": run.seconds,
        "measuring": measured,
        "this call": time.perf_counter() - started,
    }
    report.write_json(
        folder / FIGURES,
        _figures_json(run, corpus, options, figures, tops, queries, answers, seconds),
    )
    report.draw(folder / PICTURE, run, figures)
    console.print(
        f"\nTrained in {run.seconds:.0f} s, {seconds['this call']:.0f} s in all. "
        f"Wrote {folder / PICTURE} and {folder / FIGURES}.",
        highlight=False,
        soft_wrap=True,
    )
    if sys.stdin.isatty() and not options.query:
        _prompt(console, index)


def _check_checkpoint(options: argparse.Namespace, checkpoint: Path) -> None:
    """Find out before any work whether going on, or starting afresh, would go wrong."""
    from sparse_losses.demo.training import Run, check_same_settings

    if not checkpoint.exists():
        if options.resume:
            raise UserError(f"nothing to resume: there is no {checkpoint}")
        return
    if options.resume:
        check_same_settings(checkpoint, Run.peek(checkpoint)[1], settings_of(options))
    elif not options.overwrite:
        try:
            step, made_with = Run.peek(checkpoint)
        except UserError:  # damaged: there is nothing to lose
            return
        if step < made_with["steps"]:
            raise UserError(
                f"{checkpoint} holds an unfinished run (step {step} of {made_with['steps']}): add "
                "--resume to go on, --overwrite to start afresh, or choose another --output"
            )


@contextmanager
def _doing(console: Console, what: str) -> Iterator[None]:
    """Say what takes a while: a spinner on a terminal, a line in a file."""
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(f"{what} …")
        yield


def _prepare(console: Console, options: argparse.Namespace) -> tuple[Corpus, Run]:
    from sparse_losses.demo import corpus as corpora
    from sparse_losses.demo import docstrings
    from sparse_losses.demo.training import Run

    if options.pairs:
        corpus = corpora.read_pairs(options.pairs)
    else:
        with _doing(console, "Reading the docstrings of your Python"):
            corpus = docstrings.load()
    console.print(
        f"{sum(len(row.pairs) for row in corpus.train):,} training pairs, "
        f"{len(corpus.validation)} validation and {len(corpus.test)} test rows from "
        + ", ".join(f"{name} {version}" for name, version in corpus.sources.items()),
        highlight=False,
    )
    with _doing(console, "Learning subwords and building the model"):
        run = Run(corpus, settings_of(options))
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    console.print(
        f"A transformer of {parameters / 1e6:.1f} million parameters over "
        f"{run.tokens.vocab_size:,} subwords, {run.settings.start} start, "
        f"seed {run.settings.seed}.",
        highlight=False,
    )
    return corpus, run


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that the command line asks for."""
    from sparse_losses.demo.objective import Weights
    from sparse_losses.demo.training import Settings

    return Settings(
        steps=options.steps,
        seed=options.seed,
        start=options.start,
        without=tuple(sorted(set(options.without))),
        target_active=options.target_active,
        target_active_query=options.target_active_query,
        weights=Weights(flops=options.flops_factor * Weights.flops),
    )


def train(console: Console, run: Run, checkpoint: Path) -> None:
    """Train under a progress bar, with a checkpoint now and then.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; the step was finished and saved first.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    from sparse_losses.demo.training import Step

    bar = Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
    task = bar.add_task("", total=run.settings.steps, completed=run.step)
    line = Text(style="dim")
    known: dict[tuple[str, str], Finding] = {}
    with _interrupt_between_steps() as interrupted, Live(Group(bar, line), console=console):

        def report(step: Step) -> None:
            bar.update(task, completed=step.step)
            line.plain = _terms_line(step)
            if step.step == FIRST_LOOK or step.step % 50 == 0:
                for said in _news(known, run.findings()):
                    console.print(f"step {step.step}, {said}", highlight=False, markup=False)
            if interrupted or step.step % 50 == 0 or step.step == run.settings.steps:
                run.save(checkpoint)
            if interrupted:
                raise KeyboardInterrupt(
                    f"Stopped after step {step.step}; saved to {checkpoint}. "
                    "Repeat the command with --resume to go on."
                )

        run.train(report)


def _news(known: dict[tuple[str, str], Finding], found: dict[str, list[Finding]]) -> Iterator[str]:
    """A line for each finding that is new or gone; ``known`` is brought up to date."""
    now = {(side, one.symptom): one for side, findings in found.items() for one in findings}
    for side, symptom in [gone for gone in known if gone not in now]:
        yield f"{_SIDES[side].lower()}: no longer: {symptom}"
    for (side, symptom), finding in now.items():
        if (side, symptom) not in known:
            yield f"{_SIDES[side].lower()}: {finding}"
    known.clear()
    known.update(now)


_SIDES = {"document": "Documents", "query": "Queries"}
_SHORT = {
    "info_nce": "nce",
    "flops": "flops",
    "min_activation": "min",
    "self_reconstruction": "self",
    "positive_activation": "pos",
}


def _terms_line(step: Any) -> str:
    terms = " ".join(f"{_SHORT[name]} {value:.2f}" for name, value in step.terms.items())
    return f"{terms} · active q {step.active_query:,.0f} d {step.active_document:,.0f}"


@contextmanager
def _interrupt_between_steps() -> Iterator[list[int]]:
    """Let the first Ctrl-C wait for the end of a step; the second one acts at once."""
    seen: list[int] = []

    def remember(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)


def _figures_json(
    run: Run,
    corpus: Corpus,
    options: argparse.Namespace,
    figures: Sequence[TaskFigures],
    tops: Sequence[Sequence[tuple[str, float]]],
    queries: Sequence[str],
    answers: dict[str, list[tuple[float, str, str]]],
    seconds: dict[str, float],
) -> dict[str, Any]:
    import torch

    import sparse_losses

    return {
        "versions": {"sparse-losses": sparse_losses.__version__, "torch": torch.__version__},
        "sources": corpus.sources,
        "rows": {
            "train": len(corpus.train),
            "train pairs": sum(len(row.pairs) for row in corpus.train),
            "validation": len(corpus.validation),
            "test": len(corpus.test),
        },
        "settings": dataclasses.asdict(run.settings),
        "threads": options.threads,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "test": [dataclasses.asdict(figure) for figure in figures],
        "top_tokens": dict(zip(queries, tops, strict=True)),
        "answers": {
            question: [{"cosine": round(score, 4), "title": title} for score, title, _ in found]
            for question, found in answers.items()
        },
        "validation": [dataclasses.asdict(probe) for probe in run.probes],
        "history": [dataclasses.asdict(step) for step in run.history],
    }


def _prompt(console: Console, index: Index) -> None:
    from sparse_losses.demo import report

    console.print("\nAsk your documentation (an empty line ends):")
    while True:
        try:
            question = console.input("[bold]? [/]").strip()
        except EOFError:
            return
        if not question:
            return
        report.show_answers(console, question, index.search(question))


if __name__ == "__main__":
    sys.exit(main())
