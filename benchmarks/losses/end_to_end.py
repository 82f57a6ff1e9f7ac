"""A training step: the head for both sides, InfoNCE with hard negatives, FLOPS on both sides."""

import torch
from torch import Tensor

import sparse_losses
from benchmarks.losses import flops, info_nce, splade_head, splade_pool
from benchmarks.schema import BERT, Aim, Benchmark, Inputs, Maker, Sizes, ours

__all__ = ["BENCHMARK", "plain"]

FLOPS_WEIGHT = 1e-3


def plain(
    query_hidden: Tensor,
    document_hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    query_mask: Tensor,
    document_mask: Tensor,
) -> Tensor:
    """Plain formulas, one after the other."""
    queries = splade_head.plain(query_hidden, weight, bias, query_mask)
    documents = splade_head.plain(document_hidden, weight, bias, document_mask)
    positive, negative = documents[: len(queries)], documents[len(queries) :]
    contrast = info_nce.plain(queries, positive, negative, temperature=1.0, similarity="dot")
    return contrast + FLOPS_WEIGHT * (flops.plain(queries) + flops.plain(documents))


def _of_the_package(
    query_hidden: Tensor,
    document_hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    query_mask: Tensor,
    document_mask: Tensor,
) -> Tensor:
    """The package's functions, combined as in its documentation."""
    queries = sparse_losses.splade_head(query_hidden, weight, bias, query_mask)
    documents = sparse_losses.splade_head(document_hidden, weight, bias, document_mask)
    positive, negative = documents[: len(queries)], documents[len(queries) :]
    contrast = sparse_losses.info_nce_loss(
        queries, positive, negative, temperature=1.0, similarity="dot"
    )
    regularised = sparse_losses.flops_loss(queries) + sparse_losses.flops_loss(documents)
    return contrast + FLOPS_WEIGHT * regularised


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw ``B`` queries and ``2 B`` documents: a positive and a hard negative per query."""
    rows, vocabulary, width = sizes["B"], sizes["V"], sizes["H"]
    query = splade_head.draw_hidden(make, rows, sizes["S"] // 4, width)
    document = splade_head.draw_hidden(make, 2 * rows, sizes["S"], width)
    query_mask, document_mask = make.mask(*query.shape[:2]), make.mask(*document.shape[:2])
    weight = splade_head.draw_weight(make, vocabulary, width)
    sides = ((query, query_mask), (document, document_mask))
    scores = torch.cat([splade_head.pooled(hidden, weight, mask) for hidden, mask in sides])
    bias = -splade_pool.quantile(scores, 1 - sizes["density"])
    return {
        "query_hidden": query,
        "document_hidden": document,
        "weight": weight,
        "bias": bias.expand(vocabulary).clone(),
        "query_mask": query_mask,
        "document_mask": document_mask,
    }


def _num_flops(sizes: Sizes, made: Inputs, backward: bool) -> float:
    tokens = float(made["query_mask"].sum() + made["document_mask"].sum())
    active = sizes["density"] * 3 * sizes["B"] * sizes["V"]
    return 2 * sizes["H"] * (tokens * sizes["V"] + (2 * active if backward else 0))


def _size(rows: int, length: int, vocabulary: int = BERT, **more: str) -> Sizes:
    return {"B": rows, "S": length, "V": vocabulary, "H": 768, "density": 0.02, **more}


BENCHMARK = Benchmark(
    "end_to_end",
    inputs,
    ("query_hidden", "document_hidden", "weight", "bias"),
    plain,
    ours(_of_the_package),
    tiny=[{"B": 3, "S": 8, "V": 40, "H": 8, "density": 0.3}],
    quick=[_size(4, 64)],
    full=[_size(8, 128), _size(16, 128)],
    gpu=[_size(16, 128, dtype="bf16")],
    aims=[Aim("end to end", _size(16, 128), "speedup", 9.0)],
    num_flops=_num_flops,
    plain_bytes=lambda sizes: 4.0 * (5 * 3 * sizes["B"] * sizes["S"] + 2 * sizes["H"]) * sizes["V"],
    tolerance=2e-2,
)
