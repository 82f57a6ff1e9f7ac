"""Code shared by the studies: options, stored trainings, tables of means and deviations."""

from __future__ import annotations

import argparse
import copy
import csv
import dataclasses
import itertools
import json
import multiprocessing
import signal
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from sparse_losses._core.files import replaced_file
from sparse_losses.demo import docstrings
from sparse_losses.demo.command import LOADERS
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
    """Return the parser of a study; it trains the variants ``only`` by default.

    With several numbers of ``steps``, every variant is trained for each. With ``corpora`` there is
    an option to select the texts.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.studies.{name}",
        description=f"{description} Finished runs are kept: repeat the command to continue where "
        "it stopped.",
    )
    add = parser.add_argument
    add(
        "--seeds",
        type=whole(0),
        nargs="+",
        default=[0, 1, 2],
        metavar="SEED",
        help="train every variant with each seed (default: 0 1 2)",
    )
    add("--jobs", type=whole(1), default=1, help="parallel trainings (default: %(default)s)")
    add(
        "--steps",
        type=whole(1),
        nargs=None if isinstance(steps, int) else "+",
        default=steps,
        help="steps per training (default: %(default)s)",
    )
    add(
        "--output",
        type=Path,
        default=Path(name),
        metavar="FOLDER",
        help="folder for runs, tables and plots (default: %(default)s)",
    )
    add(
        "--only",
        nargs="+",
        choices=variants,
        default=list(only or variants),
        metavar="VARIANT",
        help=f"variants to train, out of {', '.join(map(repr, variants))} (default: "
        + (", ".join(map(repr, only)) or "all")
        + ")",
    )
    if corpora:
        add(
            "--corpora",
            nargs="+",
            choices=CORPORA,
            default=list(CORPORA),
            help="the texts to train on, with a folder for each (default: all)",
        )
    return parser


def run_all(
    options: argparse.Namespace,
    variants: Sequence[str],
    settings_of: Callable[[str, int, int], Any],
    run_one: Callable[[Any, Any], Result],
    load: Callable[[], Any] = docstrings.load,
) -> list[Result]:
    """Train the requested runs that are missing; return all results in the output folder.

    Args:
        options: parsed by ``study_parser``.
        variants: all variants, in the order of the results.
        settings_of: maps a variant, a seed and a number of steps to a dataclass of settings.
        run_one: maps settings and corpus to a result with its ``sources``, in another process.
        load: returns the corpus.

    Raises:
        UserError: if the folder has runs with other settings or other installed versions.
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
        raise UserError(f"runs in {folder} are from different installed versions; delete old ones")
    return sorted(results, key=lambda one: (variants.index(one["variant"]), one["seed"]))


def run_each_corpus(
    options: argparse.Namespace,
    variants: Sequence[str],
    settings_of: Callable[[str, int, int], Any],
    run_one: Callable[[Any, Any], Result],
) -> Iterator[tuple[str, list[Result]]]:
    """Call ``run_all`` for every corpus in ``options``, each with a folder of its own."""
    for corpus in options.corpora:
        Console().print(corpus, highlight=False)
        own = copy.copy(options)
        own.output = options.output / corpus
        load = LOADERS[corpus].load
        yield corpus, run_all(own, variants, settings_of, run_one, load=load)


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)


def _work(job: tuple[Callable[[Any, Any], Result], Path, str, int, Any, Any]) -> Result:
    run_one, path, variant, seed, settings, corpus = job
    made = {"variant": variant, "seed": seed, "settings": dataclasses.asdict(settings)}
    made |= run_one(settings, corpus)
    write_json(path, made)
    return made


def write_json(path: Path, content: Any) -> None:
    """Write figures as JSON; an incomplete file never replaces the old one."""
    with replaced_file(path, text=True) as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that have the same columns."""
    with replaced_file(path, text=True) as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def by_variant(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Group rows by variant, in order of first appearance."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["variant"], []).append(row)
    return groups


def spread(values: Sequence[float], form: str) -> str:
    """Format mean ± standard deviation over the seeds, or the value of a single seed."""
    mean = form.format(statistics.mean(values))
    return f"{mean} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else mean


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table; the columns after the first ``left`` are aligned as numbers."""
    ruler = "|---" * left + "|---:" * (len(headings) - left) + "|"
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, *rows)]
    return "\n".join([lines[0], ruler, *lines[1:], ""])
