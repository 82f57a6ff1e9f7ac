"""N-pair: raw dot products with in-batch negatives."""

from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks.schema import BERT, Benchmark, Inputs, Maker, Sizes, is_dense, ours, peer


def plain(anchor: Tensor, positive: Tensor) -> Tensor:
    """``log(1 + sum(exp(a n - a p)))`` over the other rows' positives."""
    return nnf.cross_entropy(
        anchor @ positive.T, torch.arange(anchor.shape[0], device=anchor.device)
    )


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw pairs whose dot product is about four.

    If it is much larger, the softmax is one-hot and the plain formula cancels.
    """
    anchor, positive = make.pairs(sizes)
    length = sizes["D"] if is_dense(sizes) else sizes["V"] * sizes["density"]
    scale = (4 / length) ** 0.5
    return {"anchor": anchor * scale, "positive": positive * scale}


def sentence_transformers(_: Inputs) -> Callable[..., Tensor]:
    """MultipleNegativesRankingLoss on dot products."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.util import dot_score

    loss = MultipleNegativesRankingLoss(None, scale=1.0, similarity_fct=dot_score)
    return lambda anchor, positive: loss.compute_loss_from_embeddings([anchor, positive], None)


BENCHMARK = Benchmark(
    "n_pair",
    inputs,
    ("anchor", "positive"),
    plain,
    (*ours(sparse_losses.n_pair_loss), peer("sentence-transformers", sentence_transformers)),
    tiny=[{"B": 5, "D": 8}, {"B": 6, "V": 60, "density": 0.2}],
    quick=[{"B": rows, "D": 768} for rows in (64, 1024)],
    full=[
        *[{"B": rows, "D": 768} for rows in (256, 4096)],
        *[{"B": 256, "V": BERT, "density": share} for share in (0.05, 0.005)],
    ],
    gpu=[{"B": 8192, "D": 768, "dtype": "bf16"}],
)
