"""Ablation of our presets: one part changed at a time, on validation queries.

A change is adopted if it raises nDCG@10 at its active dimensions on both corpora by more than the
spread over seeds. The test queries are reserved for the comparison with other packages.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.studies.against_sentence_transformers import (
    FIGURES,
    OURS,
    Arm,
    evaluate,
)
from benchmarks.studies.runs import Result, markdown, run_each_corpus, study_parser, write_csv
from sparse_losses import COSINE, RECOMMENDED, Preset
from sparse_losses._core.files import replaced_file
from sparse_losses.demo.corpus import Corpus
from sparse_losses.demo.objective import loss_of
from sparse_losses.demo.options import guarded
from sparse_losses.demo.training import Run

TARGETS = (32, 64)
TOKEN_LOSSES = ("self_reconstruction", "positive_activation", "min_activation")
TOKEN_TERMS = [term for term in COSINE.weights if loss_of(term) in TOKEN_LOSSES]
KL = RECOMMENDED.replace(
    weights={"distillation": 1.0}, alpha_kl=1.0, alpha_mse=0.0, teacher_scale=COSINE.teacher_scale
)
DOT = COSINE.replace(
    weights={"query_flops": 0.3, "document_flops": 0.3},
    similarity="dot",
    temperature=1.0,
    score_scale=1.0,
)
CHANGES: dict[str, Preset] = {
    "as recommended": RECOMMENDED,
    "without the teacher": RECOMMENDED.without("distillation"),
    "teacher 1": RECOMMENDED.replace(weights={"distillation": 1.0}),
    "with the token terms": RECOMMENDED.replace(
        weights={term: COSINE.weights[term] for term in TOKEN_TERMS},
        top_k=COSINE.top_k,
        threshold=COSINE.threshold,
        balanced=COSINE.balanced,
    ),
    "query FLOPS 0.3": RECOMMENDED.replace(weights={"query_flops": 0.3}),
    "the teacher's KL": KL,
    "the teacher's KL, InfoNCE in both directions": KL.replace(symmetric=True),
    "cosine": COSINE,
    "cosine, without the teacher": COSINE.without("distillation"),
    "cosine, teacher 3": COSINE.replace(weights={"distillation": 3.0}),
    "cosine, the teacher's z-scores": COSINE.replace(alpha_kl=0.0, alpha_mse=1.0),
    "cosine, InfoNCE 3": COSINE.replace(weights={"info_nce": 3.0}),
    "cosine, without the token terms": COSINE.without(*TOKEN_TERMS),
    "cosine, query FLOPS 0.3": COSINE.replace(weights={"query_flops": 0.3}),
    "dot product in place of cosine": DOT,
    "dot product in place of cosine, without the token terms": DOT.without(*TOKEN_TERMS),
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
        "Train the demo's model with one part of our presets changed at a time and write how "
        "each ranks the validation queries. In total 192 trainings, four to five hours on a core.",
        list(VARIANTS),
        steps=250,
        corpora=True,
    )
    return guarded(_run, parser, arguments)


def _run(options: argparse.Namespace) -> None:
    rows = []
    for corpus, results in run_each_corpus(options, list(VARIANTS), settings_of, run_one):
        for result in results:
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
    with replaced_file(options.output / "recipe.md", text=True) as page:
        page.write(table)
    Console().print(table, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
