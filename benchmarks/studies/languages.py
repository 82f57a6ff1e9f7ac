"""What a language penalty does: one retriever with and without it, on names in twelve languages.

Run it with ``python -m benchmarks.studies.languages``.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads must not spin; before torch

from benchmarks.studies.ablation import add_study_options
from sparse_losses.demo.__main__ import (
    guarded,
    require_extra,
    writable_folder,
)
from sparse_losses.demo.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.studies.locale_names import Names, Pieces
    from sparse_losses import SpladeObjective, TrainingSchedule

EXTRA = ("babel", "matplotlib", "rich", "tokenizers")
STEPS = 300
PENALTY = 100.0
VARIANTS: dict[str, dict[str, Any]] = {
    "no penalty": {},
    "penalty 0.0005": {"language": 5e-4},
    "penalty 0.005": {"language": 5e-3},
    "penalty 0.05": {"language": 5e-2},
    "penalty 0.5": {"language": 0.5},
    "penalty 0.005 from the start": {"language": 5e-3, "late": False},
    "penalty 0.005, Hangul alone": {"language": 5e-3, "scripts": ("Hangul",)},
    "FLOPS x 3": {"flops": 9e-3},
    "FLOPS x 10": {"flops": 3e-2},
}
DEFAULT = ("no penalty", "penalty 0.005")
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
MEASURES = ("active", "foreign", "hangul", "latin", "silent")
FIGURES = (
    "recall_10",
    "mrr_10",
    *(f"{side}_{name}" for side in ("query", "document") for name in MEASURES),
)
COLUMNS = ("variant", "seed", "steps", *FIGURES, "seconds", "versions", "device")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides the figures of a run on one thread, the tokenizer aside.

    Attributes:
        language: weight of the language penalty, for queries and documents alike.
        late: whether that penalty waits for 40% of the training, then rises fourfold each 10%.
        scripts: what is allowed, beside Common and Inherited.
        flops: weight of FLOPS on each side; it rises for 30% of the training.
    """

    steps: int = STEPS
    seed: int = 0
    language: float = 0.0
    late: bool = True
    scripts: tuple[str, ...] = ("Hangul", "Latin")
    flops: float = 3e-3
    positive_activation: float = 1.0
    temperature: float = 0.05
    batch_size: int = 32
    learning_rate: float = 1e-3
    hidden: int = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is still missing, then write table and picture; exit codes as in the demo."""
    return guarded(_run, _parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.languages",
        description="Train a small retriever to find the names of places, languages, scripts and "
        "currencies in English and ten other languages by their Korean name, with and without a "
        "language penalty, and see which scripts its vectors are written in. The names are "
        "Babel's; nothing is downloaded. About a minute and a half a training on one core. "
        "Finished trainings are kept: repeat the command to go on where it stopped.",
    )
    add_study_options(parser, seeds=[0], steps=STEPS, output="languages")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=VARIANTS,
        default=list(DEFAULT),
        metavar="VARIANT",
        help="what to train (default: "
        + " ".join(f"'{name}'" for name in DEFAULT)
        + "); one of "
        + ", ".join(f"'{name}'" for name in VARIANTS),
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    require_extra(EXTRA)
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from benchmarks.studies import locale_names

    torch.set_num_threads(1)
    console = Console()
    path = writable_folder(options.output) / "languages.csv"
    rows = _finished(path, options.steps)
    wanted = [(variant, seed) for seed in options.seeds for variant in options.only]
    missing_runs = [run for run in wanted if run not in {_run_of(row) for row in rows}]
    if missing_runs:
        names = locale_names.load()
        pieces = locale_names.Pieces([t for i in names.train for t in (i.query, i.document)])
        console.print(
            f"{len(names.train):,} names to train on, {len(names.held_out)} to ask for, "
            f"{pieces.vocab_size:,} subwords.",
            highlight=False,
        )
        with Progress(console=console) as bar:
            for variant, seed in missing_runs:
                task = bar.add_task(f"{variant}, seed {seed}", total=options.steps)
                settings = Settings(options.steps, seed, **VARIANTS[variant])
                # Called within this turn of the loop, so `task` is still its own.
                figures = run_one(names, pieces, settings, lambda: bar.advance(task))  # noqa: B023
                rows.append({"variant": variant, "steps": options.steps, **figures})
                _write(path, rows)
    table = markdown(rows)
    (options.output / "languages.md").write_text(table, encoding="utf-8")
    draw(options.output / "languages.svg", rows)
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Wrote languages.csv, languages.md and languages.svg to {options.output}.")


# One training ------------------------------------------------------------------------------------


def make_objective(pieces: Pieces, settings: Settings) -> SpladeObjective:
    """InfoNCE, FLOPS, positive activation and, if it has a weight, the language penalty."""
    from sparse_losses import (
        InfoNCELoss,
        LanguagePenaltyLoss,
        SpladeObjective,
        language_penalty,
        language_token_ids,
    )

    allowed = language_token_ids(pieces.tokenizer, settings.scripts)
    penalty = language_penalty(
        pieces.vocab_size, allowed, special_token_ids=pieces.special_ids, penalty=PENALTY
    )
    weights = {"info_nce": 1.0}
    for side in ("query", "document"):
        weights[f"{side}_flops"] = settings.flops
        weights[f"{side}_positive_activation"] = settings.positive_activation
        weights[f"{side}_language_penalty"] = settings.language
    return SpladeObjective(
        {name: weight for name, weight in weights.items() if weight},
        info_nce=InfoNCELoss(temperature=settings.temperature, symmetric=True),
        language_penalty=LanguagePenaltyLoss(penalty),
        special_token_ids=pieces.special_ids,
    )


def make_schedule(objective: SpladeObjective, settings: Settings) -> TrainingSchedule:
    """FLOPS rises at the start; the language penalty may wait until the model has learned."""
    from sparse_losses import Curriculum, Phase, TrainingSchedule, Warmup

    rise = max(1, round(0.3 * settings.steps))
    warmups = {n: Warmup(rise, "quadratic") for n in objective.weights if n.endswith("flops")}
    language = [name for name in objective.weights if name.endswith("language_penalty")]
    if not language or not settings.late:
        return TrainingSchedule(objective, warmups=warmups)
    shares = {(1, 4): 0.0, (5, 5): 1 / 64, (6, 6): 1 / 16, (7, 7): 1 / 4, (8, 10): 1.0}
    tenths = Curriculum(
        [
            Phase(*span, weights=dict.fromkeys(language, share * settings.language))
            for span, share in shares.items()
        ]
    )
    tenth = max(1, settings.steps // 10)
    return TrainingSchedule(objective, tenths, warmups=warmups, steps_per_epoch=tenth)


def run_one(
    names: Names, pieces: Pieces, settings: Settings, report: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Train, then ask for the held-out names among the documents of all; the row of the table."""
    import babel
    import tokenizers
    import torch

    from sparse_losses import DocumentFrequency, SpladeBatch, Texts
    from sparse_losses.demo.evaluation import ranking
    from sparse_losses.demo.model import ModelSize, SparseEncoder
    from sparse_losses.demo.tokens import pad
    from sparse_losses.demo.training import cosine

    started = time.perf_counter()
    queries = pieces.ids([item.query for item in names.train])
    documents = pieces.ids([item.document for item in names.train])
    counts = DocumentFrequency(pieces.vocab_size)
    texts = pad(documents)
    counts.update(texts.input_ids, texts.attention_mask)
    torch.manual_seed(settings.seed)
    model = SparseEncoder(
        pieces.vocabulary(), counts.idf(), size=ModelSize(settings.hidden, layers=1)
    )
    objective = make_objective(pieces, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    schedule = make_schedule(objective, settings)
    schedule.attach(optimizer)
    generator = torch.Generator().manual_seed(settings.seed)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            rest = 1 - step / settings.steps
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / 20) * rest
        drawn = torch.randperm(len(queries), generator=generator)[: settings.batch_size].tolist()
        anchor, positive = (
            Texts(model(batch), batch.input_ids, batch.attention_mask)
            for batch in (pad([side[index] for index in drawn]) for side in (queries, documents))
        )
        total, _ = objective(SpladeBatch(anchor, positive))
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        report()

    def encode(texts: Sequence[str]) -> Tensor:
        rows = pieces.ids(texts)
        with torch.no_grad():
            return torch.cat([model(pad(rows[i : i + 64])) for i in range(0, len(rows), 64)])

    asked = encode([item.query for item in names.held_out])
    held_out = encode([item.document for item in names.held_out])
    trained = encode([item.document for item in names.train])
    ranks = ranking(cosine(asked, torch.cat([held_out, trained])))
    figures: dict[str, float] = {"recall_10": ranks.recall_10, "mrr_10": ranks.mrr_10}
    for side, vectors in (("query", asked), ("document", held_out)):
        for name, value in in_scripts(vectors, pieces, settings.scripts).items():
            figures[f"{side}_{name}"] = value
    return {
        "seed": settings.seed,
        **{name: round(value, 5) for name, value in figures.items()},
        "seconds": round(time.perf_counter() - started, 1),
        "versions": f"torch {torch.__version__}, tokenizers {tokenizers.__version__}, "
        f"babel {babel.__version__}",
        "device": "cpu, one thread",
    }


def in_scripts(vectors: Tensor, pieces: Pieces, scripts: Sequence[str]) -> dict[str, float]:
    """Active dimensions of vectors ``[texts, V]``, and the shares of them by script."""
    from sparse_losses import Diagnostics, language_token_ids

    def outside(*chosen: str, common: bool) -> tuple[float, float, float]:
        allowed = language_token_ids(pieces.tokenizer, chosen, allow_common=common)
        diagnostics = Diagnostics(
            pieces.vocab_size,
            special_token_ids=pieces.special_ids if common else (),
            allowed_token_ids=allowed,
        )
        diagnostics.update(vectors)
        report = diagnostics.report()
        return report["foreign_share"], report["active_dimensions"], report["dead_rows"]

    foreign, active, silent = outside(*scripts, common=True)
    return {
        "active": active,
        "foreign": foreign,
        "hangul": 1 - outside("Hangul", common=False)[0],
        "latin": 1 - outside("Latin", common=False)[0],
        "silent": silent,
    }


# Table and picture -------------------------------------------------------------------------------


def _run_of(row: dict[str, Any]) -> tuple[str, int]:
    return str(row["variant"]), int(row["seed"])


def _finished(path: Path, steps: int) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    if any(row.get("steps") != str(steps) or row.get("variant") not in VARIANTS for row in rows):
        raise UserError(
            f"{path} was made with other settings; choose another --output or delete it"
        )
    return [row | {name: float(row[name]) for name in FIGURES} for row in rows]


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for own in _by_variant(rows).values() for row in own)
    os.replace(partial, path)


def _by_variant(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = {name: [row for row in rows if row["variant"] == name] for name in VARIANTS}
    return {
        name: sorted(own, key=lambda row: int(row["seed"])) for name, own in found.items() if own
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Mean ± standard deviation over the seeds."""
    lines = [
        "| training | query: active | other scripts | Hangul | Latin | document: active "
        "| other scripts | Recall@10 | MRR@10 |",
        "|---" + "|---:" * 8 + "|",
    ]
    columns = {
        "query_active": "{:,.0f}",
        "query_foreign": "{:.1%}",
        "query_hangul": "{:.1%}",
        "query_latin": "{:.1%}",
        "document_active": "{:,.0f}",
        "document_foreign": "{:.1%}",
        "recall_10": "{:.3f}",
        "mrr_10": "{:.3f}",
    }
    for variant, own in _by_variant(rows).items():
        cells = [_spread([row[name] for row in own], form) for name, form in columns.items()]
        lines.append("| " + " | ".join([variant, *cells]) + " |")
    return "\n".join([*lines, ""])


def _spread(values: Sequence[float], form: str) -> str:
    mean = form.format(statistics.mean(values))
    return f"{mean} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else mean


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The queries' share of other scripts and their recall, against their active dimensions."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "sparse-losses", "svg.fonttype": "none"}
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharex=True, layout="constrained")
    panels = (("query_foreign", "share of other scripts"), ("recall_10", "Recall@10"))
    for axis, (name, label) in zip(axes, panels, strict=True):
        for number, (variant, own) in enumerate(_by_variant(rows).items()):
            axis.scatter(
                [row["query_active"] for row in own],
                [row[name] for row in own],
                marker="X" if variant == "no penalty" else "s^D"[number % 3],
                facecolor="none" if variant.startswith("FLOPS") else f"C{number % 10}",
                edgecolor="black" if variant == "no penalty" else f"C{number % 10}",
                label=variant,
                zorder=3,
            )
        axis.set_xscale("log")
        active = [row["query_active"] for row in rows]
        axis.set_xlim(0.7 * min(active), 1.4 * max(active))
        marks = [mark for mark in TICKS if 0.7 * min(active) <= mark <= 1.4 * max(active)]
        axis.set_xticks(marks, [f"{mark:,}" for mark in marks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_ylim(-0.03, 1)
        axis.set_xlabel("active dimensions of held-out queries")
        axis.set_ylabel(label)
        axis.grid(visible=True, axis="y", alpha=0.25)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
