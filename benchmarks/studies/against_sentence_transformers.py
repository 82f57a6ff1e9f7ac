"""Our objective and the losses of sentence-transformers: same model, batches, steps, optimiser.

Theirs are the classes `SpladeLoss` around `SparseMultipleNegativesRankingLoss` and their callback,
with five weights of the regulariser, for both similarities. Ours are the recommended preset and the
one for cosines, each with three targets; without a teacher, one run also has a target for the
queries. All others are also trained with BM25 as a teacher, theirs by `SparseDistillKLDivLoss`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.run.table import write
from benchmarks.studies.runs import (
    Result,
    markdown,
    publish,
    run_all,
    sources_of,
    spread,
    study_parser,
)
from examples.demo.corpus import Corpus, Row, pair_texts
from examples.demo.evaluation import bm25_scores, ranks, similarities
from examples.demo.training import Run, Settings
from sparse_losses import COSINE, RECOMMENDED, Preset, SpladeBatch

OURS, THEIRS = "sparse-losses", "sentence-transformers"
TARGETS = (32, 64, 128)
# Chosen so that documents have about twenty to two hundred active dimensions.
WEIGHTS = {"cosine": (0.003, 0.01, 0.03, 0.1, 0.3), "dot": (0.03, 0.1, 0.3, 1.0, 3.0)}
QUICK = {"cosine": (0.01, 0.03, 0.1), "dot": (0.1, 0.3, 1.0)}
SCALES = {"cosine": 20.0, "dot": 1.0}  # as in their documentation
PRESETS = {"dot": RECOMMENDED, "cosine": COSINE}
TWO_TARGETS = {"document_flops": 64, "query_flops": 24}
TWO_SIDED = "ours, target 64, queries 24"
TEACHER = ", BM25 as teacher"
TEACHER_SCALE = 0.5  # BM25 scores are too steep for a softmax
BASELINES = ("BM25, words", "BM25, same subwords")
FIGURES = ("ndcg_10", "mrr_10", "recall_100", "active_query", "active_document", "products")


@dataclasses.dataclass(frozen=True)
class Arm(Settings):
    """The settings of one training; those of the demo are the same for all but the preset.

    Attributes:
        system: whose losses are used.
        similarity: used in training and ranking.
        number: the target of ours, or the weight of both regularisers of theirs.
        teacher: whether BM25 is distilled.
    """

    system: str = OURS
    similarity: str = "dot"
    number: float = 0.0
    teacher: bool = False


def with_target(preset: Preset, target: int) -> Preset:
    """Return the preset with this target for the documents."""
    return preset.replace(target_active={**preset.target_active, "document_flops": target})


def _variants(weights: dict[str, tuple[float, ...]]) -> dict[str, dict[str, Any]]:
    """Return the fields of `Arm` by the name of the variant."""
    variants: dict[str, dict[str, Any]] = {}

    def add(name: str, system: str, similarity: str, number: float, teacher: bool) -> None:
        own = {"system": system, "similarity": similarity, "number": number, "teacher": teacher}
        variants[name + TEACHER * teacher] = own

    for teacher in (False, True):
        for target in TARGETS:
            add(f"ours, target {target}", OURS, "dot", target, teacher)
            add(f"ours, cosine, target {target}", OURS, "cosine", target, teacher)
        if not teacher:
            add(TWO_SIDED, OURS, "dot", TWO_TARGETS["document_flops"], teacher)
        for similarity, values in weights.items():
            for weight in values:
                name = f"theirs, {similarity}, weight {weight:g}"
                add(name, THEIRS, similarity, weight, teacher)
    return variants


VARIANTS = _variants(WEIGHTS)


class TheirRun(Run):
    """The same training with the losses and the callback of sentence-transformers."""

    def __init__(self, corpus: Corpus, arm: Arm) -> None:
        super().__init__(corpus, arm)
        from sentence_transformers.sparse_encoder import losses
        from sentence_transformers.sparse_encoder.callbacks.splade_callbacks import (
            SpladeRegularizerWeightSchedulerCallback,
        )
        from sentence_transformers.util import cos_sim, dot_score
        from transformers import TrainerState

        vectors = nn.Identity()  # batches already contain vectors
        main = losses.SparseMultipleNegativesRankingLoss(
            vectors,
            scale=SCALES[arm.similarity],
            similarity_fct=cos_sim if arm.similarity == "cosine" else dot_score,
        )
        self.splade = losses.SpladeLoss(
            vectors,
            WithTeacher(main, arm.similarity) if arm.teacher else main,
            document_regularizer_weight=arm.number,
            query_regularizer_weight=arm.number,
        )
        self.callback = SpladeRegularizerWeightSchedulerCallback(self.splade)
        self.state = TrainerState(max_steps=arm.steps)
        self.callback.on_train_begin(None, self.state, None)
        self.distils = arm.teacher

    def loss(self, batch: SpladeBatch) -> tuple[Tensor, dict[str, float]]:
        """Return the sum of the terms of their loss, as their trainer does."""
        self.state.global_step = self.step
        self.callback.on_step_begin(None, self.state, None)
        features = [{"sentence_embedding": x.activations} for x in (batch.anchor, batch.positive)]
        terms = self.splade(features, batch.teacher_scores)
        return torch.stack(list(terms.values())).sum(), {n: x.item() for n, x in terms.items()}


class WithTeacher(nn.Module):
    """Their contrastive loss plus their distillation over all documents of the batch.

    Their class takes one column of documents per candidate, the query's own first: column k is the
    documents shifted by k. It multiplies by the squared temperature; this is undone, so that the
    value equals our `distillation_loss` with temperature 1 and alpha_kl 1.
    """

    def __init__(self, main: nn.Module, similarity: str) -> None:
        super().__init__()
        from sentence_transformers.sparse_encoder import losses
        from sentence_transformers.util import pairwise_cos_sim, pairwise_dot_score

        self.main = main
        self.distillation = losses.SparseDistillKLDivLoss(
            main.model,
            similarity_fct=pairwise_cos_sim if similarity == "cosine" else pairwise_dot_score,
            student_temperature=1 / SCALES[similarity],
            teacher_temperature=1 / TEACHER_SCALE,
        )

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor
    ) -> dict[str, Tensor]:
        """Return both values; `labels [B, B]` are the teacher's scores."""
        query, document = embeddings
        size = len(query)
        columns = [document.roll(-shift, 0) for shift in range(size)]
        own_first = (torch.arange(size)[:, None] + torch.arange(size)) % size
        distilled = self.distillation.compute_loss_from_embeddings(
            [query, *columns], labels.gather(1, own_first)
        )
        return {
            "base_loss": self.main.compute_loss_from_embeddings(embeddings, None),
            "distillation_loss": distilled / self.distillation.student_temperature**2,
        }


def settings_of(variant: str, seed: int, steps: int) -> Arm:
    """Return the settings of one of `VARIANTS`."""
    own = VARIANTS[variant]
    preset = PRESETS[own["similarity"]].replace(target_active={})
    if own["system"] == OURS:
        targets = TWO_TARGETS if variant == TWO_SIDED else {"document_flops": own["number"]}
        preset = preset.replace(target_active=targets)
        preset = preset if own["teacher"] else preset.without("distillation")
    return Arm(steps, seed, preset, probe_every=steps, **own)


def start(arm: Arm, corpus: Corpus) -> Run:
    """Return the run of an arm, before its first step."""
    return Run(corpus, arm) if arm.system == OURS else TheirRun(corpus, arm)


def run_one(arm: Arm, corpus: Corpus) -> Result:
    """Train once and rank all held-out documents for the test queries."""
    run = start(arm, corpus)
    run.train()
    return {
        "sources": corpus.sources,
        "seconds": round(run.seconds, 1),
        "controllers": {side: one.report() for side, one in run.controllers.items()},
        "test": evaluate(run, corpus, corpus.test),
        "baselines": {name: baseline(run, corpus, name) for name in BASELINES},
    }


def evaluate(run: Run, corpus: Corpus, rows: Sequence[Row]) -> dict[str, float]:
    """Return the figures of the queries of `rows` over all held-out documents; means of tasks."""
    figures = []
    for task in range(len(corpus.tasks)):
        query, document = map(run.encode, _texts(corpus, rows, task))
        scores = similarities(query, document, run.settings.preset.similarity)
        on_query, on_document = ((x > 0).double() for x in (query, document))
        figures.append(
            _ranked(scores)
            | {
                "active_query": on_query.sum(1).mean().item(),
                "active_document": on_document.sum(1).mean().item(),
                "products": (on_query.mean(0) @ on_document.mean(0)).item(),
            }
        )
    return _means(figures)


def baseline(run: Run, corpus: Corpus, name: str) -> dict[str, float]:
    """Return the figures of BM25 on words or on the model's subwords."""
    split = run.tokens.words if name == BASELINES[0] else run.tokens.pieces
    figures = []
    for task in range(len(corpus.tasks)):
        queries, documents = _texts(corpus, corpus.test, task)
        figures.append(_ranked(bm25_scores(split(queries), split(documents))))
    return _means(figures)


def _texts(corpus: Corpus, rows: Sequence[Row], task: int) -> tuple[list[str], list[str]]:
    """Return the queries of `rows`, and their documents followed by the other held-out ones."""
    queries, documents = pair_texts(rows, task)
    others = corpus.validation if rows is corpus.test else corpus.test
    return queries, documents + pair_texts(others, task)[1]


def _ranked(scores: Tensor) -> dict[str, float]:
    """Return the figures of scores `[Q, D]`; only document i is relevant for query i."""
    rank = ranks(scores)
    return {
        "ndcg_10": torch.where(rank <= 10, 1 / torch.log2(1 + rank), 0.0).mean().item(),
        "mrr_10": torch.where(rank <= 10, 1 / rank, 0.0).mean().item(),
        "recall_100": (rank <= 100).double().mean().item(),
    }


def _means(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.mean(one[key] for one in figures) for key in figures[0]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then write the tables."""
    parser = study_parser(
        "against_sentence_transformers",
        "Train the demo's model with our presets and with the losses of "
        "sentence-transformers, and write the ranking quality and cost of each. In total 198 "
        "trainings, four to five hours on one core; with --quick 50, about an hour on one core.",
        list(VARIANTS),
        steps=[250],
    )
    parser.add_argument("--quick", action="store_true", help="one seed, three weights")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("sentence_transformers") is None:
        raise SystemExit("error: this study needs sentence-transformers: make bench-peers")
    if options.quick:
        options.seeds = options.seeds[:1]
        options.only = [name for name in options.only if name in _variants(QUICK)]
    rows = []
    for corpus, results in run_all(options, list(VARIANTS), settings_of, run_one):
        rows += [_row(corpus, name, None, one) for name, one in results[0]["baselines"].items()]
        rows += [_row(corpus, one["variant"], one, one["test"]) for one in results]
    write(options.output / "against_sentence_transformers.csv", rows)
    publish(options.output / "against_sentence_transformers.md", summary(rows))


def _row(
    corpus: str, variant: str, result: Result | None, figures: dict[str, float]
) -> dict[str, Any]:
    settings = result["settings"] if result else {}
    return {
        "corpus": corpus,
        "sources": sources_of(result) if result else "",
        "variant": variant,
        "system": settings.get("system", "BM25"),
        "similarity": settings.get("similarity", ""),
        "teacher": settings.get("teacher", ""),
        "number": settings.get("number", ""),
        "seed": result["seed"] if result else "",
        **{name: round(figures[name], 4) if name in figures else "" for name in FIGURES},
        "seconds": result["seconds"] if result else "",
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table per corpus, a line per variant: means over seeds, with nDCG's deviation."""
    forms = {"active_query": "{:.0f}", "active_document": "{:.0f}", "products": "{:.2f}"}
    headings = ("seeds", "nDCG@10", "active, query", "active, document", "products")
    tables = []
    for corpus, corpus_rows in itertools.groupby(rows, lambda row: row["corpus"]):
        cells = []
        for variant, group in itertools.groupby(corpus_rows, lambda row: row["variant"]):
            own = list(group)
            name = variant.replace("ours", OURS).replace("theirs", "SpladeLoss")
            name = name.replace("BM25 as teacher", "teacher")
            ranked = spread([float(row["ndcg_10"]) for row in own], "{:.3f}")
            if own[0]["seed"] == "":  # BM25
                cells.append([name, "", ranked, *("" for _ in forms)])
                continue
            means = {name: statistics.mean(float(row[name]) for row in own) for name in forms}
            shown = [form.format(means[name]) for name, form in forms.items()]
            cells.append([name, str(len(own)), ranked, *shown])
        tables.append(markdown((corpus.capitalize(), *headings), cells))
    return "\n".join(tables)


if __name__ == "__main__":
    main()
