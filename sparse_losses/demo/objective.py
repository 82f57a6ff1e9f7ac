"""The demo's training signal: the package's losses, their weights, and a switch for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sparse_losses import (
    FlopsLoss,
    IdfFlopsLoss,
    InfoNCELoss,
    MinActivationLoss,
    PositiveActivationLoss,
    SelfReconstructionLoss,
    idf_penalty,
)
from sparse_losses.demo.switches import SWITCHES
from sparse_losses.demo.tokens import Batch, Tokens


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


class Objective:
    """Weighted terms for a batch of queries and their documents.

    Every regulariser looks at queries and documents alike. What is switched off is not computed.

    Args:
        tokens: which tokens are special or stopwords.
        idf: ``[V]``, of the training documents.
        weights: the numbers.
        without: what to switch off, from ``SWITCHES``. Without ``idf`` every ordinary token costs
            the same, and their sum is what it was; without ``special_penalty`` a special token
            costs what the commonest word does.
        plain_flops: the squared penalty without token weights in place of the weighted one.
    """

    def __init__(
        self,
        tokens: Tokens,
        idf: Tensor,
        weights: Weights,
        without: Sequence[str] = (),
        plain_flops: bool = False,
    ) -> None:
        self.weights = weights
        self.without = frozenset(without)
        if unknown := self.without - set(SWITCHES):
            raise ValueError(f"expected `without` to be of {SWITCHES}, got {sorted(unknown)}")
        special = tokens.special_ids
        self.info_nce = InfoNCELoss(temperature=weights.temperature, symmetric=True)
        self.flops = (
            FlopsLoss()
            if plain_flops
            else IdfFlopsLoss(token_penalty(tokens, idf, weights, self.without))
        )
        self.min_activation = MinActivationLoss()
        self.self_reconstruction = SelfReconstructionLoss(ignore_token_ids=special, balanced=True)
        self.positive_activation = PositiveActivationLoss(ignore_token_ids=special)

    def __call__(
        self,
        query: Tensor,
        document: Tensor,
        query_text: Batch,
        document_text: Batch,
        group_ids: Tensor,
        progress: float,
    ) -> dict[str, Tensor]:
        """Each term times its weight; the sum is what is minimised.

        Args:
            query: activations ``[B, V]``.
            document: activations ``[B, V]``; row ``i`` answers query ``i``.
            query_text: token ids of the queries.
            document_text: token ids of the documents.
            group_ids: ``[B]``, the same number for pairs about things of the same name.
            progress: how much of the training is done, 0 to 1.
        """
        w = self.weights
        sides = ((query, query_text), (document, document_text))
        terms: dict[str, Tensor] = {}
        if "info_nce" not in self.without:
            terms["info_nce"] = w.info_nce * self.info_nce(query, document, positive_ids=group_ids)
        if "flops" not in self.without:
            ramp = min(1.0, progress / w.warmup) ** 2 if w.warmup else 1.0
            if "warmup" in self.without:
                ramp = 1.0
            terms["flops"] = w.flops * ramp * _mean(self.flops(side) for side, _ in sides)
        if "min_activation" not in self.without:
            terms["min_activation"] = w.min_activation * _mean(
                self.min_activation(side, text.counts) for side, text in sides
            )
        if "self_reconstruction" not in self.without:
            terms["self_reconstruction"] = w.self_reconstruction * _mean(
                self.self_reconstruction(side, text.input_ids, text.attention_mask)
                for side, text in sides
            )
        if "positive_activation" not in self.without:
            # Both ways: a query learns the words of its document, a document how it is asked for.
            terms["positive_activation"] = w.positive_activation * _mean(
                self.positive_activation(side, text.input_ids, text.attention_mask)
                for side, text in ((query, document_text), (document, query_text))
            )
        return terms


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


def _mean(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean()
