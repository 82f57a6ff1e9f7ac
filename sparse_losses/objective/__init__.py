"""A training run with many losses: objective, schedules, sparsity control, diagnostics."""

from sparse_losses.objective.advice import Finding, advise
from sparse_losses.objective.batch import SpladeBatch, Texts
from sparse_losses.objective.controller import CollapseError, SparsityController
from sparse_losses.objective.diagnostics import Diagnostics, Report
from sparse_losses.objective.gradient_report import GradientReport, gradient_report
from sparse_losses.objective.objective import ObjectiveOutput, SpladeObjective
from sparse_losses.objective.schedules import Curriculum, Phase, TrainingSchedule, Warmup
from sparse_losses.objective.teacher import BM25Teacher

__all__ = [
    "BM25Teacher",
    "CollapseError",
    "Curriculum",
    "Diagnostics",
    "Finding",
    "GradientReport",
    "ObjectiveOutput",
    "Phase",
    "Report",
    "SparsityController",
    "SpladeBatch",
    "SpladeObjective",
    "Texts",
    "TrainingSchedule",
    "Warmup",
    "advise",
    "gradient_report",
]
