"""All functions of the package: ``import sparse_losses.functional as F``."""

from sparse_losses._core.implementations import explain
from sparse_losses.losses._mix_teachers import mix_teachers
from sparse_losses.losses.distillation import distillation_loss
from sparse_losses.losses.flops import flops_loss
from sparse_losses.losses.idf_flops import idf_flops_loss
from sparse_losses.losses.info_nce import false_negative_mask, info_nce_from_scores, info_nce_loss
from sparse_losses.losses.language_penalty import language_penalty_loss
from sparse_losses.losses.margin_mse import margin_mse_loss
from sparse_losses.losses.masked_logit_mse import masked_logit_mse_loss
from sparse_losses.losses.min_activation import min_activation_loss
from sparse_losses.losses.n_pair import n_pair_loss
from sparse_losses.losses.nws import nws_loss
from sparse_losses.losses.pairwise_contrastive import pairwise_contrastive_loss
from sparse_losses.losses.positive_activation import positive_activation_loss
from sparse_losses.losses.ranknet import ranknet_loss
from sparse_losses.losses.self_reconstruction import self_reconstruction_loss
from sparse_losses.losses.triplet_margin import triplet_margin_loss
from sparse_losses.metrics import context_overlap, mutual_information_lower_bound, recall_at_k
from sparse_losses.objective.diagnostics import gradient_report
from sparse_losses.queue import LabelQueue
from sparse_losses.representation.head import splade_head
from sparse_losses.representation.pooling import splade_pool, token_weights
from sparse_losses.sparsity.calibration import calibrate, calibrate_threshold
from sparse_losses.vocabulary.bm25 import bm25_scores
from sparse_losses.vocabulary.document_frequency import DocumentFrequency
from sparse_losses.vocabulary.labels import label_similarity
from sparse_losses.vocabulary.languages import language_token_ids
from sparse_losses.vocabulary.penalties import idf_penalty, language_penalty

__all__ = [
    "DocumentFrequency",
    "LabelQueue",
    "bm25_scores",
    "calibrate",
    "calibrate_threshold",
    "context_overlap",
    "distillation_loss",
    "explain",
    "false_negative_mask",
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
    "masked_logit_mse_loss",
    "min_activation_loss",
    "mix_teachers",
    "mutual_information_lower_bound",
    "n_pair_loss",
    "nws_loss",
    "pairwise_contrastive_loss",
    "positive_activation_loss",
    "ranknet_loss",
    "recall_at_k",
    "self_reconstruction_loss",
    "splade_head",
    "splade_pool",
    "token_weights",
    "triplet_margin_loss",
]
