"""Modules and functions that turn hidden states into sparse vectors."""

from sparse_losses.representation.calibration import calibrate, calibrate_threshold
from sparse_losses.representation.encoder import SpladeEncoder
from sparse_losses.representation.gate import ContextGate
from sparse_losses.representation.head import SpladeHead, splade_head
from sparse_losses.representation.pooling import splade_pool, token_weights
from sparse_losses.representation.static import StaticQueryEncoder

__all__ = [
    "ContextGate",
    "SpladeEncoder",
    "SpladeHead",
    "StaticQueryEncoder",
    "calibrate",
    "calibrate_threshold",
    "splade_head",
    "splade_pool",
    "token_weights",
]
