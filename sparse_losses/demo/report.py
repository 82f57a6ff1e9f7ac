"""The figures of a finished run, as tables for the terminal, a picture and a JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sparse_losses.demo.corpus import Corpus
from sparse_losses.demo.evaluation import Anatomy, Ranking, anatomy, bm25_scores, ranking
from sparse_losses.demo.training import Run, cosine, pair_texts

LIMITS = (
    "A few thousand pairs and a few minutes teach weights and word forms, hardly any synonyms: a "
    "question finds its answer when it shares words with it; asked in other words, often not.",
    "Texts are cut at 62 subwords, for the model and for BM25 alike; whole texts help BM25.",
    "Some of the tokens that a vector adds to its text are accidents of a small corpus.",
)
DOCSTRING_LIMITS = (
    "Where the model is ahead of BM25 by name, it is mostly by tokens spelt alike (try --without "
    "spelling); where query and text share their words, BM25 on the same subwords is hard to beat.",
    "All figures hold for the versions named above; other versions are other documents.",
)
MODEL, UNTRAINED, BM25_WORDS, BM25_SUBWORDS = (
    "this model",
    "untrained model",
    "BM25, words",
    "BM25, same subwords",
)


@dataclasses.dataclass(frozen=True)
class TaskFigures:
    """Everything measured on one task: rankings by system, and the vectors before and after."""

    task: str
    queries: int
    rankings: dict[str, Ranking]
    query_before: Anatomy
    query_after: Anatomy
    document_before: Anatomy
    document_after: Anatomy


def measure(run: Run, corpus: Corpus) -> list[TaskFigures]:
    """Rank the test queries of every task by the model, by itself untrained, and by BM25."""
    untrained = run.untrained()
    figures = []
    for number, task in enumerate(corpus.tasks):
        queries, documents = pair_texts(corpus.test, number)
        rankings = {}
        looks: list[Anatomy] = []
        for system, model in ((UNTRAINED, untrained), (MODEL, run.model)):
            query, document = run.encode(queries, model), run.encode(documents, model)
            rankings[system] = ranking(cosine(query, document))
            for vectors, texts in ((query, queries), (document, documents)):
                looks.append(anatomy(vectors, run.tokens.ids(texts), run.tokens, run.df.df))
        for system, cut in ((BM25_WORDS, run.tokens.words), (BM25_SUBWORDS, run.tokens.pieces)):
            rankings[system] = ranking(bm25_scores(cut(queries), cut(documents)))
        ordered = {name: rankings[name] for name in (UNTRAINED, BM25_WORDS, BM25_SUBWORDS, MODEL)}
        before, after = looks[:2], looks[2:]
        figures.append(
            TaskFigures(task, len(queries), ordered, before[0], after[0], before[1], after[1])
        )
    return figures


def top_tokens(run: Run, texts: Sequence[str], count: int = 8) -> list[list[tuple[str, float]]]:
    """The highest dimensions of each text, by name."""
    values, tokens = run.encode(texts).topk(min(count, run.tokens.vocab_size), dim=1)
    return [
        [
            (run.tokens.name(token), round(value, 2))
            for token, value in zip(row_tokens, row_values, strict=True)
            if value > 0
        ]
        for row_tokens, row_values in zip(tokens.tolist(), values.tolist(), strict=True)
    ]


class Index:
    """All texts of a corpus as sparse vectors, to be searched with free questions."""

    def __init__(self, run: Run, corpus: Corpus) -> None:
        self._run = run
        self._rows = corpus.rows
        texts = [row.text for row in self._rows]
        parts = (run.encode(texts[start : start + 500]) for start in range(0, len(texts), 500))
        normalize = torch.nn.functional.normalize
        self._vectors = torch.cat([normalize(part, dim=1).to_sparse() for part in parts])

    def search(self, question: str, count: int = 5) -> list[tuple[float, str, str]]:
        """Cosine, title and excerpt of the best answers; none where nothing is shared."""
        query = torch.nn.functional.normalize(self._run.encode([question]), dim=1)
        scores = torch.sparse.mm(self._vectors, query.T).squeeze(1)
        values, found = scores.topk(min(count, len(self._rows)))
        return [
            (value, self._rows[index].title, self._rows[index].excerpt)
            for value, index in zip(values.tolist(), found.tolist(), strict=True)
            if value > 0
        ]


# Terminal ----------------------------------------------------------------------------------------


def show_rankings(console: Console, figures: Sequence[TaskFigures]) -> None:
    """Recall and MRR of every system and task."""
    for figure in figures:
        table = Table(
            title=f"{figure.task}: {figure.queries} held-out queries", title_justify="left"
        )
        table.add_column("system")
        for heading in ("Recall@1", "Recall@10", "MRR@10"):
            table.add_column(heading, justify="right")
        for system, scored in figure.rankings.items():
            cells = (f"{value:.3f}" for value in dataclasses.astuple(scored))
            table.add_row(system, *cells, style="bold" if system == MODEL else "")
        console.print(table)


def show_anatomy(console: Console, figures: Sequence[TaskFigures], vocab_size: int) -> None:
    """What vectors are made of, before and after training."""
    table = Table(
        title=f"What the vectors hold, of {vocab_size:,} dimensions",
        title_justify="left",
        caption="stopwords, special, rare: share of a text's ten highest dimensions; rare: in at "
        "most 5 training documents and not in the text; own: share of a text's tokens that are "
        "active",
        caption_justify="left",
    )
    table.add_column("vectors of")
    table.add_column("")
    for heading in ("active", "stopwords", "special", "rare", "own"):
        table.add_column(heading, justify="right")
    for figure in figures:
        asked, found = (part.strip() for part in figure.task.split("→"))
        for side, before, after in (
            (f"{asked} (query)", figure.query_before, figure.query_after),
            (f"{found} (text)", figure.document_before, figure.document_after),
        ):
            for when, look in (("before", before), ("after", after)):
                name = side if when == "before" else ""
                shares = (look.stopwords, look.special, look.rare, look.own)
                cells = (f"{share:.1%}" for share in shares)
                active = f"{look.active:,.0f}"
                table.add_row(name, when, active, *cells, end_section=when == "after")
    console.print(table)


def show_top_tokens(
    console: Console, queries: Sequence[str], tokens: Sequence[Sequence[tuple[str, float]]]
) -> None:
    """Which tokens a query has become."""
    table = Table(title="What five held-out queries have become", title_justify="left")
    table.add_column("query", ratio=2)
    table.add_column("its highest tokens", ratio=3)
    for query, row in zip(queries, tokens, strict=True):
        held = "  ".join(f"{escape(name)} [dim]{value}[/]" for name, value in row)
        table.add_row(escape(query), held)
    console.print(table)


def show_answers(
    console: Console, question: str, answers: Sequence[tuple[float, str, str]]
) -> None:
    """The best answers to a question, each with the beginning of its text."""
    console.print(f"\n[bold]? {escape(question)}[/]", highlight=False)
    if not answers:
        console.print("  No document shares a token with this question.")
    for score, title, excerpt in answers:
        heading = f"  {score:.2f}  [bold]{escape(title)}[/]"
        console.print(heading, highlight=False, no_wrap=True, overflow="ignore", crop=False)
        beginning = Text(f"        {excerpt}", style="dim")
        console.print(beginning, no_wrap=True, overflow="ellipsis")


# Files -------------------------------------------------------------------------------------------


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write figures for machines; a file cut short never takes the old one's place."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


_INK, _MUTED, _GRID = "#0b0b0b", "#52514e", "#e3e2de"
_COLOURS = {
    "info_nce": "#2a78d6",
    "flops": "#eb6834",
    "min_activation": "#1baf7a",
    "self_reconstruction": "#eda100",
    "positive_activation": "#e87ba4",
}


def draw(path: Path, run: Run, figures: Sequence[TaskFigures]) -> None:
    """Losses, recall and active dimensions through training, in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, recall, active) = pyplot.subplots(1, 3, figsize=(13.5, 4.6), dpi=150)
    steps = [step.step for step in run.history]
    names = list(dict.fromkeys(name for step in run.history for name in step.terms))
    for name in names:
        values = _smooth([step.terms.get(name, 0.0) for step in run.history])
        losses.plot(steps, values, color=_COLOURS[name], label=name.replace("_", " "), lw=2)
    losses.set_yscale("symlog", linthresh=1)
    losses.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    losses.set_title("Weighted loss terms (logarithmic beyond ±1)")
    losses.axhline(0, color=_GRID, lw=1, zorder=0)

    probed = [probe.step for probe in run.probes]
    for name, attribute, colour in (
        ("Recall@10", "recall_10", "#2a78d6"),
        ("MRR@10", "mrr_10", "#1baf7a"),
        ("Recall@1", "recall_1", "#eb6834"),
    ):
        values = [getattr(probe.ranking, attribute) for probe in run.probes]
        recall.plot(probed, values, color=colour, label=name, lw=2, marker="o", ms=4)
    recall.set_ylim(0, 1)
    count = len(run.probe_rows)
    recall.set_title(f"{figures[0].task}: {count} validation queries, {count} documents")

    for name, attribute, colour, side in (
        ("documents", "active_document", "#2a78d6", "bottom"),
        ("queries", "active_query", "#eb6834", "top"),
    ):
        values = [max(1.0, getattr(step, attribute)) for step in run.history]
        active.plot(steps, values, color=colour, label=name, lw=2)
        if values:
            note, place = f" {values[-1]:,.0f}", (steps[-1], values[-1])
            active.annotate(note, place, color=_INK, va=side, fontsize=9)
    active.set_yscale("log")
    active.set_ylim(1, 1.5 * run.tokens.vocab_size)
    active.margins(x=0.12)
    active.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    active.set_title(f"Active dimensions of {run.tokens.vocab_size:,} (log scale)")

    for axes in (losses, recall, active):
        axes.set_xlabel("step", color=_MUTED)
        axes.legend(
            frameon=False,
            fontsize=8,
            labelcolor=_MUTED,
            ncols=3,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
        )
        axes.grid(color=_GRID, lw=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_GRID)
        axes.tick_params(colors=_MUTED, labelsize=8, which="both")
        axes.title.set(color=_INK, fontsize=10, fontweight="bold")
    figure.tight_layout(w_pad=2.5)
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)


def _smooth(values: Sequence[float], keep: float = 0.8) -> list[float]:
    smoothed: list[float] = []
    for value in values:
        smoothed.append(value if not smoothed else keep * smoothed[-1] + (1 - keep) * value)
    return smoothed
