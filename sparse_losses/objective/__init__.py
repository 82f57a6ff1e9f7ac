"""Many losses, one training run: objective, presets, schedules, sparsity, diagnostics."""

from sparse_losses.objective.advice import Finding, advise
from sparse_losses.objective.batch import SpladeBatch, Texts
from sparse_losses.objective.caching import cached_backward
from sparse_losses.objective.controller import CollapseError, SparsityController
from sparse_losses.objective.diagnostics import (
    Diagnostics,
    GradientReport,
    Report,
    context_overlap,
    gradient_report,
    recall_at_k,
)
from sparse_losses.objective.objective import ObjectiveOutput, SpladeObjective
from sparse_losses.objective.presets import V22, V23, V25, V26, V28, Preset
from sparse_losses.objective.schedules import Curriculum, Phase, TrainingSchedule, Warmup

__all__ = [
    "V22",
    "V23",
    "V25",
    "V26",
    "V28",
    "CollapseError",
    "Curriculum",
    "Diagnostics",
    "Finding",
    "GradientReport",
    "ObjectiveOutput",
    "Phase",
    "Preset",
    "Report",
    "SparsityController",
    "SpladeBatch",
    "SpladeObjective",
    "Texts",
    "TrainingSchedule",
    "Warmup",
    "advise",
    "cached_backward",
    "context_overlap",
    "gradient_report",
    "recall_at_k",
]
