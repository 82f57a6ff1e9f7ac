"""The figures of a finished run, as tables for the terminal and as a picture."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sparse_losses.demo.evaluation import MODEL, RARE, TaskFigures
from sparse_losses.demo.options import STEPS
from sparse_losses.demo.training import Run, Settings

LIMITS = (
    "A few thousand pairs and a few minutes teach weights and word forms, but hardly any synonyms: "
    "a question finds its answer if they share words; in other words it often does not.",
    "Texts are cut at {words} subwords, for the model and for BM25; whole texts help BM25.",
    "Some of the tokens that a vector adds to its text are chance effects of a small corpus.",
)
DOCSTRING_LIMITS = (
    "The model beats BM25 on names mostly because of tokens with similar spelling (try --without "
    "spelling); if query and text share their words, BM25 on the same subwords is hard to beat.",
    "All figures are for the versions named above; other versions have other documents.",
)


def show_rankings(console: Console, figures: Sequence[TaskFigures]) -> None:
    """Print Recall and MRR of every system and task."""
    for figure in figures:
        table = _table(
            f"{figure.task}: {figure.queries} held-out queries",
            ("system",),
            ("Recall@1", "Recall@10", "MRR@10"),
        )
        for system, scored in figure.rankings.items():
            cells = (f"{value:.3f}" for value in dataclasses.astuple(scored))
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
    table = Table(title=title, title_justify="left")
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def show_top_tokens(console: Console, tops: dict[str, list[tuple[str, float]]]) -> None:
    """Print the highest tokens of each query."""
    table = _table("The vectors of held-out queries", ("query", "its highest tokens"), ())
    for query, row in tops.items():
        held = "  ".join(f"{escape(name)} [dim]{value}[/]" for name, value in row)
        table.add_row(escape(query), held)
    console.print(table)


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


def show_limits(console: Console, settings: Settings, docstrings: bool) -> None:
    """Print the limits of the model."""
    console.print("\n[bold]Limits of this model[/]")
    limits = LIMITS + (DOCSTRING_LIMITS if docstrings else ())
    if settings.steps < STEPS:
        limits = ("{steps} steps are too few for a good model: the default is {default}.", *limits)
    words = settings.size.max_length - 2
    for limit in limits:
        console.print(" • " + limit.format(words=words, steps=settings.steps, default=STEPS))


def draw(path: Path, run: Run, figures: Sequence[TaskFigures]) -> None:
    """Draw losses, recall and active dimensions during training in one picture."""
    picture = Figure(figsize=(13.5, 4.4), dpi=150, layout="constrained")
    losses, recall, active = picture.subplots(1, 3)
    steps = [step.step for step in run.history]
    for name in dict.fromkeys(name for step in run.history for name in step.terms):
        values = _smooth([step.terms.get(name, 0.0) for step in run.history])
        losses.plot(steps, values, label=name.replace("_", " "))
    losses.set_yscale("symlog", linthresh=1)
    losses.yaxis.set_major_formatter("{x:g}")
    losses.set_title("Weighted loss terms (logarithmic beyond ±1)")

    probed = [probe.step for probe in run.probes]
    for name, attribute in (
        ("Recall@10", "recall_10"),
        ("MRR@10", "mrr_10"),
        ("Recall@1", "recall_1"),
    ):
        values = [getattr(probe.ranking, attribute) for probe in run.probes]
        recall.plot(probed, values, label=name, marker="o")
    recall.set_ylim(0, 1)
    count = len(run.probe_texts[0])
    recall.set_title(f"{figures[0].task}: {count} validation queries")

    for name, values in (
        ("documents", [step.active_document for step in run.history]),
        ("queries", [step.active_query for step in run.history]),
    ):
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


def _smooth(values: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(values, lambda mean, value: 0.8 * mean + 0.2 * value))
