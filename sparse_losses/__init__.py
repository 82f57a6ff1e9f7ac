"""PyTorch losses for learned sparse retrievers and contrastive encoders."""

from sparse_losses import functional
from sparse_losses.functional import *  # noqa: F403  # all functions
from sparse_losses.losses.distillation import DistillationLoss
from sparse_losses.losses.flops import FlopsLoss
from sparse_losses.losses.idf_flops import IdfFlopsLoss
from sparse_losses.losses.info_nce import InfoNCEFromScoresLoss, InfoNCELoss
from sparse_losses.losses.language_penalty import LanguagePenaltyLoss
from sparse_losses.losses.margin_mse import MarginMSELoss
from sparse_losses.losses.masked_logit_mse import MaskedLogitMSELoss
from sparse_losses.losses.min_activation import MinActivationLoss
from sparse_losses.losses.n_pair import NPairLoss
from sparse_losses.losses.nws import NWSLoss
from sparse_losses.losses.pairwise_contrastive import PairwiseContrastiveLoss
from sparse_losses.losses.positive_activation import PositiveActivationLoss
from sparse_losses.losses.ranknet import RankNetLoss
from sparse_losses.losses.self_reconstruction import SelfReconstructionLoss
from sparse_losses.losses.triplet_margin import TripletMarginLoss
from sparse_losses.objective.batch import SpladeBatch, Texts
from sparse_losses.objective.diagnostics import Diagnostics
from sparse_losses.objective.objective import ObjectiveOutput, SpladeObjective
from sparse_losses.objective.schedules import Curriculum, Phase, TrainingSchedule, Warmup
from sparse_losses.objective.teacher import BM25Teacher
from sparse_losses.presets import RECOMMENDED, V22, V23, V25, V26, V28, Preset
from sparse_losses.representation.encoder import SpladeEncoder
from sparse_losses.representation.gate import ContextGate
from sparse_losses.representation.head import SpladeHead
from sparse_losses.representation.static import StaticQueryEncoder
from sparse_losses.sparsity.calibration import Calibration
from sparse_losses.vocabulary.activation_frequency import ActivationFrequency

__version__ = "0.1.0"

__all__ = [
    *functional.__all__,
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
    "FlopsLoss",
    "IdfFlopsLoss",
    "InfoNCEFromScoresLoss",
    "InfoNCELoss",
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
]
