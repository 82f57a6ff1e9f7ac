"""Other packages that hold the same losses, each called as its documentation says.

A peer takes the inputs of the eager formula and returns the same number, which is checked before
it is timed. One that is not installed is left out, with a line that says so.
"""

import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["PACKAGES", "versions", "why_missing"]

# The package's name on the index, what it is imported as, and whether it needs a GPU.
PACKAGES = {
    "sentence-transformers": ("sentence_transformers", False),
    "pytorch-metric-learning": ("pytorch_metric_learning", False),
    "info-nce-pytorch": ("info_nce", False),
    "liger-kernel": ("liger_kernel", True),
    "sparton": ("sparton", True),
}


@functools.cache
def why_missing(package: str, device_type: str) -> str | None:
    """``None`` if the package can be measured on that device, else what is in the way."""
    module, needs_gpu = PACKAGES[package]
    if needs_gpu and device_type != "cuda":
        return "needs a GPU"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except ImportError as error:
        return "not installed" if getattr(error, "name", None) == module else f"broken: {error}"
    return None


def versions(device_type: str) -> dict[str, str]:
    """The version of every peer that can be measured."""
    found = {}
    for package in PACKAGES:
        if why_missing(package, device_type) is None:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = "unknown"
    return found


def _targets(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)


@functools.cache
def _made(make: Callable[[], Any]) -> Any:
    """The loss object, built at the first call and kept: building is not what is measured."""
    return make()


# sentence-transformers: its losses take embeddings as well as models.


def _st_mnrl() -> Any:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    return MultipleNegativesRankingLoss(model=None, scale=1 / 0.07)  # type: ignore[arg-type]


def st_info_nce(anchor: Tensor, positive: Tensor) -> Tensor:
    """MultipleNegativesRankingLoss at the scale 1 / 0.07."""
    return _made(_st_mnrl).compute_loss_from_embeddings([anchor, positive], None)


def _st_mnrl_dot() -> Any:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.util import dot_score

    return MultipleNegativesRankingLoss(None, scale=1.0, similarity_fct=dot_score)  # type: ignore[arg-type]


def st_n_pair(anchor: Tensor, positive: Tensor) -> Tensor:
    """MultipleNegativesRankingLoss on dot products."""
    return _made(_st_mnrl_dot).compute_loss_from_embeddings([anchor, positive], None)


def _st_contrastive() -> Any:
    from sentence_transformers.sentence_transformer.losses import ContrastiveLoss
    from sentence_transformers.sentence_transformer.losses.contrastive import (
        SiameseDistanceMetric,
    )

    return ContrastiveLoss(None, SiameseDistanceMetric.EUCLIDEAN, margin=1.0)  # type: ignore[arg-type]


def st_pairwise_contrastive(x1: Tensor, x2: Tensor, same: Tensor) -> Tensor:
    """ContrastiveLoss, which halves."""
    return 2 * _made(_st_contrastive).compute_loss_from_embeddings([x1, x2], same)


def _st_triplet() -> Any:
    from sentence_transformers.sentence_transformer.losses import TripletLoss
    from sentence_transformers.sentence_transformer.losses.triplet import TripletDistanceMetric

    return TripletLoss(None, TripletDistanceMetric.COSINE, triplet_margin=0.3)  # type: ignore[arg-type]


def st_triplet_margin(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """TripletLoss on cosine distances."""
    return _made(_st_triplet).compute_loss_from_embeddings([anchor, positive, negative], None)


def _st_flops() -> Any:
    from sentence_transformers.sparse_encoder.losses import FlopsLoss

    return FlopsLoss(None)  # type: ignore[arg-type]


def st_flops(activations: Tensor) -> Tensor:
    """FlopsLoss."""
    return _made(_st_flops).compute_loss_from_embeddings(activations)


def _given(_: Tensor, scores: Tensor) -> Tensor:
    return scores


def _st_margin_mse() -> Any:
    from sentence_transformers.sentence_transformer.losses import MarginMSELoss

    return MarginMSELoss(None, similarity_fct=_given)  # type: ignore[arg-type]


def st_margin_mse(
    student_positive: Tensor,
    student_negative: Tensor,
    teacher_positive: Tensor,
    teacher_negative: Tensor,
) -> Tensor:
    """MarginMSELoss, with the scores given in place of embeddings."""
    embeddings = [student_positive, student_positive, student_negative]
    return _made(_st_margin_mse).compute_loss_from_embeddings(
        embeddings, teacher_positive - teacher_negative
    )


def _st_distillation() -> Any:
    from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss

    return DistillKLDivLoss(None, similarity_fct=_given, temperature=3.0)  # type: ignore[arg-type]


def st_distillation(student_scores: Tensor, teacher_scores: Tensor) -> Tensor:
    """DistillKLDivLoss, one column a candidate."""
    columns = list(student_scores.unbind(1))
    loss = _made(_st_distillation)
    return loss.compute_loss_from_embeddings([columns[0], *columns], teacher_scores)


def _st_pooling() -> Any:
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    return SpladePooling("max").train()


def st_splade_pool(logits: Tensor, attention_mask: Tensor) -> Tensor:
    """SpladePooling, in training mode."""
    features = {"token_embeddings": logits, "attention_mask": attention_mask}
    return _made(_st_pooling)(features)["sentence_embedding"]


def st_splade_head(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
    """A linear layer, then SpladePooling."""
    return st_splade_pool(torch.nn.functional.linear(hidden, weight, bias), attention_mask)


# pytorch-metric-learning: labels instead of pairs.


def _pml_info_nce() -> Any:
    from pytorch_metric_learning.losses import SupConLoss
    from pytorch_metric_learning.reducers import MeanReducer

    return SupConLoss(temperature=0.07, reducer=MeanReducer())


def pml_info_nce(anchor: Tensor, positive: Tensor) -> Tensor:
    """SupConLoss with one positive a row, which is InfoNCE; NTXentLoss holds ``[B, B^2]``."""
    # Two tensors of labels: one and the same would mean that anchors are compared with themselves.
    loss = _made(_pml_info_nce)
    return loss(anchor, _targets(anchor), ref_emb=positive, ref_labels=_targets(positive))


def _pml_triplet() -> Any:
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.reducers import MeanReducer

    return TripletMarginLoss(margin=0.3, distance=CosineSimilarity(), reducer=MeanReducer())


def pml_triplet_margin(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """TripletMarginLoss of given triplets; it multiplies all rows with all rows."""
    rows = _targets(anchor)
    count = anchor.shape[0]
    return _made(_pml_triplet)(
        torch.cat([anchor, positive, negative]),
        indices_tuple=(rows, rows + count, rows + 2 * count),
    )


# info-nce-pytorch.


def info_nce_pytorch(anchor: Tensor, positive: Tensor) -> Tensor:
    """Its function."""
    from info_nce import info_nce

    return info_nce(anchor, positive, temperature=0.07)


# liger-kernel, on a GPU.


def liger_info_nce(anchor: Tensor, positive: Tensor) -> Tensor:
    """The fused linear cross-entropy, with the positives in place of a projection's weight."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    normalize = torch.nn.functional.normalize
    loss = _made(LigerFusedLinearCrossEntropyLoss)
    return loss(normalize(positive), normalize(anchor) / 0.07, _targets(anchor))


def liger_n_pair(anchor: Tensor, positive: Tensor) -> Tensor:
    """The fused linear cross-entropy."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return _made(LigerFusedLinearCrossEntropyLoss)(positive, anchor, _targets(anchor))


def _liger_kl() -> Any:
    from liger_kernel.transformers import LigerKLDIVLoss

    return LigerKLDIVLoss(reduction="batchmean", log_target=False)


def liger_distillation(student_scores: Tensor, teacher_scores: Tensor) -> Tensor:
    """LigerKLDIVLoss of softened distributions."""
    student = torch.log_softmax(student_scores / 3.0, dim=-1)
    return 9.0 * _made(_liger_kl)(student, torch.softmax(teacher_scores / 3.0, dim=-1))


# Sparton, on a GPU.


@functools.cache
def _sparton(vocabulary: int, width: int) -> Any:
    from sparton import SpartonHead

    with torch.device("meta"):
        return SpartonHead(vocabulary, width, use_bias=True)


def sparton_head(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
    """SpartonHead over the given weights."""
    parameters = {"weight": weight, "bias": bias}
    return torch.func.functional_call(_sparton(*weight.shape), parameters, (hidden, attention_mask))
