"""Train a sparse retriever, compare it with BM25 on test queries, and ask it questions.

The pairs come from the docstrings of the installed Python, torch, numpy, sympy and networkx;
nothing is downloaded. It takes about five minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sparse_losses import RECOMMENDED, CollapseError

try:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import MofNCompleteColumn, Progress
    from rich.text import Text

    from examples.demo import docstrings, report
    from examples.demo.evaluation import Index, measure, top_tokens
    from examples.demo.training import STEPS, Run, Settings, Step
except ModuleNotFoundError as error:
    raise SystemExit(
        f"error: the demo needs {error.name}; `make demo` installs it, and so does pip install "
        "--group demo at the root of the repository"
    ) from error

QUESTIONS = (
    "shortest path between two nodes",
    "inverse of a matrix",
    "remove spaces from both ends",
)
FIRST_LOOK = 10  # a wrong weight is visible by then, before it does damage; then every 50 steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo; exit with 1 for a user's mistake and 130 for Ctrl-C."""
    try:
        run(parser().parse_args(arguments))
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        raise SystemExit(130) from None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    add = options.add_argument
    add("--steps", type=whole(1), default=STEPS, help="training steps (default: %(default)s)")
    add("--seed", type=whole(0), default=0, help="seed of weights and batches (default: 0)")
    terms = RECOMMENDED.weights
    add(
        "--without",
        nargs="+",
        choices=terms,
        default=[],
        metavar="TERM",
        help=f"terms of the loss to switch off, out of {', '.join(terms)}",
    )
    add(
        "--target-active",
        type=whole(0),
        default=int(RECOMMENDED.target_active["document_flops"]),
        metavar="N",
        help="adjust the documents' FLOPS weight so that a document keeps N active dimensions; 0 "
        "keeps the weight fixed (default: %(default)s)",
    )
    question = "a question for the trained model; repeatable (default: a few, and a prompt)"
    add("--query", action="append", metavar="TEXT", help=question)
    folder = "the folder for figures and picture (default: %(default)s)"
    add("--output", type=Path, default=Path("sparse-losses-demo"), metavar="FOLDER", help=folder)
    return options


def whole(minimum: int) -> Callable[[str], int]:
    """Return a type for argparse: whole numbers from ``minimum`` to torch's largest integer."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not minimum <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {minimum}, got {text!r}"
            )
        return int(text)

    return parse


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings of the command line."""
    target = {"document_flops": options.target_active} if options.target_active else {}
    preset = RECOMMENDED.replace(target_active=target).without(*options.without)
    return Settings(steps=options.steps, seed=options.seed, preset=preset)


def writable(folder: Path) -> Path:
    """Return the folder, created where it does not exist; exit if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SystemExit(f"error: cannot write to the folder {folder}: {error.strerror}") from error
    return folder


def run(options: argparse.Namespace) -> None:
    """Read, train, measure, answer, and write the figures and the picture to the folder."""
    started = time.perf_counter()
    torch.set_num_threads(1)  # makes figures reproducible, and is faster on texts this small
    console = Console(highlight=False)
    folder = writable(options.output)
    with console.status("Reading the texts"):
        corpus = docstrings.load()
    pairs = sum(len(row.pairs) for row in corpus.train)
    console.print(
        f"{pairs:,} training pairs, {len(corpus.validation)} validation and {len(corpus.test)} "
        "test rows from "
        + ", ".join(f"{name} {version}" for name, version in corpus.sources.items())
    )
    with console.status("Learning subwords and building the model"):
        trained = Run(corpus, settings_of(options))
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    console.print(
        f"A transformer of {parameters / 1e6:.1f} million parameters over "
        f"{trained.tokens.vocab_size:,} subwords, seed {options.seed}."
    )
    try:
        train(console, trained)
    except CollapseError as error:
        raise SystemExit(f"error: {error}") from error

    with console.status("Ranking the test queries and indexing all documents"):
        figures = measure(trained, corpus)
        queries = [row.pairs[0].query for row in corpus.test]
        queries = [query for query in queries if " " in query][:5] or queries[:5]
        tops = dict(zip(queries, top_tokens(trained, queries), strict=True))
        index = Index(trained, corpus)
        answers = {question: index.search(question) for question in options.query or QUESTIONS}
    report.show(console, trained, figures, tops, answers)
    report.draw(folder / "training.png", trained, figures)
    seconds = {"training": trained.seconds, "this call": time.perf_counter() - started}
    report.write(folder / "figures.json", trained, corpus, seconds, figures, tops, answers)
    console.print(
        f"\nTrained in {trained.seconds:.0f} s, {seconds['this call']:.0f} s in all. "
        f"Wrote training.png and figures.json to {folder}.",
        soft_wrap=True,
    )
    if sys.stdin.isatty() and not options.query:
        console.print("\nAsk your documentation (an empty line ends):")
        while question := console.input("[bold]? [/]").strip():
            report.show_answers(console, question, index.search(question))


def train(console: Console, run: Run) -> None:
    """Train with a progress bar; print each finding of ``advise`` once, at the end the targets."""
    bar = Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console)
    task = bar.add_task("steps", total=run.settings.steps)
    line = Text(style="dim")
    known: set[tuple[str, str]] = set()

    def after(step: Step) -> None:
        bar.update(task, completed=step.step)
        terms = " ".join(f"{name} {value:.2f}" for name, value in step.terms.items())
        line.plain = f"{terms} · active q {step.active_query:,.0f} d {step.active_document:,.0f}"
        if step.step != FIRST_LOOK and step.step % 50:
            return
        for side, findings in run.findings().items():
            for finding in findings:
                if (side, finding.symptom) not in known:
                    known.add((side, finding.symptom))
                    console.print(f"step {step.step}, {side}: {finding}", markup=False)

    with Live(Group(bar, line), console=console):
        run.train(after)
    for controller in run.controllers.values():
        console.print(str(controller), markup=False)


if __name__ == "__main__":
    main()
