"""Masked logit MSE: the pooled logits of a student and of its teacher."""

import torch
from torch import Tensor

import sparse_losses
from benchmarks.schema import BERT, XLM, Benchmark, Inputs, Maker, Sizes, ours


def plain(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """The mean of the squares over the entries that are positive in either, then over rows."""
    is_active = (student_logits > 0) | (teacher_logits > 0)
    squares = (student_logits - teacher_logits).square() * is_active
    return (squares.sum(1) / is_active.sum(1)).mean()


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw logits of which about a twentieth is positive."""
    names = ("student_logits", "teacher_logits")
    drawn = {name: make.normal(sizes["B"], sizes["V"]) for name in names}
    with torch.no_grad():
        return {name: x.sub_(1.6) for name, x in drawn.items()}


BENCHMARK = Benchmark(
    "masked_logit_mse",
    inputs,
    ("student_logits",),
    plain,
    tuple(ours(sparse_losses.masked_logit_mse_loss)),
    tiny=[{"B": 4, "V": 50}],
    quick=[{"B": 2, "V": BERT}, {"B": 64, "V": BERT}],
    full=[{"B": 64, "V": XLM}],
    gpu=[{"B": 512, "V": XLM, "dtype": "fp32"}],
)
