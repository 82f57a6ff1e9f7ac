"""The parts of a preset that can be switched off."""

from __future__ import annotations

from collections.abc import Collection

from sparse_losses import Preset


def switched_off(preset: Preset, without: Collection[str]) -> Preset:
    """Return the preset without the losses, and the warm-ups, that are in ``without``."""
    preset = preset.without(*(term for term in preset.weights if loss_of(term) in without))
    return preset.replace(warmup={}) if "warmup" in without else preset


def loss_of(term: str) -> str:
    """Return the name of the loss of a term, without the side."""
    return term.removeprefix("query_").removeprefix("document_")
