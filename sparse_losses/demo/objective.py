"""The demo's training signal: an objective, its schedule, and a switch for each part."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch import Tensor

from sparse_losses import (
    IdfFlopsLoss,
    InfoNCELoss,
    SelfReconstructionLoss,
    SpladeObjective,
    TrainingSchedule,
    Warmup,
    idf_penalty,
)
from sparse_losses.demo.options import TERMS
from sparse_losses.demo.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class Weights:
    """What each term counts, and the numbers inside the terms.

    Attributes:
        warmup: share of the training during which the FLOPS weight rises, quadratically.
        idf_alpha: how much cheaper a rare token is than a common one (a factor of e^alpha).
    """

    info_nce: float = 3.0
    flops: float = 0.06
    min_activation: float = 1.0
    self_reconstruction: float = 2.0
    positive_activation: float = 2.0
    temperature: float = 0.05
    warmup: float = 0.5
    idf_alpha: float = 4.0
    special_penalty: float = 100.0
    stopword_penalty: float = 15.0


def make_objective(
    tokens: Tokens, idf: Tensor, weights: Weights, without: Collection[str] = ()
) -> SpladeObjective:
    """Weighted terms for a batch of queries and their documents.

    Every regulariser looks at queries and documents alike, half of its weight each; positive
    activation goes both ways: a query learns the words of its document, a document how it is asked
    for. What is in ``without`` is switched off.
    """
    of_terms: dict[str, float] = {}
    for loss in TERMS:
        weight = getattr(weights, loss)
        if loss == "info_nce":
            of_terms[loss] = weight
        else:
            of_terms |= {f"query_{loss}": weight / 2, f"document_{loss}": weight / 2}
    return SpladeObjective(
        {term: weight for term, weight in of_terms.items() if loss_of(term) not in without},
        info_nce=InfoNCELoss(temperature=weights.temperature, symmetric=True),
        flops=IdfFlopsLoss(token_penalty(tokens, idf, weights, without)),
        self_reconstruction=SelfReconstructionLoss(
            ignore_token_ids=tokens.special_ids, balanced=True
        ),
        special_token_ids=tokens.special_ids,
    )


def loss_of(term: str) -> str:
    """The loss that a term takes for one of the sides."""
    return term.removeprefix("query_").removeprefix("document_")


def token_penalty(
    tokens: Tokens, idf: Tensor, weights: Weights, without: Collection[str]
) -> Tensor:
    """What an activation of each token costs, ``[V]``.

    Without ``idf`` every ordinary token costs the same, and their sum is what it was; without
    ``special_penalty`` a special token costs what the commonest word does.
    """
    special = list(tokens.special_ids)
    ordinary = torch.ones(len(idf), dtype=torch.bool)
    ordinary[special] = False
    penalty = idf_penalty(idf, alpha=weights.idf_alpha, special_token_ids=special)
    if "idf" in without:
        penalty[ordinary] = penalty[ordinary].mean()
    if "special_penalty" in without:
        penalty[special] = penalty[ordinary].max()
    else:
        penalty[special] = weights.special_penalty
    if "stopword_penalty" not in without:
        penalty[list(tokens.stopword_ids)] *= weights.stopword_penalty
    return penalty.float()


def make_schedule(
    objective: SpladeObjective,
    weights: Weights,
    without: Collection[str],
    steps: int,
    steered: Collection[str] = (),
) -> TrainingSchedule:
    """FLOPS warms up on both sides, but for terms that a controller steers."""
    rise = round(weights.warmup * steps)
    warmups = {}
    if rise and "warmup" not in without:
        flops = [term for term in objective.weights if loss_of(term) == "flops"]
        warmups = {term: Warmup(rise, "quadratic") for term in flops if term not in steered}
    return TrainingSchedule(objective, warmups=warmups)
