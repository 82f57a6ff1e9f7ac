"""The figures of a finished run, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from examples.demo.evaluation import MODEL, RARE

Results = dict[str, Any]  # the content of figures.json
SHARES = ("stopwords", "rare", "own")


def show(console: Console, results: Results) -> None:
    """Print all figures and answers."""
    for figure in results["test"]:
        title = f"{figure['task']}: {figure['queries']} held-out queries"
        table = _table(title, ("system",), ("Recall@1", "Recall@10", "MRR@10"))
        for system, ranking in figure["rankings"].items():
            cells = (f"{value:.3f}" for value in ranking.values())
            table.add_row(system, *cells, style="bold" if system == MODEL else "")
        console.print(table)

    table = _table("The vectors of the test texts", ("vectors of",), ("whole", "pruned", *SHARES))
    for figure in results["test"]:
        for part, side in zip(figure["task"].split(" → "), ("query", "document"), strict=True):
            look = figure[side]
            counts = (f"{look[name]:,.1f}" for name in ("active_unpruned", "active"))
            table.add_row(part, *counts, *(f"{look[share]:.1%}" for share in SHARES))
        whole, pruned = (f"{figure[key]:.2f}" for key in ("products_unpruned", "products"))
        table.add_row("products of a pair", whole, pruned, end_section=True)
    console.print(table)
    console.print(
        "stopwords, rare: share of a text's ten highest dimensions; rare: in at most "
        f"{RARE} training documents and not in the text; own: share of a text's tokens that are "
        "active"
    )

    table = _table("The vectors of held-out queries", ("query", "its highest tokens"), ())
    for query, row in results["top_tokens"].items():
        tokens = "  ".join(f"{escape(name)} [dim]{value}[/]" for name, value in row)
        table.add_row(escape(query), tokens)
    console.print(table)
    for question, answers in results["answers"].items():
        show_answers(console, question, answers)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(*left, title=title, title_justify="left")
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def show_answers(console: Console, question: str, answers: Sequence[dict[str, Any]]) -> None:
    """Print the best answers to a question, each with the beginning of its text."""
    console.print(f"\n[bold]? {escape(question)}[/]")
    if not answers:
        console.print("  No document shares a token with this question.")
    for answer in answers:
        title, text = escape(answer["title"]), escape(answer["text"][:200])
        console.print(f"  {answer['score']:.2f}  [bold]{title}[/]", no_wrap=True, crop=False)
        console.print(f"        [dim]{text}[/]", no_wrap=True, overflow="ellipsis")
