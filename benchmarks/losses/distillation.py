"""Distillation: softened KL divergence and squared difference of z-scores."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks.schema import Benchmark, Inputs, Maker, Sizes, ours, peer

_PARTS = {
    "KL": {"alpha_kl": 1.0, "alpha_mse": 0.0},
    "z-MSE": {"alpha_kl": 0.0, "alpha_mse": 1.0},
    "both": {},
}


def plain(
    student_scores: Tensor,
    teacher_scores: Tensor,
    *,
    temperature: float = 3.0,
    alpha_kl: float = 0.7,
    alpha_mse: float = 0.3,
) -> Tensor:
    """Softened KL plus the MSE of z-scores; a term of weight 0 is not computed."""
    loss = student_scores.new_zeros(())
    if alpha_kl:
        kl = nnf.kl_div(
            nnf.log_softmax(student_scores / temperature, dim=-1),
            nnf.softmax(teacher_scores / temperature, dim=-1),
            reduction="batchmean",
        )
        loss = loss + alpha_kl * temperature**2 * kl
    if alpha_mse:
        student, teacher = (
            (scores - scores.mean()) / (scores.std() + 1e-8)
            for scores in (student_scores, teacher_scores)
        )
        loss = loss + alpha_mse * nnf.mse_loss(student, teacher)
    return loss


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw student and teacher scores that agree by half."""
    student = 5 * make.normal(sizes["B"], sizes["C"])
    teacher = student + 5 * make.normal(sizes["B"], sizes["C"])
    return {"student_scores": student, "teacher_scores": teacher}


def sentence_transformers(_: Inputs) -> Callable[..., Tensor]:
    """DistillKLDivLoss, with one column per candidate."""
    from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss

    loss = DistillKLDivLoss(None, similarity_fct=lambda _, scores: scores, temperature=3.0)

    def call(student_scores: Tensor, teacher_scores: Tensor) -> Tensor:
        columns = list(student_scores.unbind(1))
        return loss.compute_loss_from_embeddings([columns[0], *columns], teacher_scores)

    return call


def _scores(rows: int, columns: int, part: str, **more: Any) -> Sizes:
    return {"B": rows, "C": columns, "part": part, **more}


BENCHMARK = Benchmark(
    "distillation",
    inputs,
    ("student_scores",),
    plain,
    (
        *ours(sparse_losses.distillation_loss),
        peer(
            "sentence-transformers",
            sentence_transformers,
            lambda sizes: sizes["part"] == "KL" and sizes["C"] <= 16,
        ),
    ),
    tiny=[_scores(4, 6, part) for part in _PARTS],
    quick=[_scores(1024, 8, "KL"), *[_scores(1024, 1024, part) for part in ("KL", "z-MSE")]],
    full=[
        _scores(1024, 1024, "both"),
        *[_scores(rows, rows, part) for rows in (256, 4096) for part in _PARTS],
    ],
    gpu=[
        _scores(4096, 4096, "KL", dtype="fp32"),
        *[_scores(1024, columns, "both", dtype="fp32") for columns in (1024, 32)],
    ],
    aims=[_scores(1024, 1024, part) for part in ("KL", "z-MSE")],
    options=lambda sizes: _PARTS[sizes["part"]],
)
