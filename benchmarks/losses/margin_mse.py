"""MarginMSE: four scores per row."""

from collections.abc import Callable

import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks.schema import Benchmark, Inputs, Maker, Sizes, ours, peer


def plain(
    student_positive: Tensor,
    student_negative: Tensor,
    teacher_positive: Tensor,
    teacher_negative: Tensor,
) -> Tensor:
    """Mean squared error of the margins."""
    return nnf.mse_loss(student_positive - student_negative, teacher_positive - teacher_negative)


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw scores."""
    names = ("student_positive", "student_negative", "teacher_positive", "teacher_negative")
    return {name: make.normal(sizes["B"]) for name in names}


def sentence_transformers(_: Inputs) -> Callable[..., Tensor]:
    """MarginMSELoss with scores in place of embeddings."""
    from sentence_transformers.sentence_transformer.losses import MarginMSELoss

    loss = MarginMSELoss(None, similarity_fct=lambda _, scores: scores)

    def call(
        student_positive: Tensor,
        student_negative: Tensor,
        teacher_positive: Tensor,
        teacher_negative: Tensor,
    ) -> Tensor:
        embeddings = [student_positive, student_positive, student_negative]
        return loss.compute_loss_from_embeddings(embeddings, teacher_positive - teacher_negative)

    return call


BENCHMARK = Benchmark(
    "margin_mse",
    inputs,
    ("student_positive", "student_negative"),
    plain,
    (*ours(sparse_losses.margin_mse_loss), peer("sentence-transformers", sentence_transformers)),
    tiny=[{"B": 7}],
    quick=[{"B": 1024}, {"B": 1_000_000}],
    full=[{"B": 65_536}, {"B": 10_000_000}],
    gpu=[{"B": 10_000_000, "dtype": "fp32"}],
)
