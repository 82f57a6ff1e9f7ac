"""The effect of a language penalty on a retriever trained on names in twelve languages."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import babel
import tokenizers
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console
from torch import Tensor

from benchmarks.studies import locale_names
from benchmarks.studies.locale_names import Names
from benchmarks.studies.runs import (
    Result,
    by_variant,
    markdown,
    run_all,
    spread,
    study_parser,
    write_csv,
)
from sparse_losses import (
    Curriculum,
    Diagnostics,
    DocumentFrequency,
    InfoNCELoss,
    LanguagePenaltyLoss,
    Phase,
    SpladeBatch,
    SpladeObjective,
    Texts,
    TrainingSchedule,
    Warmup,
    language_penalty,
    language_token_ids,
)
from sparse_losses._core.files import replaced_file
from sparse_losses.demo.evaluation import cosine, ranking
from sparse_losses.demo.model import ModelSize, SparseEncoder
from sparse_losses.demo.options import guarded
from sparse_losses.demo.tokens import Tokens, pad

STEPS = 300
PENALTY = 100.0
VARIANTS: dict[str, dict[str, Any]] = {
    "no penalty": {},
    "penalty 0.0005": {"language": 5e-4},
    "penalty 0.005": {"language": 5e-3},
    "penalty 0.5": {"language": 0.5},
    "FLOPS x 3": {"flops": 9e-3},
    "FLOPS x 10": {"flops": 3e-2},
}
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings that determine the figures of a run on one thread, except the tokenizer.

    Attributes:
        language: weight of the language penalty for queries and for documents. It is 0 for 40% of
            the training, then grows fourfold every 10%.
        flops: weight of FLOPS on each side; it grows for 30% of the training.
    """

    steps: int = STEPS
    seed: int = 0
    language: float = 0.0
    flops: float = 3e-3
    positive_activation: float = 1.0
    temperature: float = 0.05
    batch_size: int = 32
    learning_rate: float = 1e-3
    vocab_size: int = locale_names.VOCAB_SIZE
    hidden: int = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then write table and plot; return an exit code as the demo does."""
    parser = study_parser(
        "languages",
        "Train a small retriever to find the names of places, languages, scripts and currencies "
        "in English and ten other languages by their Korean name, with and without a language "
        "penalty, and report the scripts of its active dimensions. The names are from Babel; "
        "nothing is downloaded. A training takes about a minute and a half on one core.",
        list(VARIANTS),
        steps=STEPS,
        only=("no penalty", "penalty 0.005"),
    )
    return guarded(_run, parser, arguments)


def settings_of(variant: str, seed: int, steps: int) -> Settings:
    """Return the settings of a variant."""
    return Settings(steps, seed, **VARIANTS[variant])


def _run(options: argparse.Namespace) -> None:
    results = run_all(options, list(VARIANTS), settings_of, run_one, locale_names.load)
    rows = [
        {
            **{name: result[name] for name in ("variant", "seed")},
            "steps": options.steps,
            **result["figures"],
            "seconds": result["seconds"],
            "versions": ", ".join(f"{name} {one}" for name, one in result["sources"].items()),
            "device": "cpu, one thread",
        }
        for result in results
    ]
    write_csv(options.output / "languages.csv", rows)
    with replaced_file(options.output / "languages.md", text=True) as page:
        page.write(table(rows))
    draw(options.output / "languages.svg", rows)
    Console().print(table(rows), markup=False, highlight=False, soft_wrap=True)


# One training ------------------------------------------------------------------------------------


def make_objective(tokens: Tokens, settings: Settings) -> SpladeObjective:
    """Return the objective: InfoNCE, FLOPS, positive activation and the language penalty."""
    penalty = language_penalty(
        tokens.vocab_size,
        language_token_ids(tokens.tokenizer),
        special_token_ids=tokens.special_ids,
        penalty=PENALTY,
    )
    weights = {"info_nce": 1.0}
    for side in ("query", "document"):
        weights[f"{side}_flops"] = settings.flops
        weights[f"{side}_positive_activation"] = settings.positive_activation
        weights[f"{side}_language_penalty"] = settings.language
    return SpladeObjective(
        weights,
        info_nce=InfoNCELoss(temperature=settings.temperature, symmetric=True),
        language_penalty=LanguagePenaltyLoss(penalty),
        special_token_ids=tokens.special_ids,
    )


def make_schedule(objective: SpladeObjective, settings: Settings) -> TrainingSchedule:
    """Return the schedule: FLOPS grows from the start, the language penalty starts later."""
    rise = max(1, round(0.3 * settings.steps))
    warmups = {n: Warmup(rise, "quadratic") for n in objective.weights if n.endswith("flops")}
    shares = {(1, 4): 0.0, (5, 5): 1 / 64, (6, 6): 1 / 16, (7, 7): 1 / 4, (8, 10): 1.0}
    language = [name for name in objective.weights if name.endswith("language_penalty")]
    tenths = Curriculum(
        [
            Phase(*span, weights=dict.fromkeys(language, share * settings.language))
            for span, share in shares.items()
        ]
    )
    tenth = max(1, settings.steps // 10)
    return TrainingSchedule(objective, tenths, warmups=warmups, steps_per_epoch=tenth)


def run_one(settings: Settings, names: Names) -> Result:
    """Train, then search the documents of all names for the held-out ones."""
    started = time.perf_counter()
    words = [text for item in names.train for text in (item.query, item.document)]
    tokens = locale_names.learn_tokens(words, settings.vocab_size)
    queries = tokens.ids([item.query for item in names.train])
    documents = tokens.ids([item.document for item in names.train])
    counts = DocumentFrequency(tokens.vocab_size)
    texts = pad(documents)
    counts.update(texts.input_ids, texts.attention_mask)
    torch.manual_seed(settings.seed)
    size = ModelSize(settings.hidden, layers=1)
    model = SparseEncoder(tokens.vocabulary(), counts.idf(), size)
    objective = make_objective(tokens, settings)
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

    def encode(texts: Sequence[str]) -> Tensor:
        rows = tokens.ids(texts)
        with torch.no_grad():
            return torch.cat([model(pad(rows[i : i + 64])) for i in range(0, len(rows), 64)])

    asked = encode([item.query for item in names.held_out])
    held_out = encode([item.document for item in names.held_out])
    trained = encode([item.document for item in names.train])
    ranks = ranking(cosine(asked, torch.cat([held_out, trained])))
    figures = {"recall_10": ranks.recall_10, "mrr_10": ranks.mrr_10}
    for side, vectors in (("query", asked), ("document", held_out)):
        for name, value in in_scripts(vectors, tokens).items():
            figures[f"{side}_{name}"] = value
    return {
        "sources": {
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
            "babel": babel.__version__,
        },
        "seconds": round(time.perf_counter() - started, 1),
        "figures": {name: round(value, 5) for name, value in figures.items()},
    }


def in_scripts(vectors: Tensor, tokens: Tokens) -> dict[str, float]:
    """Return the active dimensions of vectors ``[texts, V]``, and their shares by script."""

    def outside(*scripts: str, common: bool) -> tuple[float, float, float]:
        allowed = language_token_ids(tokens.tokenizer, scripts, allow_common=common)
        diagnostics = Diagnostics(
            tokens.vocab_size,
            special_token_ids=tokens.special_ids if common else (),
            allowed_token_ids=allowed,
        )
        diagnostics.update(vectors)
        report = diagnostics.report()
        return report["foreign_share"], report["active_dimensions"], report["dead_rows"]

    foreign, active, silent = outside("Hangul", "Latin", common=True)
    return {
        "active": active,
        "foreign": foreign,
        "hangul": 1 - outside("Hangul", common=False)[0],
        "latin": 1 - outside("Latin", common=False)[0],
        "silent": silent,
    }


# Table and plot ----------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of mean ± standard deviation over the seeds."""
    columns = {
        "query_active": ("query: active", "{:,.0f}"),
        "query_foreign": ("other scripts", "{:.1%}"),
        "query_hangul": ("Hangul", "{:.1%}"),
        "query_latin": ("Latin", "{:.1%}"),
        "document_active": ("document: active", "{:,.0f}"),
        "document_foreign": ("other scripts", "{:.1%}"),
        "recall_10": ("Recall@10", "{:.3f}"),
        "mrr_10": ("MRR@10", "{:.3f}"),
    }
    cells = [
        [variant, *(spread([row[n] for row in own], form) for n, (_, form) in columns.items())]
        for variant, own in by_variant(rows).items()
    ]
    return markdown(["training", *(heading for heading, _ in columns.values())], cells)


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Plot the queries' share of other scripts, and recall, against active dimensions."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = {"query_foreign": "share of other scripts", "recall_10": "Recall@10"}
    axes = figure.subplots(1, 2, sharex=True)
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        for number, (variant, own) in enumerate(by_variant(rows).items()):
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
    legend = axes[0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=4, fontsize=8)
    with rc_context({"svg.hashsalt": "sparse-losses", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
