"""Minimum activation: a hinge on the mean of the largest activations."""

import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks.schema import ACTIVATION_SIZES, BERT, Benchmark, activations, ours


def plain(activations: Tensor, *, top_k: int = 5, threshold: float = 0.5) -> Tensor:
    """Hinge on the mean of the largest activations."""
    return nnf.relu(threshold - activations.topk(top_k, dim=-1).values.mean(-1)).mean()


BENCHMARK = Benchmark(
    "min_activation",
    activations,
    ("activations",),
    plain,
    ours(sparse_losses.min_activation_loss),
    **ACTIVATION_SIZES,
    aims=[{"B": 256, "V": BERT, "density": 0.05}],
    # No row reaches the threshold, as a satisfied hinge has no gradient to compute.
    options=lambda sizes: {"threshold": 10.0},
)
