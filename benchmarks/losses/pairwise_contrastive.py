"""Pairwise contrastive: distances within labelled pairs."""

from collections.abc import Callable

import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks.schema import BERT, Benchmark, Inputs, Maker, Sizes, ours, peer


def plain(x1: Tensor, x2: Tensor, same: Tensor, *, margin: float = 1.0) -> Tensor:
    """Squared distance for the same class, squared hinge for different classes."""
    distance = (x1 - x2).norm(dim=-1)
    return (same * distance**2 + (1 - same) * nnf.relu(margin - distance) ** 2).mean()


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw pairs of unit vectors, half of them of the same class."""
    x1, x2 = (nnf.normalize(x, dim=-1) for x in make.pairs(sizes))
    return {"x1": x1, "x2": x2, "same": make.integers(2, sizes["B"])}


def sentence_transformers(_: Inputs) -> Callable[..., Tensor]:
    """ContrastiveLoss, times 2 as it halves the loss."""
    from sentence_transformers.sentence_transformer.losses import ContrastiveLoss
    from sentence_transformers.sentence_transformer.losses.contrastive import (
        SiameseDistanceMetric,
    )

    loss = ContrastiveLoss(None, SiameseDistanceMetric.EUCLIDEAN, margin=1.0)
    return lambda x1, x2, same: 2 * loss.compute_loss_from_embeddings([x1, x2], same)


BENCHMARK = Benchmark(
    "pairwise_contrastive",
    inputs,
    ("x1", "x2"),
    plain,
    (
        *ours(sparse_losses.pairwise_contrastive_loss),
        peer("sentence-transformers", sentence_transformers),
    ),
    tiny=[{"B": 6, "D": 8}, {"B": 6, "V": 60, "density": 0.3}],
    quick=[{"B": rows, "D": 768} for rows in (64, 4096)],
    full=[
        *[{"B": rows, "D": 768} for rows in (512, 32_768)],
        *[{"B": rows, "V": BERT, "density": 0.05} for rows in (64, 512)],
    ],
    gpu=[{"B": 32_768, "D": 768, "dtype": "bf16"}],
)
