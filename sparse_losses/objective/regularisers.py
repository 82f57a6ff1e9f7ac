"""The losses of one text at a time, all of a side's at once where a kernel can."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparse_losses._core.fused import fuse
from sparse_losses._core.token_ids import as_mask, attended_ids, id_mask
from sparse_losses.distributed import num_ranks
from sparse_losses.kernels import uses_triton
from sparse_losses.losses import (
    FlopsLoss,
    IdfFlopsLoss,
    LanguagePenaltyLoss,
    MinActivationLoss,
    SelfReconstructionLoss,
)
from sparse_losses.objective.batch import Texts

__all__ = ["ON_TEXTS", "Regularisers", "token_counts"]

# In the order in which the kernel gives them.
ON_TEXTS = ("flops", "min_activation", "language_penalty", "self_reconstruction")
OURS = (FlopsLoss, IdfFlopsLoss, MinActivationLoss, LanguagePenaltyLoss, SelfReconstructionLoss)
# Above these the kernel for the largest activations of a row would run out of registers.
LARGEST_TOP_K = 32
LARGEST_VOCABULARY = 1 << 19
OF_SIGNED = ("min_activation", "self_reconstruction")  # of the logits, where there are some


@dataclass(frozen=True)
class Regularisers:
    """What the texts of one side are asked for: the active losses, their weights and inputs."""

    losses: Mapping[str, nn.Module]
    weights: Mapping[str, float | Tensor]
    texts: Texts
    special_token_ids: Tensor  # what minimum activation does not count
    hidden_ids: Tensor  # what FLOPS does not see

    def are_for(self, impl: str) -> bool:
        """Whether the kernel takes these losses of these texts, where ``impl`` is asked for.

        Raises:
            ValueError: if the kernel is asked for and cannot run.
        """
        x = self.texts.activations
        if not self.losses or not self._would_be_accepted():
            return False  # a loss that raises says best why
        weights = [weight for weight in self.weights.values() if isinstance(weight, Tensor)]
        top_k = getattr(self.losses.get("min_activation"), "top_k", 1)
        return uses_triton(
            "regularisers",
            impl,
            *self._vectors(),
            elements=x.numel(),
            needs={
                "the losses of this package, without hooks,": all(
                    _is_plain(loss) for loss in self.losses.values()
                ),
                "penalties that need no gradient": not any(
                    penalty.requires_grad for penalty in self._penalties()
                ),
                "`gather=False`, or a single rank,": num_ranks() == 1
                or not any(getattr(loss, "gather", False) for loss in self.losses.values()),
                "weights in fp32, on the device of the texts,": all(
                    weight.dtype != torch.float64 and weight.device == x.device
                    for weight in weights
                ),
                f"`top_k` of at most {LARGEST_TOP_K}": top_k <= LARGEST_TOP_K,
                f"1 to {LARGEST_VOCABULARY} tokens and at least one text": (
                    x.numel() > 0 and x.shape[1] <= LARGEST_VOCABULARY
                ),
            },
        )

    def _would_be_accepted(self) -> bool:
        rows, width = self.texts.activations.shape
        for penalty in self._penalties():
            if penalty.shape != (width,) or penalty.device != self.texts.activations.device:
                return False
        for loss in self.losses.values():
            if getattr(loss, "reduction", "mean") not in ("mean", "sum"):
                return False
            if isinstance(loss, MinActivationLoss) and not 1 <= loss.top_k <= width:
                return False
            if getattr(loss, "estimator", "biased") != "biased" and rows < 2:
                return False
        return all(x.is_floating_point() for x in self._vectors())

    def _penalties(self) -> list[Tensor]:
        found = (getattr(loss, "token_penalty", None) for loss in self.losses.values())
        return [penalty for penalty in found if isinstance(penalty, Tensor)]

    def _vectors(self) -> list[Tensor]:
        activations, _, _, logits = self.texts
        signed = logits is not None and any(name in OF_SIGNED for name in self.losses)
        return [activations] if not signed or logits is None else [activations, logits]

    def weighted_sums(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Sums of weighted terms, one of each tensor that is read; every term without a graph."""
        activations, _, _, logits = self.texts
        names: list[list[str]] = [[], []]
        for name in self.losses:
            names[logits is not None and name in OF_SIGNED].append(name)
        sums: list[Tensor] = []
        terms: dict[str, Tensor] = {}
        for x, of_x in zip((activations, logits), names, strict=True):
            if x is not None and of_x:
                total, found = self._weighted_sum(x, of_x)
                sums.append(total)
                terms |= found
        return sums, {name: terms[name] for name in self.losses}

    def _weighted_sum(self, x: Tensor, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        from sparse_losses.kernels._operators import scale_
        from sparse_losses.kernels.regularisers import regularisers

        weights = {name: self.weights[name] for name in names}
        factors = None
        if torch.compiler.is_compiling():
            # An operator's number is a constant of the graph, which a schedule would compile anew.
            weights = {
                name: weight
                if isinstance(weight, Tensor)
                else weight * x.new_ones((), dtype=torch.float32)
                for name, weight in weights.items()
            }
        if any(isinstance(weight, Tensor) for weight in weights.values()):
            one = x.new_ones((), dtype=torch.float32)
            each = [weights.get(name) for name in ON_TEXTS]
            factors = torch.stack([w.float() if isinstance(w, Tensor) else one for w in each])
        of_all = [weights.get(name, 0.0) for name in ON_TEXTS]
        numbers = [1.0 if isinstance(weight, Tensor) else float(weight) for weight in of_all]
        reductions = [getattr(self.losses.get(name), "reduction", "mean") for name in ON_TEXTS]
        options = self._options(x, names)
        terms: list[Tensor] = []

        def fused(
            needs: Sequence[bool], x: Tensor, factors: Tensor | None
        ) -> tuple[Tensor, list[Tensor | None]]:
            total, gradients, terms[:] = regularisers(
                needs,
                x,
                factors,
                weights=numbers,
                is_sum=[reduction == "sum" for reduction in reductions],
                **options,
            )
            return total, gradients

        def plain(x: Tensor, factors: Tensor | None) -> Tensor:
            total = x.new_zeros((), dtype=torch.float32)
            for index, name in enumerate(ON_TEXTS):
                if name in names:
                    weight = numbers[index] if factors is None else numbers[index] * factors[index]
                    total = total + weight * self._value(name, x)
            return total

        total = fuse(plain, fused, x, factors, scale_=scale_)
        return total, {name: terms[ON_TEXTS.index(name)] for name in names}

    def _options(self, x: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """What the kernel is told of the losses ``names``."""
        options: dict[str, Any] = {}
        width = x.shape[1]
        for loss in (self.losses[name] for name in names):
            if isinstance(loss, FlopsLoss | IdfFlopsLoss):
                options["unbiased"] = loss.estimator == "unbiased"
                options["hidden"] = id_mask("stopword_ids", self.hidden_ids, width, x.device)
                if isinstance(loss, IdfFlopsLoss):
                    options |= {"idf": loss.token_penalty, "beta": float(loss.beta)}
            elif isinstance(loss, MinActivationLoss):
                options |= {"top_k": loss.top_k, "threshold": float(loss.threshold)}
                options["counts"] = self._token_counts()
            elif isinstance(loss, LanguagePenaltyLoss):
                options["price"] = loss.token_penalty
            elif isinstance(loss, SelfReconstructionLoss):
                _, input_ids, attention_mask, _ = self.texts
                assert input_ids is not None
                assert attention_mask is not None
                attended = as_mask("attention_mask", attention_mask)
                options["ids"] = attended_ids("input_ids", input_ids, attended, width)
                options["ignored"] = id_mask(
                    "ignore_token_ids", loss.ignore_token_ids, width, x.device
                )
                options |= {"attended": attended, "balanced": loss.balanced}
        return options

    def _value(self, name: str, x: Tensor) -> Tensor:
        """One of the losses, by its module, of activations or logits."""
        _, input_ids, attention_mask, _ = self.texts
        loss = self.losses[name]
        if name == "flops" and len(self.hidden_ids):
            x = x.index_fill(-1, self.hidden_ids, 0.0)
        more = {
            "min_activation": (self._token_counts(),),
            "self_reconstruction": (input_ids, attention_mask),
        }
        value: Tensor = loss(x, *more.get(name, ()))
        return value

    def _token_counts(self) -> Tensor | None:
        _, input_ids, attention_mask, _ = self.texts
        return token_counts(input_ids, attention_mask, self.special_token_ids)


def token_counts(ids: Tensor | None, mask: Tensor | None, special_ids: Tensor) -> Tensor | None:
    """Attended tokens of each text, the special ones not counted where ids are known."""
    if mask is None:
        return None
    attended = as_mask("attention_mask", mask)
    if ids is not None and len(special_ids):
        attended = attended & ~torch.isin(ids, special_ids)
    return attended.sum(-1)


def _is_plain(loss: nn.Module) -> bool:
    """Whether calling it is calling its function: a subclass or a hook may do something else."""
    return type(loss) in OURS and not (loss._forward_hooks or loss._forward_pre_hooks)
