"""Ablation of the recommended preset: one part changed at a time, on validation queries.

A change is adopted if it raises nDCG@10 at its active dimensions on both corpora by more than the
spread over seeds. The test queries are reserved for the comparison with other packages.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.studies.against_sentence_transformers import (
    FIGURES,
    OURS,
    TOKEN_TERMS,
    Arm,
    evaluate,
)
from benchmarks.studies.runs import Result, markdown, run_all, study_parser, write_csv
from benchmarks.studies.targets import LOADERS
from sparse_losses import RECOMMENDED, Preset
from sparse_losses.demo.corpus import Corpus
from sparse_losses.demo.options import guarded
from sparse_losses.demo.training import Run

TARGETS = (32, 64)
DOT = RECOMMENDED.replace(
    weights={"query_flops": 0.3, "document_flops": 0.3},
    similarity="dot",
    temperature=1.0,
    score_scale=1.0,
)
PLAIN = DOT.without(*TOKEN_TERMS).replace(
    weights={"query_flops": 0.1, "document_flops": 0.1}, idf_alpha=None
)
CHANGES: dict[str, Preset] = {
    "as recommended": RECOMMENDED,
    "without the teacher": RECOMMENDED.without("distillation"),
    "teacher 3": RECOMMENDED.replace(weights={"distillation": 3.0}),
    "the teacher's z-scores": RECOMMENDED.replace(alpha_kl=0.0, alpha_mse=1.0),
    "InfoNCE 3": RECOMMENDED.replace(weights={"info_nce": 3.0}),
    "without the token terms": RECOMMENDED.without(*TOKEN_TERMS),
    "query FLOPS 0.3": RECOMMENDED.replace(weights={"query_flops": 0.3}),
    "dot product": DOT,
    "dot product, without the token terms": DOT.without(*TOKEN_TERMS),
    "dot product, plain FLOPS": PLAIN,
    "dot product, plain FLOPS, InfoNCE in one direction": PLAIN.replace(symmetric=False),
}
VARIANTS = {
    f"{name}, target {target}": (preset, target)
    for name, preset in CHANGES.items()
    for target in TARGETS
}


def settings_of(variant: str, seed: int, steps: int) -> Arm:
    """Return the settings of one of `VARIANTS`."""
    preset, target = VARIANTS[variant]
    return Arm(
        OURS, preset.similarity, target, "distillation" in preset.weights, steps, seed, preset
    )


def run_one(arm: Arm, corpus: Corpus) -> Result:
    """Train once and rank all held-out documents for the validation queries."""
    run = Run(corpus, arm.training())
    run.train()
    return {
        "sources": corpus.sources,
        "seconds": round(run.seconds, 1),
        "controllers": {side: one.report() for side, one in run.controllers.items()},
        "validation": evaluate(run, corpus, corpus.validation, arm.similarity),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the table; return an exit code as the demo does."""
    parser = study_parser(
        "recipe",
        "Train the demo with one part of the recommended preset changed at a time and write how "
        "each ranks the validation queries. In total 132 trainings, three hours on one core.",
        list(VARIANTS),
        steps=250,
        corpora=True,
    )
    return guarded(_run, parser, arguments)


def _run(options: argparse.Namespace) -> None:
    rows = []
    for corpus in options.corpora:
        Console().print(corpus, highlight=False)
        own = copy.copy(options)
        own.output = options.output / corpus
        load = functools.cache(LOADERS[corpus].load)
        for result in run_all(own, list(VARIANTS), settings_of, run_one, load=load):
            name, _, target = result["variant"].partition(", target ")
            figures = {key: round(value, 4) for key, value in result["validation"].items()}
            sources = " ".join(f"{key} {value}" for key, value in result["sources"].items())
            row = {"corpus": corpus, "sources": sources, "change": name, "target": int(target)}
            rows.append(row | {"seed": result["seed"], **figures})
    write_csv(options.output / "recipe.csv", rows)
    cells = []
    for key, group in itertools.groupby(
        rows, lambda row: (row["corpus"], row["change"], str(row["target"]))
    ):
        own_rows = list(group)
        by_seed = " ".join(f"{row['ndcg_10']:.3f}" for row in own_rows)
        means = [statistics.mean(row[name] for row in own_rows) for name in FIGURES[3:]]
        cells.append([*key, by_seed, *(f"{mean:.1f}" for mean in means)])
    headings = ("nDCG@10 by seed", "active q", "active d", "products per pair")
    table = markdown(("corpus", "change", "target", *headings), cells, left=2)
    (options.output / "recipe.md").write_text(table, encoding="utf-8")
    Console().print(table, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
