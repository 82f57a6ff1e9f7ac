"""Positive activation: the positive's tokens should be active."""

import torch
from torch import Tensor

import sparse_losses
from benchmarks.schema import BERT, XLM, Benchmark, Inputs, Maker, Sizes, activations, ours


def plain(
    activations: Tensor, positive_input_ids: Tensor, positive_attention_mask: Tensor
) -> Tensor:
    """Negative mean activation under a multi-hot mask."""
    target = torch.zeros_like(activations)
    attended = positive_attention_mask.to(activations.dtype)
    target = target.scatter_reduce(1, positive_input_ids, attended, "amax")
    return -((target * activations).sum(-1) / target.sum(-1)).mean()


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw sparse activations and the texts of the positives."""
    ids, mask = make.texts(sizes)
    texts = {"positive_input_ids": ids, "positive_attention_mask": mask}
    return activations(sizes, make) | texts


BENCHMARK = Benchmark(
    "positive_activation",
    inputs,
    ("activations",),
    plain,
    ours(sparse_losses.positive_activation_loss),
    tiny=[{"B": 4, "S": 6, "V": 30, "density": 0.4}],
    quick=[{"B": rows, "V": BERT, "S": 128, "density": 0.05} for rows in (2, 64)],
    full=[
        *[{"B": rows, "V": BERT, "S": 128, "density": 0.05} for rows in (16, 256)],
        {"B": 64, "V": XLM, "S": 128, "density": 0.005},
    ],
    gpu=[{"B": 512, "V": XLM, "S": 256, "density": 0.005, "dtype": "fp32"}],
    elements=lambda sizes: sizes["B"] * sizes["V"],
)
