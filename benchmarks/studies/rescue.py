"""Runs with bad weights: what the diagnostics find and when, and whether a target rescues them."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.studies.runs import (
    Result,
    by_variant,
    markdown,
    run_all,
    study_parser,
    write_csv,
)
from sparse_losses import COSINE, CollapseError
from sparse_losses._core.files import replaced_file
from sparse_losses.demo.corpus import Corpus
from sparse_losses.demo.evaluation import MODEL, measure
from sparse_losses.demo.options import guarded
from sparse_losses.demo.training import Run, Settings, Step

STEPS, LOOK_EVERY, LOOKED_AT = 200, 10, 64
FACTORS = {"collapse": 100.0, "never sparse": 0.001}
TURNS = {"collapse": "down", "never sparse": "up"}
# About the active dimensions of documents and queries with the preset's own weight.
TARGETS = {"target_active": 128, "target_active_query": 40}
VARIANTS = [*FACTORS, *(f"{name}, steered" for name in FACTORS)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the tables; return an exit code as the demo does."""
    parser = study_parser(
        "rescue",
        "Train the demo's model with COSINE, a hundred times its FLOPS weights and a thousandth of "
        "them, without warm-up, with and without a target, and write what the diagnostics found.",
        VARIANTS,
        steps=STEPS,
    )
    return guarded(_run, parser, arguments)


def settings_of(variant: str, seed: int, steps: int) -> Settings:
    """Return settings with bad FLOPS weights from the first step on."""
    name, _, steered = variant.partition(", ")
    terms = ("query_flops", "document_flops")
    weights = {term: FACTORS[name] * COSINE.weights[term] for term in terms}
    return Settings(
        steps=steps,
        seed=seed,
        without=("warmup",),
        preset=COSINE.replace(weights=weights),
        **(TARGETS if steered else {}),
    )


def run_one(settings: Settings, corpus: Corpus) -> Result:
    """Train once, with diagnostics every few steps."""
    run = Run(corpus, settings)
    texts = [pair.document for row in corpus.validation for pair in row.pairs][:LOOKED_AT]
    looks: list[dict[str, Any]] = []
    said: list[str] = []

    def look(step: Step) -> None:
        if controller := run.controllers.get("document"):
            status = str(controller.report()["status"])
            if said[-1:] != [status]:
                said.append(status)
        if step.step % LOOK_EVERY and step.step != 1:
            return
        counts = (run.encode(texts) > 0).sum(1).double()
        looks.append(
            {
                "step": step.step,
                "active": counts.mean().item(),
                "dead_rows": (counts == 0).double().mean().item(),
                "flops_weight": run.objective.weights["document_flops"],
                "findings": [
                    {"symptom": one.symptom, "changes": one.changes}
                    for found in run.findings().values()
                    for one in found
                ],
            }
        )

    error = ""
    try:
        run.train(look)
    except CollapseError as collapse:
        error = str(collapse)
    held_out = [pair.document for row in corpus.test for pair in row.pairs]
    test = measure(run, corpus)
    return {
        "sources": corpus.sources,
        "steps": run.step,
        "looks": looks,
        "controller": said,
        "collapse_error": error,
        "active": statistics.mean(task.document_after.active for task in test),
        "dead_rows": (run.encode(held_out) == 0).all(1).double().mean().item(),
        "recall_10": [task.rankings[MODEL].recall_10 for task in test],
    }


def _run(options: argparse.Namespace) -> None:
    results = run_all(options, VARIANTS, settings_of, run_one)
    rows = [row_of(result) for result in results]
    write_csv(options.output / "rescue.csv", rows)
    looks = [
        {
            **{name: result[name] for name in ("variant", "seed")},
            **{name: look[name] for name in ("step", "active", "dead_rows", "flops_weight")},
            "findings": "; ".join(dict.fromkeys(one["symptom"] for one in look["findings"])),
        }
        for result in results
        for look in result["looks"]
    ]
    write_csv(options.output / "rescue-steps.csv", looks)
    with replaced_file(options.output / "rescue.md", text=True) as page:
        page.write(table(rows))
    draw(options.output / "rescue.svg", results)
    Console().print(table(rows), markup=False, highlight=False, soft_wrap=True)


def asked_for(result: Result, right: bool) -> list[tuple[int, str]]:
    """Return step and symptom of findings that change FLOPS in the right (or wrong) direction."""
    turn = TURNS[result["variant"].removesuffix(", steered")]
    return [
        (look["step"], finding["symptom"])
        for look in result["looks"]
        for finding in look["findings"]
        if any(n.endswith("_flops") and (way == turn) == right for n, way in finding["changes"])
    ]


def row_of(result: Result) -> dict[str, Any]:
    """Return the row of one training."""
    step, finding = (asked_for(result, right=True) or [("", "")])[0]
    name_recall, summary_recall = result["recall_10"]
    return {
        "variant": result["variant"],
        "seed": result["seed"],
        "steps": result["steps"],
        "named_at": step,
        "finding": finding,
        "wrong_way": len({step for step, _ in asked_for(result, right=False)}),
        "active": result["active"],
        "dead_rows": result["dead_rows"],
        "name_recall_10": name_recall,
        "summary_recall_10": summary_recall,
        "flops_weight": result["looks"][-1]["flops_weight"],
        "controller": " > ".join(result["controller"]),
        "collapse_error": result["collapse_error"],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the figures of every seed, in order."""
    headings = ("run", "named at step", "as", "active", "dead rows", "name R@10", "summary R@10")
    forms = {
        "active": "{:.0f}",
        "dead_rows": "{:.0%}",
        "name_recall_10": "{:.3f}",
        "summary_recall_10": "{:.3f}",
    }
    cells = []
    for variant, own in by_variant(rows).items():
        steps = ", ".join(str(row["named_at"] or "never") for row in own)
        findings = "; ".join(dict.fromkeys(row["finding"] for row in own))
        figures = (", ".join(f.format(row[name]) for row in own) for name, f in forms.items())
        cells.append([variant, steps, findings, *figures])
    return markdown(headings, cells, left=3)


def draw(path: Path, results: Sequence[Result]) -> None:
    """Plot active dimensions over steps, one line per run; mark the first correct finding."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    colours = dict(zip(VARIANTS, ("#c5403a", "#2a78d6", "#eda100", "#1baf7a"), strict=True))
    for result in results:
        first = result["seed"] == results[0]["seed"]
        active = {look["step"]: max(look["active"], 0.5) for look in result["looks"]}
        axis.plot(
            list(active),
            list(active.values()),
            color=colours[result["variant"]],
            alpha=1.0 if first else 0.4,
            label=result["variant"] if first else None,
        )
        for step, _ in asked_for(result, right=True)[:1]:
            axis.plot(step, active[step], "o", color=colours[result["variant"]], zorder=3)
    axis.axhline(TARGETS["target_active"], linestyle=":", color="grey", linewidth=1)
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("active dimensions of held-out documents")
    axis.grid(visible=True, axis="y", alpha=0.25)
    axis.legend(fontsize=8)
    with rc_context({"svg.hashsalt": "sparse-losses", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
