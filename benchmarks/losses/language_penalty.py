"""Language penalty: a cost on activations of tokens of other languages."""

from torch import Tensor

import sparse_losses
from benchmarks.schema import ACTIVATION_SIZES, Benchmark, ours, penalised_activations


def plain(activations: Tensor, token_penalty: Tensor) -> Tensor:
    """Activations times token penalties."""
    return (activations * token_penalty).sum(-1).mean()


BENCHMARK = Benchmark(
    "language_penalty",
    penalised_activations,
    ("activations",),
    plain,
    ours(sparse_losses.language_penalty_loss),
    **ACTIVATION_SIZES,
)
