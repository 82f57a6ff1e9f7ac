"""A recipe: the numbers of an objective and of what steers it in training."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

from torch import Tensor

from sparse_losses._core.checks import check_choice, check_integer, check_number
from sparse_losses._core.token_ids import TokenIds
from sparse_losses.losses.idf_flops import IdfFlopsLoss
from sparse_losses.losses.language_penalty import LanguagePenaltyLoss
from sparse_losses.losses.self_reconstruction import SelfReconstructionLoss
from sparse_losses.objective.controller import SparsityController
from sparse_losses.objective.objective import LOSSES, SpladeObjective
from sparse_losses.objective.schedules import Curriculum, ReadOnly, TrainingSchedule, Warmup
from sparse_losses.objective.terms import NEEDS
from sparse_losses.vocabulary import idf_penalty, language_penalty

__all__ = ["Preset"]

# The fields that are arguments of a loss. One that is used needs them all.
_KD = {"temperature": "distillation_temperature", "alpha_kl": "alpha_kl", "alpha_mse": "alpha_mse"}
_ARGUMENTS = {
    "info_nce": {
        "temperature": "temperature",
        "similarity": "similarity",
        "symmetric": "symmetric",
    },
    "triplet_margin": {"margin": "margin"},
    "distillation": _KD,
    "context_distillation": _KD,
    "min_activation": {"top_k": "top_k", "threshold": "threshold"},
}


@dataclasses.dataclass(frozen=True)
class Preset:
    """Weights and hyperparameters of a run; change them with ``replace`` and ``without``.

    Fields that are not listed are arguments of the losses, of ``SpladeObjective`` and of
    ``idf_penalty``; ``None`` is their default, or a number that must be set.

    Attributes:
        weights: weights by term, as in ``SpladeObjective``.
        teacher: the source of the teacher's scores: ``"bm25"`` (a ``BM25Teacher``), or the name of
            a model, which the preset does not load.
        idf_alpha: steepness of the token penalties; ``None``: plain FLOPS, without penalties.
        language_penalty: penalty of tokens of other languages.
        curriculum: phases by epoch.
        warmup: by term: the share of all optimiser steps, in (0, 1], in which its weight rises
            from 0 (quadratic ``Warmup``). A term with a target does not warm up.
        target_active: by term (``document_flops`` or ``query_flops``): the active dimensions that a
            ``SparsityController`` aims at, starting from the term's weight.
        training: other known settings of the training loop; this package does not read them.
        ours: fields that the source leaves open, with our reading.

    Examples:
        >>> from sparse_losses import RECOMMENDED
        >>> recipe = RECOMMENDED.replace(temperature=0.5, weights={"query_flops": 0.2})
        >>> objective = recipe.without("distillation").objective()
        >>> objective.weights, objective.info_nce.temperature
        ({'info_nce': 1.0, 'document_flops': 0.1, 'query_flops': 0.2}, 0.5)
        >>> schedule, controller = recipe.schedules(objective, steps=1000)
        >>> schedule.warmups["query_flops"].steps, controller.target_active
        (500, 64)
    """

    name: str
    weights: Mapping[str, float]
    temperature: float | None = None
    similarity: Literal["cosine", "dot"] = "cosine"
    symmetric: bool = False
    margin: float | None = None
    teacher: str | None = None
    score_scale: float | None = None
    teacher_scale: float | None = None
    distillation_temperature: float | None = None
    alpha_kl: float | None = None
    alpha_mse: float | None = None
    beta: float | None = None
    idf_alpha: float | None = None
    special_penalty: float | None = None
    stopword_penalty: float | None = None
    top_k: int | None = None
    threshold: float | None = None
    balanced: bool = False
    language_penalty: float | None = None
    curriculum: Curriculum | None = None
    warmup: Mapping[str, float] = dataclasses.field(default_factory=dict)
    target_active: Mapping[str, float] = dataclasses.field(default_factory=dict)
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ours: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("weights", "warmup", "target_active", "training", "ours"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise TypeError(f"expected `{name}` as a dict by name, got {value!r}")
            object.__setattr__(self, name, ReadOnly(value))
        for name, above in (("weights", -math.inf), ("warmup", 0.0), ("target_active", 0.0)):
            terms = ("document_flops", "query_flops") if name == "target_active" else (*NEEDS,)
            for term, number in getattr(self, name).items():
                check_choice(name, term, terms)
                check_number(f"{name}[{term!r}]", number, minimum=above, exclusive=True)
        if any(share > 1 for share in self.warmup.values()):
            raise ValueError(f"expected `warmup` as shares in (0, 1], got {self.warmup}")

    def replace(self, *, weights: Mapping[str, float] | None = None, **changes: Any) -> "Preset":
        """Return a copy with other numbers; weights replace those of the same names.

        A weight of 0 removes the term, as ``without`` does. Other mappings are replaced as a whole.
        A curriculum's temperature and weights hold over yours, unless you pass ``curriculum=None``.
        """
        numbers = dict(weights or {})
        changed = dataclasses.replace(self, weights={**self.weights, **numbers}, **changes)
        return changed.without(*(term for term, weight in numbers.items() if weight == 0))

    def without(self, *terms: str) -> "Preset":
        """Return a copy in which no weight, phase, warm-up or target names these terms."""
        for term in terms:
            check_choice("terms", term, (*NEEDS,))

        def rest(numbers: Mapping[str, float]) -> dict[str, float]:
            return {term: number for term, number in numbers.items() if term not in terms}

        changes: dict[str, Any] = {
            name: rest(getattr(self, name)) for name in ("weights", "warmup", "target_active")
        }
        if self.curriculum is not None:
            phases = self.curriculum.phases
            phases = [dataclasses.replace(phase, weights=rest(phase.weights)) for phase in phases]
            changes["curriculum"] = dataclasses.replace(self.curriculum, phases=phases)
        return dataclasses.replace(self, **changes)

    def missing(self, passed: Collection[str] = ()) -> list[str]:
        """Return the fields that must be set; none for the losses ``passed`` to ``objective``."""
        losses = [loss for loss in self._losses() if loss not in passed]
        needed = [field for loss in losses for field in _ARGUMENTS.get(loss, {}).values()]
        if "language_penalty" in losses:
            needed.append("language_penalty")
        if self.idf_alpha is not None and "flops" not in passed:
            needed += ["beta", "stopword_penalty"]
        return [name for name in dict.fromkeys(needed) if getattr(self, name) is None]

    def _losses(self) -> list[str]:
        active = (term for term, weight in self.weights.items() if weight)
        return [term.removeprefix("query_").removeprefix("document_") for term in active]

    def objective(
        self,
        *,
        idf: Tensor | None = None,
        special_token_ids: TokenIds = (),
        stopword_ids: TokenIds = (),
        allowed_token_ids: TokenIds | None = None,
        vocab_size: int | None = None,
        hide_stopwords: bool = False,
        **options: Any,
    ) -> SpladeObjective:
        """Return the objective with this preset's numbers; ``RECOMMENDED`` needs no argument.

        Args:
            idf: inverse document frequency ``[V]``; needed with ``idf_alpha``.
            special_token_ids: they get ``special_penalty``, and the losses of tokens ignore them.
            stopword_ids: they get ``stopword_penalty``.
            allowed_token_ids: the tokens of the wanted languages; needed with ``language_penalty``.
            vocab_size: ``V``; needed with ``allowed_token_ids`` if there is no ``idf``.
            hide_stopwords: whether to hide them from InfoNCE and FLOPS, as ``SpladeObjective`` can.
            **options: arguments of ``SpladeObjective`` that replace the preset's.

        Raises:
            ValueError: for a missing number or argument.
        """
        # Numbers are None below only where `missing` lets them be.
        if missing := self.missing([name for name, loss in options.items() if loss is not None]):
            raise ValueError(
                f"expected all numbers of {self.name}, got None for {', '.join(missing)}: set "
                f"{self.name}.replace({', '.join(f'{name}=...' for name in missing)})"
            )
        made: dict[str, Any] = {"special_token_ids": special_token_ids}
        made["stopword_ids"] = stopword_ids if hide_stopwords else ()
        made |= {"score_scale": self.score_scale or 1.0, "teacher_scale": self.teacher_scale}
        made["self_reconstruction"] = SelfReconstructionLoss(
            ignore_token_ids=special_token_ids, balanced=self.balanced
        )
        for loss, fields in _ARGUMENTS.items():
            numbers = {argument: getattr(self, field) for argument, field in fields.items()}
            if None not in numbers.values():
                made[loss] = LOSSES[loss][0](**numbers)
        if self.idf_alpha is not None and "flops" not in options:
            if idf is None:
                raise ValueError(f"{self.name} weighs FLOPS by token and needs `idf` of shape [V]")
            penalty = idf_penalty(
                idf,
                alpha=self.idf_alpha,
                special_token_ids=() if self.special_penalty is None else special_token_ids,
                special_penalty=self.special_penalty or 0.0,
                stopword_ids=stopword_ids,
                stopword_penalty=self.stopword_penalty or 0.0,
            )
            made["flops"] = IdfFlopsLoss(penalty, beta=self.beta or 0.0)
        if "language_penalty" in self._losses() and "language_penalty" not in options:
            size = len(idf) if vocab_size is None and idf is not None else vocab_size
            if allowed_token_ids is None or size is None:
                raise ValueError(
                    f"{self.name} penalises other languages and needs `allowed_token_ids` and "
                    "`vocab_size` (or `idf`)"
                )
            penalty = language_penalty(
                size,
                allowed_token_ids,
                special_token_ids=special_token_ids,
                penalty=self.language_penalty or 0.0,
            )
            made["language_penalty"] = LanguagePenaltyLoss(penalty)
        return SpladeObjective(self.weights, **(made | options))

    def schedules(
        self,
        objective: SpladeObjective,
        *,
        steps: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> list[TrainingSchedule | SparsityController]:
        """Return a ``TrainingSchedule``, then one ``SparsityController`` per target.

        They set the objective's weights in training: ``attach`` each to the optimiser. A warm-up
        needs ``steps``, the optimiser's in the whole training; phases need ``steps_per_epoch``.
        """
        if steps is not None:
            check_integer("steps", steps, minimum=1)
        warmups = {
            term: Warmup(max(1, round(share * (steps or 0))), "quadratic")
            for term, share in self.warmup.items()
            if term not in self.target_active
        }
        if warmups and steps is None:
            names = ", ".join(warmups)
            raise ValueError(
                f"expected `steps` of the whole training, as {names} warms up, got None"
            )
        # First, because a controller keeps the weight it finds: after an error nothing has changed.
        controllers = [
            SparsityController(objective, term, target_active=target)
            for term, target in self.target_active.items()
        ]
        try:
            schedule = TrainingSchedule(
                objective, self.curriculum, warmups=warmups, steps_per_epoch=steps_per_epoch
            )
        except Exception:
            controllers.clear()  # the traceback would keep them, and their terms taken
            raise
        return [schedule, *controllers]

    def __str__(self) -> str:
        """Return one line per number, with `?` for numbers that must be set."""
        missing, rows = self.missing(), []
        for name, value in list(vars(self).items())[1:]:
            if isinstance(value, Mapping):
                rows += [(f"{name}: {key}", number) for key, number in value.items()]
            elif isinstance(value, Curriculum):
                rows += [(f"{name}: {phase}", "") for phase in value.phases]
            elif name in missing or (value is not None and value is not False):
                rows.append((name, "?" if value is None else value))
        lines = [f"  {label:42}{value}".rstrip() for label, value in rows]
        return "\n".join([self.name, *lines])
