"""The figures of a finished run: tables for the terminal, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from examples.demo.evaluation import MODEL, RARE

Results = dict[str, Any]  # the content of figures.json
SHARES = ("stopwords", "special", "rare", "own")


def show(console: Console, results: Results) -> None:
    """Print all figures and answers."""
    for figure in results["test"]:
        title = f"{figure['task']}: {figure['queries']} held-out queries"
        table = _table(title, ("system",), ("Recall@1", "Recall@10", "MRR@10"))
        for system, ranking in figure["rankings"].items():
            cells = (f"{value:.3f}" for value in ranking.values())
            table.add_row(system, *cells, style="bold" if system == MODEL else "")
        console.print(table)

    table = _table("The vectors", ("vectors of", "training"), ("active", *SHARES))
    for figure in results["test"]:
        for part, side in zip(figure["task"].split(" → "), ("query", "document"), strict=True):
            for when in ("before", "after"):
                look = figure[f"{side}_{when}"]
                cells = (f"{look['active']:,.0f}", *(f"{look[share]:.1%}" for share in SHARES))
                table.add_row(part, when, *cells, end_section=when == "after")
    console.print(table)
    console.print(
        "stopwords, special, rare: share of a text's ten highest dimensions; rare: in at most "
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


def draw(path: Path, results: Results) -> None:
    """Draw losses, recall and active dimensions during training in one picture."""
    picture = Figure(figsize=(13.5, 4.4), dpi=150, layout="constrained")
    losses, recall, active = picture.subplots(1, 3)
    history, probes = results["history"], results["validation"]
    steps = [step["step"] for step in history]
    for name in dict.fromkeys(name for step in history for name in step["terms"]):
        values = [step["terms"].get(name, 0.0) for step in history]  # 0 before a warm-up
        losses.plot(steps, values, label=name.replace("_", " "), linewidth=1)
    losses.set(title="weighted loss terms", yscale="symlog")
    for name, key in (("Recall@1", "recall_1"), ("Recall@10", "recall_10"), ("MRR@10", "mrr_10")):
        values = [probe["ranking"][key] for probe in probes]
        recall.plot([probe["step"] for probe in probes], values, label=name, marker="o")
    recall.set(title=f"{results['test'][0]['task']}, validation queries", ylim=(0, 1))
    for side in ("document", "query"):
        values = [step[f"active_{side}"] for step in history]
        active.plot(steps, values, label=f"{side}, at the end {values[-1]:,.0f}")
    active.set(title="active dimensions", yscale="symlog")
    for axes in (losses, recall, active):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    picture.savefig(path, metadata={"Software": None})
