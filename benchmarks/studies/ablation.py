"""What each loss is for: the demo with every part switched off in turn, over several seeds."""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads must not spin; before torch

from sparse_losses.demo.__main__ import (
    guarded,
    positive_number,
    require_extra,
    seed_number,
    writable_folder,
)
from sparse_losses.demo.errors import UserError
from sparse_losses.demo.switches import STEPS, SWITCHES

if TYPE_CHECKING:
    from sparse_losses.demo.corpus import Corpus
    from sparse_losses.demo.training import Settings

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    **{f"without {name}": {"without": (name,)} for name in SWITCHES},
    "without positive_activation and flops": {"without": ("flops", "positive_activation")},
    "plain FLOPS": {"plain_flops": True},
    "sparse start": {"start": "sparse"},
}
# Asked for by name: where the sparsity controller ends, and what it costs.
TARGETS: dict[str, dict[str, Any]] = {
    f"target {active}": {"target_active": active} for active in (32, 64, 128, 256)
}
HEADINGS = {
    "name_recall_1": "name R@1",
    "name_recall_10": "name R@10",
    "name_mrr_10": "name MRR@10",
    "summary_mrr_10": "summary MRR@10",
    "active_query": "active, query",
    "active_document": "active, document",
    "stopwords": "stopwords",
    "special": "special",
    "rare": "rare",
    "own": "own",
    "query_special": "special, query",
    "query_rare": "rare, query",
}
COLUMNS = tuple(HEADINGS)
RANKING_COLUMNS = COLUMNS[:4]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is still missing, then write the tables; exit codes as in the demo."""
    return guarded(_run, _parser(), arguments)


def add_study_options(
    parser: argparse.ArgumentParser,
    *,
    seeds: Sequence[int],
    steps: int,
    output: str,
    jobs: bool = False,
) -> None:
    """What every study of several trainings can be told."""
    add = parser.add_argument
    add(
        "--seeds",
        type=seed_number,
        nargs="+",
        default=list(seeds),
        metavar="SEED",
        help=f"one training of every variant for each (default: {' '.join(map(str, seeds))})",
    )
    if jobs:
        add(
            "--jobs",
            type=positive_number,
            default=1,
            metavar="N",
            help="trainings at once, one thread each (default: %(default)s)",
        )
    add(
        "--steps",
        type=positive_number,
        default=steps,
        metavar="N",
        help="training steps of every run (default: %(default)s)",
    )
    add(
        "--output",
        type=Path,
        default=Path(output),
        metavar="FOLDER",
        help="where the runs, tables and pictures go (default: %(default)s)",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.ablation",
        description="Train the demo with every loss and ingredient switched off in turn and write "
        "the test figures as JSON, CSV and a Markdown table. Finished runs are kept: repeat the "
        "command to go on where it stopped.",
    )
    add_study_options(parser, seeds=[0, 1, 2], steps=STEPS, output="ablation", jobs=True)
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        choices=VARIANTS | TARGETS,
        default=list(VARIANTS),
        metavar="VARIANT",
        help="some variants only: "
        + ", ".join(f"'{name}'" for name in VARIANTS)
        + "; or a sparsity to steer to: "
        + ", ".join(f"'{name}'" for name in TARGETS),
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    require_extra()
    import multiprocessing

    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    from sparse_losses.demo import docstrings

    folder = writable_folder(options.output)
    console = Console()
    runs = [(variant, seed) for seed in options.seeds for variant in options.only]
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
    _write_tables(folder, finished)
    table = (folder / "ablation.md").read_text(encoding="utf-8")
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    if any(result["variant"] in TARGETS for result in finished):
        front = front_of(finished)
        (folder / "front.md").write_text(front_table(front), encoding="utf-8")
        write_front(folder / "front.csv", front)
        draw_front(folder / "front.svg", front)
        console.print(front_table(front), markup=False, highlight=False, soft_wrap=True)
    console.print(f"Wrote ablation.json, ablation.csv and ablation.md to {folder}.")


def leave_ctrl_c_to_the_parent() -> None:
    """What a worker process does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def settings_of(variant: str, seed: int, steps: int) -> Settings:
    """The demo's settings with one thing changed."""
    from sparse_losses.demo.training import Settings

    return Settings(steps=steps, seed=seed, **(VARIANTS | TARGETS)[variant])


def run_one(job: tuple[Path, str, int, int, Corpus]) -> dict[str, Any]:
    """One training and its test figures, kept in the folder as soon as they are known."""
    import dataclasses

    import torch

    from sparse_losses.demo.report import measure, write_json
    from sparse_losses.demo.training import Run

    folder, variant, seed, steps, corpus = job
    torch.set_num_threads(1)
    run = Run(corpus, settings_of(variant, seed, steps))
    run.train()
    result = {
        "variant": variant,
        "seed": seed,
        "settings": dataclasses.asdict(run.settings),
        "sources": corpus.sources,
        "seconds": round(run.seconds, 1),
        "controller": run.controller and run.controller.report(),
        "test": [dataclasses.asdict(figures) for figures in measure(run, corpus)],
    }
    write_json(_path(folder, variant, seed), result)
    return result


def _path(folder: Path, variant: str, seed: int) -> Path:
    return folder / f"{variant.replace(' ', '-').lower()}-{seed}.json"


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


def figures_of(result: dict[str, Any], system: str) -> dict[str, float]:
    """The columns of the table from one run's test figures; vectors are the name task's."""
    from sparse_losses.demo.report import UNTRAINED

    name, summary = result["test"]
    when = "before" if system == UNTRAINED else "after"
    query, document = name[f"query_{when}"], name[f"document_{when}"]
    return {
        "name_recall_1": name["rankings"][system]["recall_1"],
        "name_recall_10": name["rankings"][system]["recall_10"],
        "name_mrr_10": name["rankings"][system]["mrr_10"],
        "summary_mrr_10": summary["rankings"][system]["mrr_10"],
        "active_query": query["active"],
        "active_document": document["active"],
        **{share: document[share] for share in ("stopwords", "special", "rare", "own")},
        "query_special": query["special"],
        "query_rare": query["rare"],
    }


def _write_tables(folder: Path, results: Sequence[dict[str, Any]]) -> None:
    from sparse_losses.demo.report import BM25_SUBWORDS, BM25_WORDS, MODEL, UNTRAINED, write_json

    rows = [
        {"variant": UNTRAINED, "seed": result["seed"], **figures_of(result, UNTRAINED)}
        for result in results
        if result["variant"] == "full"
    ]
    rows += [
        {"variant": result["variant"], "seed": result["seed"], **figures_of(result, MODEL)}
        for result in results
    ]
    with (folder / "ablation.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ("variant", "seed", *COLUMNS))
        writer.writeheader()
        writer.writerows(rows)

    summary: dict[str, dict[str, Any]] = {}
    for variant in dict.fromkeys(str(row["variant"]) for row in rows):
        chosen = [row for row in rows if row["variant"] == variant]
        summary[variant] = {"seeds": [row["seed"] for row in chosen]} | {
            column: {
                "mean": statistics.mean(values := [float(row[column]) for row in chosen]),
                "std": statistics.stdev(values) if len(values) > 1 else 0.0,
            }
            for column in COLUMNS
        }
    baselines = {
        system: {column: figures_of(results[0], system)[column] for column in RANKING_COLUMNS}
        for system in (BM25_WORDS, BM25_SUBWORDS)
    }
    sources = results[0]["sources"]
    write_json(
        folder / "ablation.json",
        {"sources": sources, "baselines": baselines, "summary": summary, "runs": rows},
    )
    (folder / "ablation.md").write_text(markdown(summary, baselines, sources), encoding="utf-8")


def markdown(
    summary: dict[str, dict[str, Any]],
    baselines: dict[str, dict[str, float]],
    sources: dict[str, str],
) -> str:
    """The table for the documentation: mean ± standard deviation over the seeds."""
    heads = ("run", *HEADINGS.values())
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * len(HEADINGS) + "|"]
    for system, figures in baselines.items():
        cells = [f"{value:.3f}" for value in figures.values()]
        empty = [""] * (len(COLUMNS) - len(RANKING_COLUMNS))
        lines.append("| " + " | ".join([system, *cells, *empty]) + " |")
    for variant, columns in summary.items():
        cells = []
        for column in COLUMNS:
            mean, spread = columns[column]["mean"], columns[column]["std"]
            if column.startswith("active"):
                cells.append(f"{mean:,.0f} ± {spread:,.0f}")
            elif column in RANKING_COLUMNS:
                cells.append(f"{mean:.3f} ± {spread:.3f}")
            else:
                cells.append(f"{mean:.1%} ± {spread:.1%}")
        lines.append("| " + " | ".join([variant, *cells]) + " |")
    seeds = max(len(columns["seeds"]) for columns in summary.values())
    lines += [
        "",
        f"Test queries; mean ± standard deviation of {seeds} seed{'s' * (seeds > 1)}. Active: "
        "dimensions above zero (name → document). Stopwords, special, rare: share of the ten "
        "highest dimensions, a document's unless said; rare: in at most 5 training documents and "
        "not in the text. Own: share of a document's own tokens that are active. Documents of "
        + ", ".join(f"{name} {version}" for name, version in sources.items())
        + ".",
        "",
    ]
    return "\n".join(lines)


# Targets -----------------------------------------------------------------------------------------


class Point(NamedTuple):
    """One training: what was asked for, what came, and what it finds."""

    variant: str
    seed: int
    target: int | None
    active: float  # of held-out documents, the mean over the tasks
    recall: tuple[float, ...]  # at 10, of each task
    status: str


def front_of(results: Sequence[dict[str, Any]]) -> list[Point]:
    """The runs with a target, and the full ones to compare with."""
    from sparse_losses.demo.report import MODEL

    points = []
    for result in results:
        if result["variant"] not in ("full", *TARGETS):
            continue
        active = statistics.mean(task["document_after"]["active"] for task in result["test"])
        recall = tuple(task["rankings"][MODEL]["recall_10"] for task in result["test"])
        controller = result.get("controller") or {"status": ""}
        target = result["settings"]["target_active"]
        points.append(
            Point(result["variant"], result["seed"], target, active, recall, controller["status"])
        )
    return sorted(points, key=lambda point: (point.target or 0, point.variant, point.seed))


def write_front(path: Path, points: Sequence[Point]) -> None:
    """One row a training."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ("variant", "seed", "target", "active", "name_recall_10", "summary_recall_10", "status")
        )
        writer.writerows((*point[:4], *point.recall, point.status) for point in points)


def front_table(points: Sequence[Point]) -> str:
    """Mean ± standard deviation over the seeds, and what the controller said at the end."""
    lines = [
        "| run | active | off by | name R@10 | summary R@10 | the controller, at the end |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for variant in dict.fromkeys(point.variant for point in points):
        own = [point for point in points if point.variant == variant]
        target = own[0].target
        active = [point.active for point in own]
        off = "" if target is None else f"{statistics.mean(active) / target - 1:+.1%}"
        cells = [_spread(active, "{:.1f}"), off]
        cells += [
            _spread(values, "{:.3f}") for values in zip(*(p.recall for p in own), strict=True)
        ]
        said = ", ".join(sorted({point.status for point in own}))
        lines.append("| " + " | ".join([variant, *cells, said]) + " |")
    return "\n".join([*lines, ""])


def _spread(values: Sequence[float], form: str) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{form.format(statistics.mean(values))} ± {form.format(deviation)}"


def draw_front(path: Path, points: Sequence[Point]) -> None:
    """Recall against active dimensions, a mark a training; dotted: what was asked for."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "sparse-losses", "svg.fonttype": "none"}
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), sharex=True, layout="constrained")
    targets = sorted({point.target for point in points if point.target})
    for task, (axis, title) in enumerate(
        zip(axes, ("name → document", "summary → rest"), strict=True)
    ):
        for number, variant in enumerate(dict.fromkeys(point.variant for point in points)):
            own = [point for point in points if point.variant == variant]
            label = "a fixed weight" if variant == "full" else variant
            axis.scatter(
                [point.active for point in own],
                [point.recall[task] for point in own],
                marker="ovs^D"[number % 5],
                label=label,
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
    axes[0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
