"""Code shared by the studies that train the demo's model: options, stored trainings, tables."""

from __future__ import annotations

import argparse
import dataclasses
import functools
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

from benchmarks.studies import debian
from examples.demo import docstrings
from sparse_losses._core.files import replaced_file

Result = dict[str, Any]
LOADERS = {"docstrings": docstrings.load, "debian": debian.load}


def study_parser(
    name: str,
    description: str,
    variants: Sequence[str],
    *,
    steps: Sequence[int],
    only: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Return the parser of a study; it trains the variants ``only`` by default."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.studies.{name}",
        description=f"{description} Finished runs are kept: repeat the command to continue where "
        "it stopped.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of every variant")
    add("--jobs", type=int, default=1, help="parallel trainings")
    add("--steps", type=int, nargs="+", default=steps, help="steps per training")
    add("--output", type=Path, default=Path(name), help="folder for runs and tables")
    add(
        "--only",
        nargs="+",
        choices=variants,
        default=list(only or variants),
        metavar="VARIANT",
        help=f"variants to train, out of {', '.join(map(repr, variants))}",
    )
    add("--corpora", nargs="+", choices=LOADERS, default=list(LOADERS), help="texts to train on")
    return parser


def run_all(
    options: argparse.Namespace,
    variants: Sequence[str],
    settings_of: Callable[[str, int, int], Any],
    run_one: Callable[[Any, Any], Result],
    loaders: Mapping[str, Callable[[], Any]] | None = None,
) -> Iterator[tuple[str, list[Result]]]:
    """Train the requested runs that are missing; yield all results of each corpus and length.

    Args:
        options: parsed by ``study_parser``.
        variants: all variants, in the order of the results; stored runs of others are left out.
        settings_of: maps a variant, a seed and a number of steps to a dataclass of settings.
        run_one: maps settings and corpus to a result with its ``sources``, in another process.
        loaders: functions that read the ``options.corpora``; default: ``LOADERS``.
    """
    for name in options.corpora:
        load = functools.cache((loaders or LOADERS)[name])
        for steps in options.steps:
            Console().print(f"{name}, {steps} steps", highlight=False)
            folder = options.output / f"{name}-{steps}"
            folder.mkdir(parents=True, exist_ok=True)
            jobs = []
            for variant, seed in itertools.product(options.only, options.seeds):
                path = folder / f"{variant.replace(' ', '-')}-{seed}.json"
                if not path.exists():
                    settings = settings_of(variant, seed, steps)
                    jobs.append((run_one, path, variant, seed, settings, load()))
            if jobs:
                with multiprocessing.get_context("spawn").Pool(options.jobs, _start) as pool:
                    for _ in track(pool.imap_unordered(_work, jobs), "runs", total=len(jobs)):
                        pass
            results = _read(folder, variants, functools.partial(settings_of, steps=steps))
            order = [(variants.index(one["variant"]), one["seed"]) for one in results]
            yield name, [results[n] for n in sorted(range(len(results)), key=order.__getitem__)]


def _read(
    folder: Path, variants: Sequence[str], settings_of: Callable[[str, int], Any]
) -> list[Result]:
    """Return the stored results; exit if other settings or installed versions made one."""
    results = []
    for path in folder.glob("*.json"):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SystemExit(f"error: {path} is damaged; delete it to train it again") from error
        if result["variant"] not in variants:
            continue
        settings = dataclasses.asdict(settings_of(result["variant"], result["seed"]))
        if result["settings"] != json.loads(json.dumps(settings)):
            raise SystemExit(
                f"error: {path} was made with other settings; choose another --output or delete it"
            )
        results.append(result)
    if len({json.dumps(result["sources"]) for result in results}) > 1:
        raise SystemExit(
            f"error: runs in {folder} are of other texts or different installed versions"
        )
    return results


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)


def _work(job: tuple[Callable[[Any, Any], Result], Path, str, int, Any, Any]) -> None:
    run_one, path, variant, seed, settings, corpus = job
    result = {"variant": variant, "seed": seed, "settings": dataclasses.asdict(settings)}
    result |= run_one(settings, corpus)
    with replaced_file(path, text=True) as file:
        file.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def publish(path: Path, table: str) -> None:
    """Write a table as Markdown and print it."""
    path.write_text(table, encoding="utf-8")
    print(table)


def sources_of(result: Result) -> str:
    """Return the versions of the texts of a run, as one cell."""
    return " ".join(f"{name} {version}" for name, version in result["sources"].items())


def spread(values: Sequence[float], form: str) -> str:
    """Format mean ± standard deviation over the seeds, or the value of a single seed."""
    mean = form.format(statistics.mean(values))
    return f"{mean} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else mean


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table; the columns after the first ``left`` are aligned as numbers."""
    ruler = "|---" * left + "|---:" * (len(headings) - left) + "|"
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, *rows)]
    return "\n".join([lines[0], ruler, *lines[1:], ""])
