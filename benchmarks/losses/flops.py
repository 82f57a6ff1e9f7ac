"""FLOPS: squared mean activations."""

from collections.abc import Callable

from torch import Tensor

import sparse_losses
from benchmarks.schema import (
    ACTIVATION_SIZES,
    BERT,
    Benchmark,
    Inputs,
    activations,
    ours,
    peer,
)


def plain(activations: Tensor) -> Tensor:
    """Sum over the vocabulary of the squared mean activation."""
    return activations.abs().mean(0).square().sum()


def sentence_transformers(_: Inputs) -> Callable[..., Tensor]:
    """FlopsLoss."""
    from sentence_transformers.sparse_encoder.losses import FlopsLoss

    loss = FlopsLoss(None)
    return lambda activations: loss.compute_loss_from_embeddings(activations)


BENCHMARK = Benchmark(
    "flops",
    activations,
    ("activations",),
    plain,
    (*ours(sparse_losses.flops_loss), peer("sentence-transformers", sentence_transformers)),
    **ACTIVATION_SIZES,
    aims=[{"B": 256, "V": BERT, "density": 0.05}],
    kink_at_zero=True,
)
