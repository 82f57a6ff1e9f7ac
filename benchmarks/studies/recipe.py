"""Ablation of our presets: one part changed at a time, on validation queries.

A change is adopted if it raises nDCG@10 at its active dimensions on both corpora by more than the
spread over seeds. The test queries are reserved for the comparison with other packages.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from torch import Tensor

from benchmarks.run.table import write
from benchmarks.studies.against_sentence_transformers import (
    FIGURES,
    TWO_TARGETS,
    evaluate,
    with_target,
)
from benchmarks.studies.runs import Result, markdown, publish, run_all, sources_of, study_parser
from examples.demo.corpus import Corpus
from examples.demo.model import ModelSize
from examples.demo.training import Run, Settings
from sparse_losses import COSINE, RECOMMENDED, PositiveActivationLoss, Preset, SpladeBatch

TARGETS = (32, 64)
TOKEN_LOSSES = ("self_reconstruction", "positive_activation", "min_activation")
TOKEN_TERMS = [term for term in COSINE.weights if term.partition("_")[2] in TOKEN_LOSSES]
KL = RECOMMENDED.replace(
    weights={"distillation": 1.0}, alpha_kl=1.0, alpha_mse=0.0, teacher_scale=COSINE.teacher_scale
)
DOT = COSINE.replace(
    weights={"query_flops": 0.3, "document_flops": 0.3},
    similarity="dot",
    temperature=1.0,
    score_scale=1.0,
)
TAUGHT_BY_LABELS = RECOMMENDED.without("distillation")
GENTLE = RECOMMENDED.replace(weights={"document_flops": 0.01}, warmup={"query_flops": 1 / 3})
CHANGES: dict[str, Preset] = {
    "as recommended": RECOMMENDED,
    "without the teacher": TAUGHT_BY_LABELS,
    "without the teacher, query target 24": TAUGHT_BY_LABELS.replace(target_active=TWO_TARGETS),
    "without the teacher, query FLOPS 0.3": TAUGHT_BY_LABELS.replace(weights={"query_flops": 0.3}),
    "without the teacher, a gentler start": GENTLE.without("distillation"),
    "teacher 1": RECOMMENDED.replace(weights={"distillation": 1.0}),
    "teacher 6": RECOMMENDED.replace(weights={"distillation": 6.0}),
    "with the token terms": RECOMMENDED.replace(
        weights={term: COSINE.weights[term] for term in TOKEN_TERMS},
        top_k=COSINE.top_k,
        threshold=COSINE.threshold,
        balanced=COSINE.balanced,
    ),
    "query FLOPS 0.3": RECOMMENDED.replace(weights={"query_flops": 0.3}),
    "query target 24": RECOMMENDED.replace(target_active=TWO_TARGETS),
    "FLOPS between the sides": RECOMMENDED.without("query_flops"),
    "positives weighted by IDF": RECOMMENDED.replace(
        weights={"query_positive_activation": 1.0, "document_positive_activation": 1.0}
    ),
    "a sparse start": RECOMMENDED,
    "a gentler start": GENTLE,
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
VARIANTS = {f"{name}, target {target}": (name, target) for name in CHANGES for target in TARGETS}


@dataclasses.dataclass(frozen=True)
class Trial(Settings):
    """The settings of one training, with the name of the change."""

    change: str = "as recommended"


class BetweenSides(Run):
    """Adds the products of a score, `sum_j mean_q(j) mean_d(j)`, in place of the queries' FLOPS."""

    WEIGHT = 0.2

    def loss(self, batch: SpladeBatch) -> tuple[Tensor, dict[str, float]]:
        """Return the value to minimise, and the weighted terms of the objective."""
        total, terms = super().loss(batch)
        query, document = (texts.activations.mean(0) for texts in (batch.anchor, batch.positive))
        share = min(1.0, 2 * self.step / self.settings.steps) ** 2  # as the queries' FLOPS rises
        return total + self.WEIGHT * share * (query * document).sum(), terms


class RarePositives(Run):
    """Weighs positive activation by IDF, in its bounded form."""

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        super().__init__(corpus, settings)
        self.objective.positive_activation = PositiveActivationLoss(
            self.df.idf().float(), saturating=True, ignore_token_ids=self.tokens.special_ids
        )


RUNS = {"FLOPS between the sides": BetweenSides, "positives weighted by IDF": RarePositives}


def settings_of(variant: str, seed: int, steps: int) -> Trial:
    """Return the settings of one of `VARIANTS`."""
    change, target = VARIANTS[variant]
    size = ModelSize(bias=-2.0) if change == "a sparse start" else ModelSize()
    preset = with_target(CHANGES[change], target)
    return Trial(steps, seed, preset, size=size, probe_every=steps, change=change)


def run_one(trial: Trial, corpus: Corpus) -> Result:
    """Train once and rank all held-out documents for the validation queries."""
    run = RUNS.get(trial.change, Run)(corpus, trial)
    run.train()
    return {
        "sources": corpus.sources,
        "seconds": round(run.seconds, 1),
        "controllers": {side: one.report() for side, one in run.controllers.items()},
        "validation": evaluate(run, corpus, corpus.validation),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then write the table."""
    options = study_parser(
        "recipe",
        "Train the demo's model with one part of our presets changed at a time and write how "
        f"each ranks the validation queries. In total {6 * len(VARIANTS)} trainings, about eight "
        "hours on a core.",
        list(VARIANTS),
        steps=[250],
    ).parse_args(arguments)
    rows = []
    for corpus, results in run_all(options, list(VARIANTS), settings_of, run_one):
        for result in results:
            change, target = VARIANTS[result["variant"]]
            row = {"corpus": corpus, "sources": sources_of(result), "change": change}
            row |= {"target": target, "seed": result["seed"]}
            rows.append(row | {key: round(x, 4) for key, x in result["validation"].items()})
    write(options.output / "recipe.csv", rows)
    cells = []
    keys = ("corpus", "change", "target")
    for key, group in itertools.groupby(rows, lambda row: [str(row[name]) for name in keys]):
        own_rows = list(group)
        by_seed = " ".join(f"{row['ndcg_10']:.3f}" for row in own_rows)
        means = [statistics.mean(row[name] for row in own_rows) for name in FIGURES[3:]]
        cells.append([*key, by_seed, *(f"{mean:.1f}" for mean in means)])
    headings = ("nDCG@10 by seed", "active q", "active d", "products per pair")
    publish(options.output / "recipe.md", markdown((*keys, *headings), cells, left=2))


if __name__ == "__main__":
    main()
