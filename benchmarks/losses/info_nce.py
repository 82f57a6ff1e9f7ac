"""InfoNCE: pairs of dense or sparse vectors with in-batch negatives."""

from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks.schema import (
    BERT,
    PRODUCT_IMPLEMENTATIONS,
    XLM,
    Benchmark,
    Inputs,
    Maker,
    Sizes,
    Variant,
    is_dense,
    ours,
    peer,
)


def plain(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None = None,
    *,
    temperature: float = 0.07,
    similarity: str = "cosine",
) -> Tensor:
    """Normalise, multiply, divide by the temperature; cross-entropy with the diagonal."""
    candidates = positive if negative is None else torch.cat([positive, negative])
    if similarity == "cosine":
        anchor, candidates = nnf.normalize(anchor, dim=-1), nnf.normalize(candidates, dim=-1)
    scores = anchor @ candidates.T / temperature
    return nnf.cross_entropy(scores, torch.arange(anchor.shape[0], device=anchor.device))


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw pairs of vectors."""
    return dict(zip(("anchor", "positive"), make.pairs(sizes), strict=True))


def _to_csr(made: Inputs) -> Inputs:
    """Convert the vectors to CSR leaf tensors."""
    names = ("anchor", "positive")
    csr = {name: made[name].detach().to_sparse_csr().requires_grad_() for name in names}
    return {**made, **csr}


def _is_dense_or_typical(sizes: Sizes) -> bool:
    """Whether to measure peers: they ignore sparsity, so one density is enough."""
    return is_dense(sizes) or sizes["density"] <= 0.005 or sizes["V"] < 1000


def sentence_transformers(_: Inputs) -> Callable[..., Tensor]:
    """MultipleNegativesRankingLoss at the scale 1 / 0.07."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(None, scale=1 / 0.07)
    return lambda anchor, positive: loss.compute_loss_from_embeddings([anchor, positive], None)


def metric_learning(made: Inputs) -> Callable[..., Tensor]:
    """SupConLoss with one positive per row, which is InfoNCE; NTXentLoss needs ``[B, B^2]``."""
    from pytorch_metric_learning.losses import SupConLoss
    from pytorch_metric_learning.reducers import MeanReducer

    loss, anchor = SupConLoss(temperature=0.07, reducer=MeanReducer()), made["anchor"]
    # The labels are two tensors, as an identical one would compare anchors with themselves.
    labels, others = (torch.arange(len(anchor), device=anchor.device) for _ in range(2))
    return lambda anchor, positive: loss(anchor, labels, ref_emb=positive, ref_labels=others)


def info_nce_pytorch(_: Inputs) -> Callable[..., Tensor]:
    """``info_nce`` of the package info-nce-pytorch."""
    from info_nce import info_nce

    return lambda anchor, positive: info_nce(anchor, positive, temperature=0.07)


_DENSE = {"B": 4096, "D": 768}
_SPARSE = {"B": 1024, "V": BERT, "density": 0.005}

BENCHMARK = Benchmark(
    "info_nce",
    inputs,
    ("anchor", "positive"),
    plain,
    (
        *ours(sparse_losses.info_nce_loss, PRODUCT_IMPLEMENTATIONS),
        Variant(
            "ours, CSR input",
            sparse_losses.info_nce_loss,
            prepare=_to_csr,
            when=PRODUCT_IMPLEMENTATIONS["nonzeros"],
            at_stored_entries=True,
        ),
        peer("sentence-transformers", sentence_transformers, _is_dense_or_typical),
        peer("pytorch-metric-learning", metric_learning, _is_dense_or_typical),
        peer("info-nce-pytorch", info_nce_pytorch, _is_dense_or_typical),
    ),
    tiny=[{"B": 5, "D": 8}, {"B": 6, "V": 60, "density": 0.2}],
    quick=[
        *[{"B": rows, "D": 768} for rows in (64, 256, 1024)],
        {"B": 256, "V": BERT, "density": 0.005},
    ],
    full=[
        _DENSE,
        *[{"B": 1024, "V": BERT, "density": share} for share in (0.5, 0.12, 0.05, 0.005)],
        *[{"B": 256, "V": BERT, "density": share} for share in (0.5, 0.15, 0.12, 0.1, 0.05)],
        *[{"B": 64, "V": BERT, "density": share} for share in (0.5, 0.05, 0.005)],
        {"B": 64, "V": XLM, "density": 0.005},
    ],
    gpu=[
        *[{"B": rows, "D": 768, "dtype": "bf16"} for rows in (65_536, 8192, 1024)],
        {"B": 1024, "D": 768, "dtype": "fp32"},
        {"B": 1024, "V": BERT, "density": 0.005, "dtype": "fp32"},
    ],
    calculated=[
        {**sizes, "dtype": dtype}
        for sizes in ({"B": 2048, "D": 768}, {"B": 64, "V": BERT, "density": 0.005})
        for dtype in ("bf16", "fp32")
    ],
    aims=[_DENSE, _SPARSE],
    plain_bytes=lambda sizes: (
        4.0 * (6 * sizes["B"] ** 2 + 6 * sizes["B"] * sizes.get("D", sizes.get("V", 0)))
    ),
)
