"""Self-reconstruction: the text's own tokens as a multi-hot target."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks.schema import BERT, XLM, Benchmark, Inputs, Maker, Sizes, ours


def plain(activations: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Binary cross-entropy with a multi-hot target."""
    target = torch.zeros_like(activations)
    target = target.scatter_reduce(1, input_ids, attention_mask.to(activations.dtype), "amax")
    return nnf.binary_cross_entropy_with_logits(activations, target)


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw logits, most of them negative, and texts."""
    ids, mask = make.texts(sizes)
    logits = make.normal(sizes["B"], sizes["V"]) - 2
    return {"activations": logits, "input_ids": ids, "attention_mask": mask}


_AIMED = {"B": 64, "S": 128, "V": BERT}

BENCHMARK = Benchmark(
    "self_reconstruction",
    inputs,
    ("activations",),
    plain,
    ours(sparse_losses.self_reconstruction_loss),
    tiny=[{"B": 4, "S": 6, "V": 30}],
    quick=[{"B": 2, "S": 128, "V": BERT}, _AIMED],
    full=[
        *[{"B": rows, "S": 128, "V": BERT} for rows in (16, 256)],
        {"B": 64, "S": 128, "V": XLM},
    ],
    gpu=[{"B": 512, "S": 256, "V": XLM, "dtype": "fp32"}],
    aims=[_AIMED],
    elements=lambda sizes: sizes["B"] * sizes["V"],
)
