"""A training step: the head for both sides, InfoNCE, FLOPS on both sides."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

import sparse_losses
from benchmarks.losses import flops, info_nce, splade_head, splade_pool
from benchmarks.schema import BERT, XLM, Benchmark, Inputs, Maker, Sizes, Variant, ours

FLOPS_WEIGHT = 1e-3


def _step(
    head: Callable[..., Tensor], contrast: Callable[..., Tensor], sparsity: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return the step made of these functions, one after the other."""

    def total(
        query_hidden: Tensor,
        document_hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        query_mask: Tensor,
        document_mask: Tensor,
    ) -> Tensor:
        queries = head(query_hidden, weight, bias, query_mask)
        documents = head(document_hidden, weight, bias, document_mask)
        value = contrast(queries, documents, temperature=1.0, similarity="dot")
        return value + FLOPS_WEIGHT * (sparsity(queries) + sparsity(documents))

    return total


plain = _step(splade_head.plain, info_nce.plain, flops.plain)
LOSSES = sparse_losses.info_nce_loss, sparse_losses.flops_loss
of_the_package = _step(sparse_losses.splade_head, *LOSSES)
of_entries = functools.partial(sparse_losses.splade_head, layout=torch.sparse_csr)


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw ``B`` queries and their documents, four times as long."""
    rows, vocabulary, width = sizes["B"], sizes["V"], sizes["H"]
    query = splade_head.draw_hidden(make, rows, sizes["S"] // 4, width)
    document = splade_head.draw_hidden(make, rows, sizes["S"], width)
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


def _size(rows: int, length: int, vocabulary: int = BERT, **more: str) -> Sizes:
    return {"B": rows, "S": length, "V": vocabulary, "H": 768, "density": 0.02, **more}


_LARGE = [
    {**_size(rows, 16, vocabulary), "density": 0.01}
    for rows in (128, 512)
    for vocabulary in (BERT, XLM)
]

BENCHMARK = Benchmark(
    "end_to_end",
    inputs,
    ("query_hidden", "document_hidden", "weight", "bias"),
    plain,
    (*ours(of_the_package), Variant("ours, CSR", _step(of_entries, *LOSSES))),
    tiny=[{"B": 3, "S": 8, "V": 40, "H": 8, "density": 0.3}],
    quick=[_size(4, 64)],
    full=[_size(8, 128), _size(16, 128), *_LARGE],
    gpu=[_size(16, 128, dtype="bf16")],
    aims=[_size(16, 128)],
    plain_bytes=lambda sizes: 5.0 * (5 * sizes["B"] * sizes["S"] + 2 * sizes["H"]) * sizes["V"],
    tolerance=2e-2,
)
