"""The demo's objective: that of a preset, with a switch for each part."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from sparse_losses import IdfFlopsLoss, Preset, SpladeObjective, idf_penalty
from sparse_losses.demo.tokens import Tokens


def switched_off(preset: Preset, without: Collection[str]) -> Preset:
    """Return the preset without the losses, and the warm-ups, that are in ``without``."""
    preset = preset.without(*(term for term in preset.weights if loss_of(term) in without))
    return preset.replace(warmup={}) if "warmup" in without else preset


def make_objective(
    tokens: Tokens, idf: Tensor, preset: Preset, without: Collection[str] = ()
) -> SpladeObjective:
    """Return the preset's objective; if it has token penalties, with those of ``token_penalty``."""
    flops: dict[str, Any] = {}
    if preset.idf_alpha is not None:
        penalty = token_penalty(tokens, idf, preset, without)
        flops = {"flops": IdfFlopsLoss(penalty, beta=preset.beta or 0.0)}
    return preset.objective(special_token_ids=tokens.special_ids, **flops)


def loss_of(term: str) -> str:
    """Return the name of the loss of a term, without the side."""
    return term.removeprefix("query_").removeprefix("document_")


def token_penalty(tokens: Tokens, idf: Tensor, preset: Preset, without: Collection[str]) -> Tensor:
    """Return the penalty of each token, ``[V]``.

    Without ``idf`` all ordinary tokens have their mean penalty; without ``special_penalty`` a
    special token has the largest penalty of an ordinary one.
    """
    assert preset.idf_alpha is not None
    assert preset.special_penalty is not None
    assert preset.stopword_penalty is not None
    special = list(tokens.special_ids)
    ordinary = torch.ones(len(idf), dtype=torch.bool)
    ordinary[special] = False
    penalty = idf_penalty(idf, alpha=preset.idf_alpha, special_token_ids=special)
    if "idf" in without:
        penalty[ordinary] = penalty[ordinary].mean()
    if "special_penalty" in without:
        penalty[special] = penalty[ordinary].max()
    else:
        penalty[special] = preset.special_penalty
    if "stopword_penalty" not in without:
        penalty[list(tokens.stopword_ids)] *= preset.stopword_penalty
    return penalty.float()
