"""Triplet margin: a hinge on two cosines."""

from collections.abc import Callable

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


def sentence_transformers(_: Inputs) -> Callable[..., Tensor]:
    """TripletLoss on cosine distances."""
    from sentence_transformers.sentence_transformer.losses import TripletLoss
    from sentence_transformers.sentence_transformer.losses.triplet import TripletDistanceMetric

    loss = TripletLoss(None, TripletDistanceMetric.COSINE, triplet_margin=0.3)
    return lambda **rows: loss.compute_loss_from_embeddings(list(rows.values()), None)


def metric_learning(made: Inputs) -> Callable[..., Tensor]:
    """TripletMarginLoss of given triplets; it computes the products of all rows."""
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.reducers import MeanReducer

    loss = TripletMarginLoss(margin=0.3, distance=CosineSimilarity(), reducer=MeanReducer())
    count, device = len(made["anchor"]), made["anchor"].device
    triplets = torch.arange(3 * count, device=device).chunk(3)
    return lambda **rows: loss(torch.cat(list(rows.values())), indices_tuple=triplets)


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
