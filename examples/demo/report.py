"""The figures of a finished run: tables for the terminal, a picture, and JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import sparse_losses
from examples.demo.corpus import Corpus
from examples.demo.evaluation import MODEL, RARE, TaskFigures
from examples.demo.training import Run

Tops = dict[str, list[tuple[str, float]]]  # highest tokens by query
Answers = dict[str, list[tuple[float, str, str]]]  # score, title and text by question


def show(
    console: Console, run: Run, figures: Sequence[TaskFigures], tops: Tops, answers: Answers
) -> None:
    """Print all figures and answers."""
    for side, controller in run.controllers.items():
        console.print(f"\n{side}: {controller}")
    show_rankings(console, figures)
    show_anatomy(console, figures, run.tokens.vocab_size)
    table = _table("The vectors of held-out queries", ("query", "its highest tokens"), ())
    for query, row in tops.items():
        tokens = "  ".join(f"{escape(name)} [dim]{value}[/]" for name, value in row)
        table.add_row(escape(query), tokens)
    console.print(table)
    for question, results in answers.items():
        show_answers(console, question, results)


def show_rankings(console: Console, figures: Sequence[TaskFigures]) -> None:
    """Print Recall and MRR of every system and task."""
    for figure in figures:
        title = f"{figure.task}: {figure.queries} held-out queries"
        table = _table(title, ("system",), ("Recall@1", "Recall@10", "MRR@10"))
        for system, ranking in figure.rankings.items():
            cells = (f"{value:.3f}" for value in dataclasses.astuple(ranking))
            table.add_row(system, *cells, style="bold" if system == MODEL else "")
        console.print(table)


def show_anatomy(console: Console, figures: Sequence[TaskFigures], vocab_size: int) -> None:
    """Print statistics of the vectors, before and after training."""
    shares = ("stopwords", "special", "rare", "own")
    title = f"The vectors, of {vocab_size:,} dimensions"
    table = _table(title, ("vectors of", "training"), ("active", *shares))
    for figure in figures:
        for part, side in zip(figure.task.split(" → "), ("query", "document"), strict=True):
            for when in ("before", "after"):
                look = getattr(figure, f"{side}_{when}")
                cells = (f"{getattr(look, share):.1%}" for share in shares)
                name = part if when == "before" else ""
                active = f"{look.active:,.0f}"
                table.add_row(name, when, active, *cells, end_section=when == "after")
    console.print(table)
    console.print(
        "stopwords, special, rare: share of a text's ten highest dimensions; rare: in at most "
        f"{RARE} training documents and not in the text; own: share of a text's tokens that are "
        "active"
    )


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(*left, title=title, title_justify="left")
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def show_answers(
    console: Console, question: str, answers: Sequence[tuple[float, str, str]]
) -> None:
    """Print the best answers to a question, each with the beginning of its text."""
    console.print(f"\n[bold]? {escape(question)}[/]")
    if not answers:
        console.print("  No document shares a token with this question.")
    for score, title, text in answers:
        heading = f"  {score:.2f}  [bold]{escape(title)}[/]"
        console.print(heading, no_wrap=True, overflow="ignore", crop=False)
        beginning = Text(f"        {text[:200]}", style="dim")
        console.print(beginning, no_wrap=True, overflow="ellipsis")


def write(
    path: Path,
    run: Run,
    corpus: Corpus,
    seconds: dict[str, float],
    figures: Sequence[TaskFigures],
    tops: Tops,
    answers: Answers,
) -> None:
    """Write all results of the run as JSON."""
    content = {
        "versions": {"sparse-losses": sparse_losses.__version__, "torch": torch.__version__},
        "sources": corpus.sources,
        "rows": {part: len(getattr(corpus, part)) for part in ("train", "validation", "test")},
        "settings": dataclasses.asdict(run.settings),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "test": [dataclasses.asdict(figure) for figure in figures],
        "top_tokens": tops,
        "answers": {
            question: [{"score": round(score, 4), "title": title} for score, title, _ in results]
            for question, results in answers.items()
        },
        "validation": [dataclasses.asdict(probe) for probe in run.probes],
        "history": [dataclasses.asdict(step) for step in run.history],
    }
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def draw(path: Path, run: Run, figures: Sequence[TaskFigures]) -> None:
    """Draw losses, recall and active dimensions during training in one picture."""
    picture = Figure(figsize=(13.5, 4.4), dpi=150, layout="constrained")
    losses, recall, active = picture.subplots(1, 3)
    steps = [step.step for step in run.history]
    for name in dict.fromkeys(name for step in run.history for name in step.terms):
        values = (step.terms.get(name, 0.0) for step in run.history)
        smooth = itertools.accumulate(values, lambda mean, value: 0.8 * mean + 0.2 * value)
        losses.plot(steps, list(smooth), label=name.replace("_", " "))
    losses.set_yscale("symlog", linthresh=1)
    losses.yaxis.set_major_formatter("{x:g}")
    losses.set_title("Weighted loss terms (logarithmic beyond ±1)")

    measured = {"Recall@10": "recall_10", "MRR@10": "mrr_10", "Recall@1": "recall_1"}
    for name, attribute in measured.items():
        values = [getattr(probe.ranking, attribute) for probe in run.probes]
        recall.plot([probe.step for probe in run.probes], values, label=name, marker="o")
    recall.set_ylim(0, 1)
    recall.set_title(f"{figures[0].task}: {len(run.probe_texts[0])} validation queries")

    for side, name in (("document", "documents"), ("query", "queries")):
        values = [getattr(step, f"active_{side}") for step in run.history]
        active.plot(steps, values, label=f"{name}, at the end {values[-1]:,.0f}")
    active.set_yscale("symlog", linthresh=1)
    active.set_ylim(0, 1.5 * run.tokens.vocab_size)
    active.yaxis.set_major_formatter("{x:,.0f}")
    active.set_title(f"Active dimensions of {run.tokens.vocab_size:,} (logarithmic)")

    for axes in (losses, recall, active):
        axes.set_xlabel("step")
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(
            frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12)
        )
    picture.savefig(path, metadata={"Software": None})
