"""All functions of the package: ``import sparse_losses.functional as F``."""

from sparse_losses.losses import (
    distillation_loss,
    flops_loss,
    idf_flops_loss,
    info_nce_from_scores,
    info_nce_loss,
    language_penalty_loss,
    margin_mse_loss,
    min_activation_loss,
    mutual_information_lower_bound,
    n_pair_loss,
    nws_loss,
    pairwise_contrastive_loss,
    positive_activation_loss,
    self_reconstruction_loss,
    triplet_margin_loss,
)
from sparse_losses.metrics import context_overlap, recall_at_k
from sparse_losses.objective import advise, cached_backward, gradient_report
from sparse_losses.queue import LabelQueue
from sparse_losses.representation import (
    calibrate_threshold,
    splade_head,
    splade_pool,
    token_weights,
)
from sparse_losses.vocabulary import (
    DocumentFrequency,
    bm25_scores,
    idf_penalty,
    label_similarity,
    language_penalty,
    language_token_ids,
)

__all__ = [
    "DocumentFrequency",
    "LabelQueue",
    "advise",
    "bm25_scores",
    "cached_backward",
    "calibrate_threshold",
    "context_overlap",
    "distillation_loss",
    "flops_loss",
    "gradient_report",
    "idf_flops_loss",
    "idf_penalty",
    "info_nce_from_scores",
    "info_nce_loss",
    "label_similarity",
    "language_penalty",
    "language_penalty_loss",
    "language_token_ids",
    "margin_mse_loss",
    "min_activation_loss",
    "mutual_information_lower_bound",
    "n_pair_loss",
    "nws_loss",
    "pairwise_contrastive_loss",
    "positive_activation_loss",
    "recall_at_k",
    "self_reconstruction_loss",
    "splade_head",
    "splade_pool",
    "token_weights",
    "triplet_margin_loss",
]
