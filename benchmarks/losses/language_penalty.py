"""Language penalty: a cost on activations of tokens of other languages."""

from torch import Tensor

import sparse_losses
from benchmarks.schema import ACTIVATION_SIZES, Benchmark, Inputs, Maker, Sizes, ours


def plain(activations: Tensor, token_penalty: Tensor) -> Tensor:
    """Activations times token penalties."""
    return (activations * token_penalty).sum(-1).mean()


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw sparse activations and token penalties."""
    activations = make.zipf(sizes["B"], sizes["V"], sizes["density"])
    return {"activations": activations, "token_penalty": make.uniform(sizes["V"])}


BENCHMARK = Benchmark(
    "language_penalty",
    inputs,
    ("activations",),
    plain,
    ours(sparse_losses.language_penalty_loss),
    **ACTIVATION_SIZES,
)
