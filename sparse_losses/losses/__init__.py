"""The losses, one per file: formula, function and module."""

from sparse_losses.losses._mutual_information import mutual_information_lower_bound
from sparse_losses.losses.distillation import DistillationLoss, distillation_loss
from sparse_losses.losses.flops import FlopsLoss, flops_loss
from sparse_losses.losses.idf_flops import IdfFlopsLoss, idf_flops_loss
from sparse_losses.losses.info_nce import (
    InfoNCEFromScoresLoss,
    InfoNCELoss,
    info_nce_from_scores,
    info_nce_loss,
)
from sparse_losses.losses.language_penalty import LanguagePenaltyLoss, language_penalty_loss
from sparse_losses.losses.margin_mse import MarginMSELoss, margin_mse_loss
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
from sparse_losses.losses.self_reconstruction import (
    SelfReconstructionLoss,
    self_reconstruction_loss,
)
from sparse_losses.losses.triplet_margin import TripletMarginLoss, triplet_margin_loss

__all__ = [
    "DistillationLoss",
    "FlopsLoss",
    "IdfFlopsLoss",
    "InfoNCEFromScoresLoss",
    "InfoNCELoss",
    "LanguagePenaltyLoss",
    "MarginMSELoss",
    "MinActivationLoss",
    "NPairLoss",
    "NWSLoss",
    "PairwiseContrastiveLoss",
    "PositiveActivationLoss",
    "SelfReconstructionLoss",
    "TripletMarginLoss",
    "distillation_loss",
    "flops_loss",
    "idf_flops_loss",
    "info_nce_from_scores",
    "info_nce_loss",
    "language_penalty_loss",
    "margin_mse_loss",
    "min_activation_loss",
    "mutual_information_lower_bound",
    "n_pair_loss",
    "nws_loss",
    "pairwise_contrastive_loss",
    "positive_activation_loss",
    "self_reconstruction_loss",
    "triplet_margin_loss",
]
