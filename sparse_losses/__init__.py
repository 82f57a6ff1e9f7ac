"""PyTorch losses for learned sparse retrievers and contrastive encoders."""

from sparse_losses._core.implementations import explain
from sparse_losses.losses._mix_teachers import mix_teachers
from sparse_losses.losses._mutual_information import mutual_information_lower_bound
from sparse_losses.losses.distillation import DistillationLoss, distillation_loss
from sparse_losses.losses.flops import FlopsLoss, flops_loss
from sparse_losses.losses.idf_flops import IdfFlopsLoss, idf_flops_loss
from sparse_losses.losses.info_nce import (
    InfoNCEFromScoresLoss,
    InfoNCELoss,
    false_negative_mask,
    info_nce_from_scores,
    info_nce_loss,
)
from sparse_losses.losses.language_penalty import LanguagePenaltyLoss, language_penalty_loss
from sparse_losses.losses.margin_mse import MarginMSELoss, margin_mse_loss
from sparse_losses.losses.masked_logit_mse import MaskedLogitMSELoss, masked_logit_mse_loss
from sparse_losses.losses.min_activation import MinActivationLoss, min_activation_loss
from sparse_losses.losses.n_pair import NPairLoss, n_pair_loss
from sparse_losses.losses.nws import NWSLoss, nws_loss
from sparse_losses.losses.pairwise_contrastive import (
    PairwiseContrastiveLoss,
    pairwise_contrastive_loss,
)
from sparse_losses.losses.positive_activation import (
    PositiveActivationLoss,
    positive_activation_loss,
)
from sparse_losses.losses.ranknet import RankNetLoss, ranknet_loss
from sparse_losses.losses.self_reconstruction import (
    SelfReconstructionLoss,
    self_reconstruction_loss,
)
from sparse_losses.losses.triplet_margin import TripletMarginLoss, triplet_margin_loss
from sparse_losses.metrics import context_overlap, recall_at_k
from sparse_losses.objective.batch import SpladeBatch, Texts
from sparse_losses.objective.diagnostics import Diagnostics, Report, gradient_report
from sparse_losses.objective.objective import ObjectiveOutput, SpladeObjective
from sparse_losses.objective.schedules import Curriculum, Phase, TrainingSchedule, Warmup
from sparse_losses.objective.teacher import BM25Teacher
from sparse_losses.presets import RECOMMENDED, V22, V23, V25, V26, V28, Preset
from sparse_losses.queue import LabelQueue
from sparse_losses.representation.encoder import SpladeEncoder
from sparse_losses.representation.gate import ContextGate
from sparse_losses.representation.head import SpladeHead, splade_head
from sparse_losses.representation.pooling import splade_pool, token_weights
from sparse_losses.representation.static import StaticQueryEncoder
from sparse_losses.sparsity.calibration import Calibration, calibrate, calibrate_threshold
from sparse_losses.vocabulary.activation_frequency import ActivationFrequency
from sparse_losses.vocabulary.bm25 import bm25_scores
from sparse_losses.vocabulary.document_frequency import DocumentFrequency
from sparse_losses.vocabulary.labels import label_similarity
from sparse_losses.vocabulary.languages import language_token_ids
from sparse_losses.vocabulary.penalties import idf_penalty, language_penalty

__version__ = "0.1.0"

__all__ = [
    "RECOMMENDED",
    "V22",
    "V23",
    "V25",
    "V26",
    "V28",
    "ActivationFrequency",
    "BM25Teacher",
    "Calibration",
    "ContextGate",
    "Curriculum",
    "Diagnostics",
    "DistillationLoss",
    "DocumentFrequency",
    "FlopsLoss",
    "IdfFlopsLoss",
    "InfoNCEFromScoresLoss",
    "InfoNCELoss",
    "LabelQueue",
    "LanguagePenaltyLoss",
    "MarginMSELoss",
    "MaskedLogitMSELoss",
    "MinActivationLoss",
    "NPairLoss",
    "NWSLoss",
    "ObjectiveOutput",
    "PairwiseContrastiveLoss",
    "Phase",
    "PositiveActivationLoss",
    "Preset",
    "RankNetLoss",
    "Report",
    "SelfReconstructionLoss",
    "SpladeBatch",
    "SpladeEncoder",
    "SpladeHead",
    "SpladeObjective",
    "StaticQueryEncoder",
    "Texts",
    "TrainingSchedule",
    "TripletMarginLoss",
    "Warmup",
    "__version__",
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
