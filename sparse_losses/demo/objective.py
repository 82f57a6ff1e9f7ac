"""The demo's training signal: an objective, its schedule, and a switch for each part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_losses import (
    FlopsLoss,
    IdfFlopsLoss,
    InfoNCELoss,
    SelfReconstructionLoss,
    SpladeObjective,
    TrainingSchedule,
    Warmup,
    idf_penalty,
)
from sparse_losses.demo.switches import SWITCHES
from sparse_losses.demo.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class Weights:
    """What each term counts, and the numbers inside the terms.

    Attributes:
        warmup: share of the training during which the FLOPS weight rises, quadratically.
        idf_alpha: how much cheaper a rare token is than a common one (a factor of e^alpha).
        penalty_floor: the least a token costs, so that rare ones do not become free codes.
    """

    info_nce: float = 3.0
    flops: float = 0.06
    min_activation: float = 1.0
    self_reconstruction: float = 2.0
    positive_activation: float = 2.0
    temperature: float = 0.05
    warmup: float = 0.5
    idf_alpha: float = 4.0
    penalty_floor: float = 0.0
    special_penalty: float = 100.0
    stopword_penalty: float = 15.0


def make_objective(
    tokens: Tokens,
    idf: Tensor,
    weights: Weights,
    without: Sequence[str] = (),
    plain_flops: bool = False,
) -> SpladeObjective:
    """Weighted terms for a batch of queries and their documents.

    Every regulariser looks at queries and documents alike, half of its weight each; positive
    activation goes both ways: a query learns the words of its document, a document how it is asked
    for.

    Args:
        tokens: which tokens are special or stopwords.
        idf: ``[V]``, of the training documents.
        weights: the numbers.
        without: what to switch off, from ``SWITCHES``. Without ``idf`` every ordinary token costs
            the same, and their sum is what it was; without ``special_penalty`` a special token
            costs what the commonest word does.
        plain_flops: the squared penalty without token weights in place of the weighted one.
    """
    if unknown := set(without) - set(SWITCHES):
        raise ValueError(f"expected `without` to be of {SWITCHES}, got {sorted(unknown)}")
    of_terms = {"info_nce": weights.info_nce}
    for name in ("flops", "min_activation", "self_reconstruction", "positive_activation"):
        for side in ("query", "document"):
            of_terms[f"{side}_{name}"] = getattr(weights, name) / 2
    penalty = token_penalty(tokens, idf, weights, frozenset(without))
    return SpladeObjective(
        {name: weight for name, weight in of_terms.items() if loss_of(name) not in without},
        info_nce=InfoNCELoss(temperature=weights.temperature, symmetric=True),
        flops=FlopsLoss() if plain_flops else IdfFlopsLoss(penalty),
        self_reconstruction=SelfReconstructionLoss(
            ignore_token_ids=tokens.special_ids, balanced=True
        ),
        special_token_ids=tokens.special_ids,
    )


def make_schedule(
    objective: SpladeObjective,
    weights: Weights,
    without: Sequence[str],
    steps: int,
    steered: Sequence[str] = (),
) -> TrainingSchedule:
    """FLOPS warms up on both sides, but for terms that a controller steers."""
    rise = round(weights.warmup * steps)
    flops = [name for name in objective.weights if loss_of(name) == "flops"]
    names = [name for name in flops if name not in steered]
    if rise == 0 or "warmup" in without:
        names = []
    return TrainingSchedule(objective, warmups={name: Warmup(rise, "quadratic") for name in names})


def loss_of(term: str) -> str:
    """The loss that a term takes for one of the sides."""
    return term.removeprefix("query_").removeprefix("document_")


def token_penalty(tokens: Tokens, idf: Tensor, weights: Weights, without: frozenset[str]) -> Tensor:
    """What an activation of each token costs, ``[V]``, with the ingredients that are left."""
    special = tokens.special_ids
    ordinary = torch.ones(len(idf), dtype=torch.bool)
    ordinary[list(special)] = False
    base = idf_penalty(
        idf, alpha=weights.idf_alpha, special_token_ids=special, minimum=weights.penalty_floor
    )
    if "idf" in without:
        base[ordinary] = base[ordinary].mean()
    if "special_penalty" in without:
        base[list(special)] = base[ordinary].max()
    else:
        base[list(special)] = weights.special_penalty
    if "stopword_penalty" not in without:
        base[list(tokens.stopword_ids)] *= weights.stopword_penalty
    return base.float()
