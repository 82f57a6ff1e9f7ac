"""The losses of V26 and a regulariser of the documents, in one objective or one by one."""

import functools
from collections.abc import Callable

import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks.losses import (
    distillation,
    idf_flops,
    info_nce,
    min_activation,
    positive_activation,
    self_reconstruction,
)
from benchmarks.schema import BERT, XLM, Benchmark, Inputs, Maker, Sizes, Variant
from sparse_losses.objective import terms

WEIGHTS = {
    "info_nce": 3.0,
    "distillation": 2.0,
    "query_self_reconstruction": 0.5,
    "query_positive_activation": 2.0,
    "query_min_activation": 1.0,
    "query_flops": 0.01,
    "document_flops": 0.01,
}


def plain(
    query: Tensor, document: Tensor, token_penalty: Tensor, teacher_scores: Tensor, **texts: Tensor
) -> Tensor:
    """Plain formulas, one after the other."""
    unit = nnf.normalize(query, dim=-1), nnf.normalize(document, dim=-1)
    own, others = ((texts[f"{x}_ids"], texts[f"{x}_mask"]) for x in ("query", "document"))
    return (
        3.0 * info_nce.plain(query, document)
        + 2.0 * distillation.plain(unit[0] @ unit[1].T, teacher_scores)
        + 0.5 * self_reconstruction.plain(query, *own)
        + 2.0 * positive_activation.plain(query, *others)
        + min_activation.plain(query)
        + 0.01 * (idf_flops.plain(query, token_penalty) + idf_flops.plain(document, token_penalty))
    )


def _one_by_one(
    query: Tensor, document: Tensor, token_penalty: Tensor, teacher_scores: Tensor, **texts: Tensor
) -> Tensor:
    """The package's losses without the objective, which would share their product."""
    ours = sparse_losses
    unit = nnf.normalize(query, dim=-1), nnf.normalize(document, dim=-1)
    own, others = ((texts[f"{x}_ids"], texts[f"{x}_mask"]) for x in ("query", "document"))
    penalised = functools.partial(ours.idf_flops_loss, token_penalty=token_penalty)
    return (
        3.0 * ours.info_nce_loss(query, document)
        + 2.0 * ours.distillation_loss(unit[0] @ unit[1].T, teacher_scores)
        + 0.5 * ours.self_reconstruction_loss(query, *own)
        + 2.0 * ours.positive_activation_loss(query, *others)
        + ours.min_activation_loss(query)
        + 0.01 * (penalised(query) + penalised(document))
    )


def _objective(made: Inputs) -> Callable[..., Tensor]:
    """The same losses in one objective, which is built once."""
    flops = sparse_losses.IdfFlopsLoss(made["token_penalty"], beta=0.3)
    built = {
        "info_nce": terms.info_nce(),
        "distillation": terms.distillation(),
        "query_self_reconstruction": terms.self_reconstruction("query"),
        "query_positive_activation": terms.positive_activation("query"),
        "query_min_activation": terms.min_activation("query"),
        "query_flops": terms.flops("query", flops),
        "document_flops": terms.flops("document", flops),
    }
    weighted = {name: (weight, built[name]) for name, weight in WEIGHTS.items()}
    objective = sparse_losses.SpladeObjective(weighted)

    def total(query: Tensor, document: Tensor, teacher_scores: Tensor, **more: Tensor) -> Tensor:
        queries = sparse_losses.Texts(query, more["query_ids"], more["query_mask"])
        documents = sparse_losses.Texts(document, more["document_ids"], more["document_mask"])
        batch = sparse_losses.SpladeBatch(queries, documents, teacher_scores=teacher_scores)
        return objective(batch).total

    return total


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw pairs of sparse vectors with their texts, and a teacher's scores."""
    made = dict(zip(("query", "document"), make.pairs(sizes), strict=True))
    for side in ("query", "document"):
        made[f"{side}_ids"], made[f"{side}_mask"] = make.texts(sizes)
    penalty, scores = make.uniform(sizes["V"]), make.normal(sizes["B"], sizes["B"])
    return {**made, "token_penalty": penalty, "teacher_scores": scores}


def _size(rows: int, vocabulary: int, density: float, length: int = 64, **more: str) -> Sizes:
    return {"B": rows, "V": vocabulary, "S": length, "density": density, **more}


BENCHMARK = Benchmark(
    "objective",
    inputs,
    ("query", "document"),
    plain,
    (
        Variant("ours", _objective, builds=True),
        Variant("ours, compiled", _objective, builds=True, compiled=True, needs_plain_memory=True),
        Variant("ours, one by one", _one_by_one),
    ),
    tiny=[_size(4, 60, 0.4, length=12)],
    quick=[_size(32, BERT, 0.02)],
    full=[*[_size(rows, BERT, 0.02) for rows in (64, 128)], _size(64, XLM, 0.005)],
    gpu=[_size(128, BERT, 0.02, length=256, dtype="fp32")],
    plain_bytes=lambda sizes: 4.0 * 16 * sizes["B"] * sizes["V"],
    # |mean| has no gradient at a token that no text activates.
    kink_at_zero=True,
)
