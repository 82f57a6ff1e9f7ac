"""Triplet margin: a hinge on two cosines."""

import functools
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks.schema import BERT, Benchmark, Inputs, Maker, Sizes, ours, peer


def plain(anchor: Tensor, positive: Tensor, negative: Tensor, *, margin: float = 0.3) -> Tensor:
    """Hinge on the two cosines."""
    near = nnf.cosine_similarity(anchor, positive)
    far = nnf.cosine_similarity(anchor, negative)
    return nnf.relu(margin - near + far).mean()


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw pairs; the negative is another row's positive."""
    anchor, positive = make.pairs(sizes)
    return {"anchor": anchor, "positive": positive, "negative": positive.roll(1, 0).clone()}


@functools.cache
def _triplet() -> Any:
    from sentence_transformers.sentence_transformer.losses import TripletLoss
    from sentence_transformers.sentence_transformer.losses.triplet import TripletDistanceMetric

    return TripletLoss(None, TripletDistanceMetric.COSINE, triplet_margin=0.3)  # type: ignore[arg-type]


def sentence_transformers(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """TripletLoss on cosine distances."""
    return _triplet().compute_loss_from_embeddings([anchor, positive, negative], None)


@functools.cache
def _metric_triplet() -> Any:
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.reducers import MeanReducer

    return TripletMarginLoss(margin=0.3, distance=CosineSimilarity(), reducer=MeanReducer())


def metric_learning(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """TripletMarginLoss of given triplets; it computes the products of all rows."""
    count = anchor.shape[0]
    rows = torch.arange(count, device=anchor.device)
    return _metric_triplet()(
        torch.cat([anchor, positive, negative]),
        indices_tuple=(rows, rows + count, rows + 2 * count),
    )


BENCHMARK = Benchmark(
    "triplet_margin",
    inputs,
    ("anchor", "positive", "negative"),
    plain,
    (
        *ours(sparse_losses.triplet_margin_loss),
        peer("sentence-transformers", sentence_transformers),
        peer("pytorch-metric-learning", metric_learning, lambda sizes: sizes["B"] <= 1024),
    ),
    tiny=[{"B": 6, "D": 8}, {"B": 6, "V": 60, "density": 0.3}],
    quick=[{"B": rows, "D": 768} for rows in (64, 4096)],
    full=[
        *[{"B": rows, "D": 768} for rows in (512, 32_768)],
        *[{"B": rows, "V": BERT, "density": 0.05} for rows in (64, 512)],
    ],
    gpu=[{"B": 32_768, "D": 768, "dtype": "bf16"}],
)
