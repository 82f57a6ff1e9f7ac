"""What the studies share: options, trainings that are kept, tables of means and deviations."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import multiprocessing
import signal
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from sparse_losses._core.files import replaced_file
from sparse_losses.demo import docstrings
from sparse_losses.demo.options import CORPORA, UserError, whole, writable_folder

Result = dict[str, Any]


def study_parser(
    name: str,
    description: str,
    variants: Sequence[str],
    *,
    steps: int | Sequence[int],
    only: Sequence[str] = (),
    corpora: bool = False,
) -> argparse.ArgumentParser:
    """The options of a study; ``only`` are the variants that it trains by default.

    Where ``steps`` are several numbers, every one is a training of its own. With ``corpora`` there
    is an option for the texts.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.studies.{name}",
        description=f"{description} Finished runs are kept: repeat the command to go on where it "
        "stopped.",
    )
    add = parser.add_argument
    add(
        "--seeds",
        type=whole(0),
        nargs="+",
        default=[0, 1, 2],
        metavar="SEED",
        help="one training of every variant for each (default: 0 1 2)",
    )
    add("--jobs", type=whole(1), default=1, help="trainings at once (default: %(default)s)")
    add(
        "--steps",
        type=whole(1),
        nargs=None if isinstance(steps, int) else "+",
        default=steps,
        help="of every training (default: %(default)s)",
    )
    add(
        "--output",
        type=Path,
        default=Path(name),
        metavar="FOLDER",
        help="where runs, tables and pictures go (default: %(default)s)",
    )
    add(
        "--only",
        nargs="+",
        choices=variants,
        default=list(only or variants),
        metavar="VARIANT",
        help=f"what to train, of {', '.join(map(repr, variants))} (default: "
        + (", ".join(map(repr, only)) or "all")
        + ")",
    )
    if corpora:
        add(
            "--corpora",
            nargs="+",
            choices=CORPORA,
            default=list(CORPORA),
            help="the texts to train on, each in a folder of its own (default: all)",
        )
    return parser


def run_all(
    options: argparse.Namespace,
    variants: Sequence[str],
    settings_of: Callable[[str, int, int], Any],
    run_one: Callable[[Any, Any], Result],
    load: Callable[[], Any] = docstrings.load,
) -> list[Result]:
    """Train what was asked for and is missing; the results of all runs in the output folder.

    Args:
        options: of ``study_parser``.
        variants: all there are, in the order of the results.
        settings_of: a dataclass of settings for a variant, a seed and a number of steps.
        run_one: from settings and corpus to a result with its ``sources``, in another process.
        load: makes the corpus.

    Raises:
        UserError: for a folder with runs of other settings or other installed versions.
    """
    folder = writable_folder(options.output / "runs")
    jobs = []
    for variant, seed in itertools.product(options.only, options.seeds):
        path = folder / f"{variant.replace(' ', '-')}-{seed}.json"
        if not path.exists():
            jobs.append((run_one, path, variant, seed, settings_of(variant, seed, options.steps)))
    if jobs:
        corpus = load()
        with multiprocessing.get_context("spawn").Pool(options.jobs, _start) as pool:
            finished = pool.imap_unordered(_work, [(*job, corpus) for job in jobs])
            for _ in track(finished, description="runs", total=len(jobs)):
                pass
    results = []
    for path in folder.glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        settings = settings_of(result["variant"], result["seed"], options.steps)
        if result["settings"] != json.loads(json.dumps(dataclasses.asdict(settings))):
            raise UserError(
                f"{path} was made with other settings; choose another --output or delete it"
            )
        results.append(result)
    if len({json.dumps(result["sources"]) for result in results}) > 1:
        raise UserError(f"runs in {folder} come from different installed versions; delete the old")
    return sorted(results, key=lambda one: (variants.index(one["variant"]), one["seed"]))


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    torch.set_num_threads(1)


def _work(job: tuple[Callable[[Any, Any], Result], Path, str, int, Any, Any]) -> Result:
    run_one, path, variant, seed, settings, corpus = job
    made = {"variant": variant, "seed": seed, "settings": dataclasses.asdict(settings)}
    made |= run_one(settings, corpus)
    write_json(path, made)
    return made


def write_json(path: Path, content: Any) -> None:
    """Write figures; a file cut short never takes the old one's place."""
    with replaced_file(path, text=True) as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that have the same columns."""
    with replaced_file(path, text=True) as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def by_variant(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows of one variant together, in the order of the first of each."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["variant"], []).append(row)
    return groups


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation over the seeds; of one seed, its value."""
    mean = form.format(statistics.mean(values))
    return f"{mean} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else mean


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first ``left`` columns are words and the others numbers."""
    ruler = "|---" * left + "|---:" * (len(headings) - left) + "|"
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, *rows)]
    return "\n".join([lines[0], ruler, *lines[1:], ""])
