"""Runs made to go wrong: what is said of them and when, and what a target makes of them."""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads must not spin; before torch

from benchmarks.studies.ablation import add_study_options, leave_ctrl_c_to_the_parent
from sparse_losses.demo.__main__ import (
    guarded,
    require_extra,
    writable_folder,
)
from sparse_losses.demo.errors import UserError

if TYPE_CHECKING:
    from sparse_losses.demo.corpus import Corpus
    from sparse_losses.demo.training import Settings

STEPS, LOOK_EVERY, SAVE_EVERY, LOOKED_AT = 200, 10, 50, 64
# About what the demo's own weight leaves of a document and of a query.
TARGETS = {"target_active": 128, "target_active_query": 40}
FACTORS = {"collapse": 100.0, "never sparse": 0.001}
TURNS = {"collapse": "down", "never sparse": "up"}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in FACTORS},
    **{f"{name}, steered": TARGETS for name in FACTORS},
}
COLUMNS = (
    "variant",
    "seed",
    "steps",
    "named_at",
    "finding",
    "wrong_way",
    "active",
    "dead_rows",
    "name_recall_10",
    "summary_recall_10",
    "flops_weight",
    "controller",
    "collapse_error",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is still missing, then write the tables; exit codes as in the demo."""
    return guarded(_run, _parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.rescue",
        description="Train the demo with a hundred times its FLOPS weights and with a thousandth "
        "of them, without warm-up, each as it is and steered to a target, and write what was said "
        "of it. Finished runs are kept: repeat the command to go on where it stopped.",
    )
    add_study_options(parser, seeds=[0, 1, 2], steps=STEPS, output="rescue", jobs=True)
    return parser


def _run(options: argparse.Namespace) -> None:
    require_extra()
    import multiprocessing

    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    from sparse_losses.demo import docstrings

    folder = writable_folder(options.output)
    console = Console()
    runs = [(variant, seed) for seed in options.seeds for variant in VARIANTS]
    results = {run: _finished(folder, *run, options.steps) for run in runs}
    missing = [run for run in runs if results[run] is None]
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as bar:
        task = bar.add_task("runs", total=len(runs), completed=len(runs) - len(missing))
        if missing:
            corpus = docstrings.load()
            jobs = [(folder, *run, options.steps, corpus) for run in missing]
            context = multiprocessing.get_context("spawn")
            with context.Pool(options.jobs, leave_ctrl_c_to_the_parent) as pool:
                for result in pool.imap_unordered(run_one, jobs):
                    results[result["variant"], result["seed"]] = result
                    bar.advance(task)
                pool.close()
                pool.join()
    finished = [result for result in results.values() if result]
    if len({json.dumps(result["sources"]) for result in finished}) > 1:
        raise UserError(f"runs in {folder} come from different installed versions; delete the old")
    finished.sort(key=lambda result: (list(VARIANTS).index(result["variant"]), result["seed"]))
    write_tables(folder, finished)
    draw(folder / "rescue.svg", finished)
    console.print(table(finished), markup=False, highlight=False, soft_wrap=True)
    console.print(f"Wrote rescue.csv, rescue-steps.csv, rescue.md and rescue.svg to {folder}.")


def settings_of(variant: str, seed: int, steps: int) -> Settings:
    """The demo's settings with bad FLOPS weights from the first step on."""
    from sparse_losses.demo.objective import Weights
    from sparse_losses.demo.training import Settings

    factor = FACTORS[variant.removesuffix(", steered")]
    return Settings(
        steps=steps,
        seed=seed,
        without=("warmup",),
        weights=Weights(flops=factor * Weights.flops),
        **VARIANTS[variant],
    )


def run_one(job: tuple[Path, str, int, int, Corpus]) -> dict[str, Any]:
    """One training, with a look every few steps, kept in the folder as soon as it has ended."""
    import dataclasses

    import torch

    from sparse_losses import CollapseError
    from sparse_losses.demo.report import MODEL, measure, write_json
    from sparse_losses.demo.training import Run, Step

    folder, variant, seed, steps, corpus = job
    torch.set_num_threads(1)
    run = Run(corpus, settings_of(variant, seed, steps))
    texts = [pair.document for row in corpus.validation for pair in row.pairs][:LOOKED_AT]
    looks: list[dict[str, Any]] = []
    said: list[str] = []
    checkpoint = _path(folder, variant, seed).with_suffix(".pt")

    def look(step: Step) -> None:
        if run.controller is not None:
            status = str(run.controller.report()["status"])
            if said[-1:] != [status]:
                said.append(status)
        if step.step % SAVE_EVERY == 0 or step.step == 1:
            run.save(checkpoint)
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
                    {"symptom": one.symptom, "evidence": one.evidence, "changes": one.changes}
                    for found in run.findings().values()
                    for one in found
                ],
            }
        )

    error = None
    try:
        run.train(look)
    except CollapseError as collapse:
        error = str(collapse)
    held_out = [pair.document for row in corpus.test for pair in row.pairs]
    test = measure(run, corpus)
    result = {
        "variant": variant,
        "seed": seed,
        "settings": dataclasses.asdict(run.settings),
        "sources": corpus.sources,
        "steps": run.step,
        "looks": looks,
        "controller": said,
        "collapse_error": error,
        "active": statistics.mean(task.document_after.active for task in test),
        "dead_rows": (run.encode(held_out) == 0).all(1).double().mean().item(),
        "recall_10": [task.rankings[MODEL].recall_10 for task in test],
    }
    checkpoint.unlink(missing_ok=True)
    write_json(_path(folder, variant, seed), result)
    return result


def _path(folder: Path, variant: str, seed: int) -> Path:
    return folder / f"{variant.replace(', ', '-').replace(' ', '-')}-{seed}.json"


def _finished(folder: Path, variant: str, seed: int, steps: int) -> dict[str, Any] | None:
    import dataclasses

    path = _path(folder, variant, seed)
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    wanted = json.loads(json.dumps(dataclasses.asdict(settings_of(variant, seed, steps))))
    if result["settings"] != wanted:
        raise UserError(
            f"{path} was made with other settings; choose another --output or delete it"
        )
    return result


# Tables ------------------------------------------------------------------------------------------


def named(result: dict[str, Any]) -> tuple[int, str] | None:
    """The first look at which a finding asks for FLOPS in the right direction, and its words."""
    turn = TURNS[result["variant"].removesuffix(", steered")]
    for look in result["looks"]:
        for finding in look["findings"]:
            if any(name.endswith("_flops") and way == turn for name, way in finding["changes"]):
                return look["step"], finding["symptom"]
    return None


def wrong_way(result: dict[str, Any]) -> int:
    """How many looks asked for more FLOPS where it is too strong, or for less where too weak."""
    turn = TURNS[result["variant"].removesuffix(", steered")]
    return sum(
        any(
            name.endswith("_flops") and way in {"up", "down"} - {turn}
            for finding in look["findings"]
            for name, way in finding["changes"]
        )
        for look in result["looks"]
    )


def _row(result: dict[str, Any]) -> dict[str, Any]:
    step, finding = named(result) or ("", "")
    name_recall, summary_recall = result["recall_10"]
    return {
        "variant": result["variant"],
        "seed": result["seed"],
        "steps": result["steps"],
        "named_at": step,
        "finding": finding,
        "wrong_way": wrong_way(result),
        "active": result["active"],
        "dead_rows": result["dead_rows"],
        "name_recall_10": name_recall,
        "summary_recall_10": summary_recall,
        "flops_weight": result["looks"][-1]["flops_weight"],
        "controller": " > ".join(result["controller"]),
        "collapse_error": result["collapse_error"] or "",
    }


def write_tables(folder: Path, results: Sequence[dict[str, Any]]) -> None:
    """One row a training, one row a look, and the page's table."""
    with (folder / "rescue.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(_row, results))
    columns = ("step", "active", "dead_rows", "flops_weight")
    with (folder / "rescue-steps.csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("variant", "seed", *columns, "findings"))
        for result in results:
            for look in result["looks"]:
                symptoms = dict.fromkeys(finding["symptom"] for finding in look["findings"])
                numbers = (look[column] for column in columns)
                lines.writerow((result["variant"], result["seed"], *numbers, "; ".join(symptoms)))
    (folder / "rescue.md").write_text(table(results), encoding="utf-8")


def table(results: Sequence[dict[str, Any]]) -> str:
    """Every seed's figure, in order."""
    rows = [_row(result) for result in results]
    lines = [
        "| run | named at step | as | active | dead rows | name R@10 | summary R@10 |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    forms = {
        "active": "{:.0f}",
        "dead_rows": "{:.0%}",
        "name_recall_10": "{:.3f}",
        "summary_recall_10": "{:.3f}",
    }
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        steps = ", ".join(str(row["named_at"] or "never") for row in own)
        findings = "; ".join(dict.fromkeys(row["finding"] for row in own))
        cells = [
            ", ".join(form.format(row[column]) for row in own) for column, form in forms.items()
        ]
        lines.append("| " + " | ".join([variant, steps, findings, *cells]) + " |")
    return "\n".join([*lines, ""])


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Active dimensions through training, a line a run; a mark where the cause was first named."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "sparse-losses", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    colours = dict(zip(VARIANTS, ("#c5403a", "#2a78d6", "#eda100", "#1baf7a"), strict=True))
    for result in results:
        variant, looks = result["variant"], result["looks"]
        first = result["seed"] == results[0]["seed"]
        axis.plot(
            [look["step"] for look in looks],
            [max(look["active"], 0.5) for look in looks],
            color=colours[variant],
            alpha=1.0 if first else 0.4,
            label=variant if first else None,
        )
        if at := named(result):
            (active,) = (look["active"] for look in looks if look["step"] == at[0])
            axis.plot(at[0], max(active, 0.5), "o", color=colours[variant], markersize=7, zorder=3)
    axis.axhline(TARGETS["target_active"], linestyle=":", color="grey", linewidth=1)
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("active dimensions of held-out documents")
    axis.grid(visible=True, axis="y", alpha=0.25)
    axis.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
