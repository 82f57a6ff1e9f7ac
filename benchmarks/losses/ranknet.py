"""RankNet: the scores of candidate lists, and those of a teacher."""

import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks.schema import Benchmark, Inputs, Maker, Sizes, ours


def plain(student_scores: Tensor, teacher_scores: Tensor) -> Tensor:
    """All differences; the mean over ordered pairs of each row, then over rows."""
    lead = student_scores[:, :, None] - student_scores[:, None, :]
    is_pair = teacher_scores[:, :, None] > teacher_scores[:, None, :]
    cost = nnf.softplus(-lead) * is_pair
    return (cost.sum((1, 2)) / is_pair.sum((1, 2))).mean()


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw scores."""
    names = ("student_scores", "teacher_scores")
    return {name: make.normal(sizes["B"], sizes["C"]) for name in names}


BENCHMARK = Benchmark(
    "ranknet",
    inputs,
    ("student_scores",),
    plain,
    tuple(ours(sparse_losses.ranknet_loss)),
    tiny=[{"B": 7, "C": 5}],
    quick=[{"B": 64, "C": 32}, {"B": 1024, "C": 32}],
    full=[{"B": 128, "C": 128}],
    gpu=[{"B": 1024, "C": 128, "dtype": "fp32"}],
)
