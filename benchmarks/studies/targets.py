"""Where the sparsity controller ends, and what fewer dimensions cost in recall."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console

from benchmarks.studies.ablation import run_one
from benchmarks.studies.runs import (
    Result,
    by_variant,
    markdown,
    run_all,
    spread,
    study_parser,
    write_csv,
)
from sparse_losses.demo.evaluation import MODEL
from sparse_losses.demo.options import STEPS, guarded
from sparse_losses.demo.training import Settings

VARIANTS: dict[str, int | None] = {
    "full": None,
    **{f"target {active}": active for active in (32, 64, 128, 256)},
}
TASKS = {"name_recall_10": "name → document", "summary_recall_10": "summary → rest"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is still missing, then write table and picture; exit codes as in the demo."""
    parser = study_parser(
        "targets",
        "Train the demo with its own FLOPS weight and with a controller that steers a document to "
        "so many active dimensions.",
        list(VARIANTS),
        steps=STEPS,
    )
    return guarded(_run, parser, arguments)


def settings_of(variant: str, seed: int, steps: int) -> Settings:
    """The demo's settings with a target."""
    return Settings(steps=steps, seed=seed, target_active=VARIANTS[variant])


def _run(options: argparse.Namespace) -> None:
    rows = [_row(result) for result in run_all(options, list(VARIANTS), settings_of, run_one)]
    write_csv(options.output / "targets.csv", rows)
    table = front_table(rows)
    (options.output / "targets.md").write_text(table, encoding="utf-8")
    draw(options.output / "front.svg", rows)
    Console().print(table, markup=False, highlight=False, soft_wrap=True)


def _row(result: Result) -> dict[str, Any]:
    """What was asked for, what came (the mean over both tasks' documents), and what it finds."""
    recalls = [task["rankings"][MODEL]["recall_10"] for task in result["test"]]
    return {
        "variant": result["variant"],
        "seed": result["seed"],
        "target": result["settings"]["target_active"],
        "active": statistics.mean(task["document_after"]["active"] for task in result["test"]),
        **dict(zip(TASKS, recalls, strict=True)),
        "status": result["controllers"].get("document", {"status": ""})["status"],
    }


def front_table(rows: Sequence[dict[str, Any]]) -> str:
    """Mean ± standard deviation over the seeds, and what the controller said at the end."""
    cells = []
    for variant, own in by_variant(rows).items():
        active, target = [row["active"] for row in own], own[0]["target"]
        off = "" if target is None else f"{statistics.mean(active) / target - 1:+.1%}"
        recalls = [spread([row[task] for row in own], "{:.3f}") for task in TASKS]
        said = ", ".join(sorted({row["status"] for row in own}))
        cells.append([variant, spread(active, "{:.1f}"), off, *recalls, said])
    headings = (
        "run",
        "active",
        "off by",
        "name R@10",
        "summary R@10",
        "the controller, at the end",
    )
    return markdown(headings, cells)


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Recall against active dimensions, a mark a training; dotted: what was asked for."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    targets = sorted({row["target"] for row in rows if row["target"]})
    panels = figure.subplots(1, 2, sharex=True)
    for axis, (task, title) in zip(panels, TASKS.items(), strict=True):
        for marker, (variant, own) in zip("ovs^D", by_variant(rows).items(), strict=False):
            axis.scatter(
                [row["active"] for row in own],
                [row[task] for row in own],
                marker=marker,
                label="a fixed weight" if variant == "full" else variant,
                zorder=3,
            )
        for target in targets:
            axis.axvline(target, linestyle=":", color="grey", linewidth=1)
        axis.set_xscale("log")
        axis.set_xticks(targets, [str(target) for target in targets])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("active dimensions of held-out documents")
        axis.set_ylabel("Recall@10")
        axis.set_title(title, fontsize=10)
        axis.grid(visible=True, axis="y", alpha=0.25)
    panels[0].legend(fontsize=8)
    with rc_context({"svg.hashsalt": "sparse-losses", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
