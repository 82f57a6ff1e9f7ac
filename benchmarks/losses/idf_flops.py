"""IDF-FLOPS: mean activations, weighted by token penalties."""

from torch import Tensor

import sparse_losses
from benchmarks.schema import ACTIVATION_SIZES, Benchmark, ours, penalised_activations


def plain(activations: Tensor, token_penalty: Tensor, *, beta: float = 0.3) -> Tensor:
    """Weighted sum of absolute values plus weighted sum of squares of the mean activations."""
    mean = activations.mean(0)
    return (token_penalty * mean.abs()).sum() + beta * (token_penalty * mean.square()).sum()


BENCHMARK = Benchmark(
    "idf_flops",
    penalised_activations,
    ("activations",),
    plain,
    ours(sparse_losses.idf_flops_loss),
    **ACTIVATION_SIZES,
)
