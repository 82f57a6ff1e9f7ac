"""The settings of complete training runs, as data.

``RECOMMENDED`` is the recipe to start with; it ranks by dot products. ``COSINE`` ranks by cosines
and has all losses of plain pairs, so that each can be switched off.
V22 to V28 are versions of a Korean neural sparse retriever: V22 to V26 come from its notes on loss
functions, V28 from the notes on that experiment. A number that the notes do not give is ``None``
here and must be set before use.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

from torch import Tensor

from sparse_losses._core.checks import check_choice, check_integer, check_number
from sparse_losses._core.token_ids import TokenIds
from sparse_losses.losses import (
    DistillationLoss,
    FlopsLoss,
    IdfFlopsLoss,
    InfoNCELoss,
    LanguagePenaltyLoss,
    MinActivationLoss,
    SelfReconstructionLoss,
    TripletMarginLoss,
)
from sparse_losses.objective.controller import SparsityController
from sparse_losses.objective.objective import NEEDS, SpladeObjective
from sparse_losses.objective.schedules import (
    Curriculum,
    Phase,
    ReadOnly,
    TrainingSchedule,
    Warmup,
)
from sparse_losses.vocabulary import idf_penalty, language_penalty

__all__ = ["COSINE", "RECOMMENDED", "V22", "V23", "V25", "V26", "V28", "Preset"]

# The fields that must be set for each loss.
_NUMBERS = {
    "info_nce": ("temperature",),
    "triplet_margin": ("margin",),
    "distillation": ("distillation_temperature", "alpha_kl", "alpha_mse"),
    "context_distillation": ("distillation_temperature", "alpha_kl", "alpha_mse"),
    "min_activation": ("top_k", "threshold"),
    "language_penalty": ("language_penalty",),
}

# The fields that are dicts, for the message of an error.
_EXAMPLES = {
    "weights": {"document_flops": 0.1},
    "warmup": {"document_flops": 0.5},
    "target_active": {"document_flops": 64},
    "training": {"batch_size": 32},
    "ours": {"sides": "..."},
}


@dataclasses.dataclass(frozen=True)
class Preset:
    """Weights and hyperparameters of a run; change them with ``replace`` and ``without``.

    Attributes:
        name: the preset's name.
        weights: weights by the names of the terms, as in ``SpladeObjective``.
        temperature: temperature of InfoNCE.
        similarity: similarity of InfoNCE and of the scores in distillation.
        symmetric: whether InfoNCE also compares every positive with all anchors.
        margin: margin of the triplet loss.
        teacher: the source of the teacher's scores: ``"bm25"`` (a ``BM25Teacher``), or the name of
            a model, which the preset does not load.
        score_scale: factor on the student's scores in distillation; ``None``: 1.
        teacher_scale: factor on the teacher's scores; ``None``: the same as ``score_scale``.
        distillation_temperature: temperature $T$ of distillation.
        alpha_kl: weight of the KL divergence in distillation.
        alpha_mse: weight of the z-score MSE in distillation.
        beta: share of the squares in IDF-FLOPS.
        idf_alpha: steepness of the token penalties; ``None``: plain FLOPS, without penalties.
        special_penalty: penalty of special tokens; ``None``: that of other tokens.
        stopword_penalty: factor on the penalty of stopwords.
        top_k: number of largest activations whose mean enters minimum activation.
        threshold: value that minimum activation requires of this mean.
        balanced: whether self-reconstruction gives the tokens of a text half of its value.
        language_penalty: penalty of tokens of other languages.
        curriculum: phases by epoch.
        warmup: by term: the share of all optimiser steps, in (0, 1], in which its weight rises
            from 0 (quadratic ``Warmup``). A term with a target does not warm up.
        target_active: by term (``document_flops`` or ``query_flops``): the active dimensions that a
            ``SparsityController`` aims at, starting from the term's weight.
        training: other known settings of the training loop; this package does not read them.
        ours: fields that the source leaves open, with our reading.

    Examples:
        >>> import torch
        >>> from sparse_losses import V26
        >>> objective = V26.objective(idf=torch.rand(100), special_token_ids=[0, 1])
        >>> objective.weights["info_nce"], objective.info_nce.temperature
        (3.0, 0.07)
        >>> print(V26)  # doctest: +ELLIPSIS
        V26
          weight of info_nce                      3
        ...
          1 to 8: temperature 0.08, info_nce 2.5, distillation 2.5
        ...
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
        for name, example in _EXAMPLES.items():
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                raise TypeError(f"expected `{name}` as a dict such as {example}, got {given!r}")
            object.__setattr__(self, name, ReadOnly(given))
        for term, weight in self.weights.items():
            check_choice("weights", term, list(NEEDS))
            check_number(f"weights[{term!r}]", weight)
        terms = {"warmup": list(NEEDS), "target_active": ["document_flops", "query_flops"]}
        for name, known in terms.items():
            for term, number in getattr(self, name).items():
                check_choice(name, term, known)
                check_number(f"{name}[{term!r}]", number, minimum=0.0, exclusive=True)
        if late := {term: share for term, share in self.warmup.items() if share > 1}:
            raise ValueError(f"expected `warmup` as shares in (0, 1], got {late}")
        phases = () if self.curriculum is None else self.curriculum.phases
        if both := [term for term in self.target_active if any(term in p.weights for p in phases)]:
            raise ValueError(
                "expected each weight to be set by a phase or by a controller, got a phase and a "
                f"`target_active` for {', '.join(both)}"
            )

    def replace(self, *, weights: Mapping[str, float] | None = None, **changes: Any) -> "Preset":
        """Return a copy with other numbers; the given weights replace those of the same names.

        If the preset has a curriculum, its phases override temperature and weights: also pass
        ``curriculum=None``, or a curriculum of your own, to train with your numbers. A weight of
        0 removes the term, as ``without`` does. Other mappings (``warmup``, ``target_active``)
        are replaced as a whole.

        Examples:
            >>> from sparse_losses import V26
            >>> ours = V26.replace(weights={"document_flops": 0.01})
            >>> ours.weights["document_flops"], ours.weights["info_nce"]
            (0.01, 3.0)
        """
        given = dict(weights or {})
        for name in given:
            check_choice("weights", name, list(NEEDS))
        changed = dataclasses.replace(self, weights={**self.weights, **given}, **changes)
        off = [name for name, weight in given.items() if weight == 0]
        return changed.without(*off) if off else changed

    def without(self, *terms: str) -> "Preset":
        """Return a copy without these terms: no weight, phase, warm-up or target names them.

        Its objective lacks them too, and a schedule does not start a term that the objective lacks,
        whatever its curriculum.

        Examples:
            >>> from sparse_losses import V26
            >>> alone = V26.without("distillation")  # no teacher
            >>> "distillation" in alone.weights, alone.curriculum.at(1).weights
            (False, {'info_nce': 2.5})
        """
        for term in terms:
            check_choice("terms", term, list(NEEDS))

        def rest(numbers: Mapping[str, float]) -> dict[str, float]:
            return {name: number for name, number in numbers.items() if name not in terms}

        curriculum = self.curriculum
        if curriculum is not None:
            phases = [
                dataclasses.replace(phase, weights=rest(phase.weights))
                for phase in curriculum.phases
            ]
            curriculum = dataclasses.replace(curriculum, phases=phases)
        return dataclasses.replace(
            self,
            weights=rest(self.weights),
            curriculum=curriculum,
            warmup=rest(self.warmup),
            target_active=rest(self.target_active),
        )

    def missing(self) -> list[str]:
        """Return the fields that an active term needs and that are not set.

        Examples:
            >>> from sparse_losses import V22
            >>> V22.missing()
            ['temperature', 'margin', 'top_k', 'threshold']
        """
        return self._missing(())

    def _missing(self, passed: Collection[str]) -> list[str]:
        """Return the missing fields of the losses that are not passed to ``objective``."""
        needed: dict[str, None] = {}
        for loss in self._losses():
            if loss not in passed:
                needed |= dict.fromkeys(_NUMBERS.get(loss, ()))
        if self.idf_alpha is not None and "flops" not in passed:
            needed |= dict.fromkeys(("beta", "stopword_penalty"))
        return [name for name in needed if getattr(self, name) is None]

    def _losses(self) -> list[str]:
        """Return the losses of the terms whose weight is not 0."""
        terms = [term for term, weight in self.weights.items() if weight]
        return [term.removeprefix("query_").removeprefix("document_") for term in terms]

    def objective(
        self,
        *,
        idf: Tensor | None = None,
        special_token_ids: TokenIds = (),
        stopword_ids: TokenIds = (),
        allowed_token_ids: TokenIds | None = None,
        vocab_size: int | None = None,
        hide_stopwords: bool = False,
        **losses: Any,
    ) -> SpladeObjective:
        """Return the objective with this preset's numbers.

        ``RECOMMENDED`` needs no argument: it has no token penalties and no losses of tokens, so
        ``idf``, ``special_token_ids`` and ``stopword_ids`` change nothing there (``stopword_ids``
        only with ``hide_stopwords``).

        Args:
            idf: inverse document frequency ``[V]``; needed with ``idf_alpha``.
            special_token_ids: the tokens that get ``special_penalty``; also passed to
                ``SpladeObjective``, whose token losses ignore them.
            stopword_ids: the tokens that get ``stopword_penalty``.
            allowed_token_ids: the tokens of the wanted languages; needed with ``language_penalty``.
            vocab_size: ``V``; needed with ``allowed_token_ids`` if there is no ``idf``.
            hide_stopwords: whether to hide the stopwords from InfoNCE and FLOPS, as
                ``SpladeObjective(stopword_ids=...)`` does.
            **losses: arguments of ``SpladeObjective`` that replace the preset's: ``flops``,
                ``score_scale``, ``gather``, ...

        Raises:
            ValueError: for a missing number or argument.
        """
        if missing := self._missing([name for name, loss in losses.items() if loss is not None]):
            raise ValueError(
                f"expected all numbers of {self.name}, got None for {', '.join(missing)}: set "
                f"{self.name}.replace({', '.join(f'{name}=...' for name in missing)})"
            )
        made: dict[str, Any] = {}
        if self.temperature is not None:
            made["info_nce"] = InfoNCELoss(
                temperature=self.temperature, similarity=self.similarity, symmetric=self.symmetric
            )
        if self.margin is not None:
            made["triplet_margin"] = TripletMarginLoss(margin=self.margin)
        t, kl, mse = self.distillation_temperature, self.alpha_kl, self.alpha_mse
        if t is not None and kl is not None and mse is not None:
            for name in ("distillation", "context_distillation"):
                made[name] = DistillationLoss(temperature=t, alpha_kl=kl, alpha_mse=mse)
        if self.top_k is not None and self.threshold is not None:
            made["min_activation"] = MinActivationLoss(top_k=self.top_k, threshold=self.threshold)
        for name in ("score_scale", "teacher_scale"):
            if getattr(self, name) is not None:
                made[name] = getattr(self, name)
        if self.balanced:
            made["self_reconstruction"] = SelfReconstructionLoss(
                ignore_token_ids=special_token_ids, balanced=True
            )
        if "flops" not in losses:
            made["flops"] = self._flops(idf, special_token_ids, stopword_ids)
        penalises = "language_penalty" in self._losses() and "language_penalty" not in losses
        if self.language_penalty is not None and penalises:
            if vocab_size is None and idf is not None:
                vocab_size = idf.shape[0]
            if allowed_token_ids is None or vocab_size is None:
                raise ValueError(
                    f"{self.name} penalises other languages and needs `allowed_token_ids` and "
                    "`vocab_size` (or `idf`)"
                )
            check_integer("vocab_size", vocab_size, minimum=1)
            made["language_penalty"] = LanguagePenaltyLoss(
                language_penalty(
                    vocab_size,
                    allowed_token_ids,
                    special_token_ids=special_token_ids,
                    penalty=self.language_penalty,
                )
            )
        made["special_token_ids"] = special_token_ids
        if hide_stopwords:
            made["stopword_ids"] = stopword_ids
        return SpladeObjective(self.weights, **(made | losses))

    def _flops(
        self, idf: Tensor | None, special_token_ids: TokenIds, stopword_ids: TokenIds
    ) -> FlopsLoss | IdfFlopsLoss:
        if self.idf_alpha is None:
            return FlopsLoss()
        if idf is None:
            raise ValueError(f"{self.name} weighs FLOPS by token and needs `idf` of shape [V]")
        assert self.beta is not None
        assert self.stopword_penalty is not None
        special: dict[str, Any] = {}
        if self.special_penalty is not None:
            special = {
                "special_token_ids": special_token_ids,
                "special_penalty": self.special_penalty,
            }
        penalty = idf_penalty(
            idf,
            alpha=self.idf_alpha,
            stopword_ids=stopword_ids,
            stopword_penalty=self.stopword_penalty,
            **special,
        )
        return IdfFlopsLoss(penalty, beta=self.beta)

    def schedules(
        self,
        objective: SpladeObjective,
        *,
        steps: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> list[TrainingSchedule | SparsityController]:
        """Return what sets the objective's weights in training; ``attach`` each to the optimiser.

        The list holds a ``TrainingSchedule`` with the phases and warm-ups, then one
        ``SparsityController`` per target.

        Args:
            objective: the objective of this preset.
            steps: optimiser steps of the whole training; needed if a term warms up.
            steps_per_epoch: optimiser steps of an epoch; needed if there are phases.

        Raises:
            ValueError: for a missing or wrong number of steps, or a term that the objective lacks.

        Examples:
            >>> from sparse_losses import RECOMMENDED
            >>> objective = RECOMMENDED.objective()
            >>> schedule, controller = RECOMMENDED.schedules(objective, steps=1000)
            >>> schedule.warmups
            {'query_flops': Warmup(steps=500, shape='quadratic')}
            >>> controller.term, controller.target_active
            ('document_flops', 64)
        """
        rising = {
            term: share for term, share in self.warmup.items() if term not in self.target_active
        }
        if rising and steps is None:
            raise ValueError(
                f"expected `steps` of the whole training for the warm-up of {', '.join(rising)}, "
                "got None"
            )
        if steps is not None:
            check_integer("steps", steps, minimum=1)
        warmups = {
            term: Warmup(max(1, round(share * (steps or 0))), "quadratic")
            for term, share in rising.items()
        }
        # First, because a controller keeps the weight it finds: after an error nothing has changed.
        controllers = [
            SparsityController(objective, term, target_active=target)
            for term, target in self.target_active.items()
        ]
        schedule = TrainingSchedule(
            objective, self.curriculum, warmups=warmups, steps_per_epoch=steps_per_epoch
        )
        return [schedule, *controllers]

    def __str__(self) -> str:
        """Return one line per number, with `?` for numbers that must be set."""
        missing = self.missing()
        lines = [self.name]
        lines += [f"  weight of {name:30}{weight:g}" for name, weight in self.weights.items()]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if isinstance(value, (Mapping, Curriculum)):
                continue
            if (value is not None and value is not False) or field.name in missing:
                shown = "?" if value is None else f"{value:g}" if _is_number(value) else value
                lines.append(f"  {field.name:40}{shown}")
        if self.curriculum is not None:
            lines += [f"  {phase}" for phase in self.curriculum.phases]
        lines += [
            f"  {f'{label} of {term}':40}{number:g}"
            for label, numbers in (("warmup", self.warmup), ("target active", self.target_active))
            for term, number in numbers.items()
        ]
        lines += [f"  {name:40}{value}" for name, value in self.training.items()]
        lines += [f"  ours: {name}: {reading}" for name, reading in self.ours.items()]
        return "\n".join(lines)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Every number is one line, with its reason. Figures are nDCG@10 on the docstrings and on Debian's
# packages, of validation queries at target 64 and of one seed where nothing else is said:
# docs/results/recipe.csv.
RECOMMENDED = Preset(
    name="RECOMMENDED",
    weights={
        "info_nce": 1.0,  # the scale of all others
        "distillation": 3.0,  # 1: -.006 and -.006; 6: -.005 and -.001
        "document_flops": 0.1,  # where the controller starts
        "query_flops": 0.1,  # 0.3: +.001 and -.003
    },
    temperature=1.0,  # the encoder learns the scale of dot products
    similarity="dot",  # COSINE: -.028 and -.010, means of three seeds
    teacher="bm25",  # no model: it reads the token ids of the batch
    distillation_temperature=1.0,  # unused: the KL is off
    alpha_kl=0.0,  # the KL in place of the z-scores, weight 1: -.006 and -.014
    alpha_mse=1.0,  # z-scores need no scale
    # A retriever learns to rank before it learns to be sparse. The documents' weight warms up only
    # where no controller steers it.
    warmup={"query_flops": 0.5, "document_flops": 0.5},
    # Documents at 32: -.010 and -.004, means of three seeds. With a second target of 24 for the
    # queries: +.002 and -.014; without the teacher +.005 and +.001, means of three seeds.
    target_active={"document_flops": 64},
)

# docs/demo.md has an ablation of these losses.
COSINE = Preset(
    name="COSINE",
    weights={
        "info_nce": 1.0,
        "distillation": 1.0,
        "document_flops": 0.03,  # where the controller starts
        "query_flops": 0.03,
        "query_self_reconstruction": 1.0,  # the token terms keep a text's own words active
        "document_self_reconstruction": 1.0,
        "query_positive_activation": 1.0,
        "document_positive_activation": 1.0,
        "query_min_activation": 0.5,
        "document_min_activation": 0.5,
    },
    temperature=0.05,
    symmetric=True,  # a document is compared with all queries of the batch, too
    teacher="bm25",
    score_scale=20.0,  # 1 / temperature: cosines are too flat for a softmax
    teacher_scale=0.5,  # BM25 scores are too steep for one
    distillation_temperature=1.0,  # the two scales replace it
    alpha_kl=1.0,  # BM25's order and margins,
    alpha_mse=0.0,  # not its z-scores
    beta=0.3,  # IdfFlopsLoss's default
    idf_alpha=4.0,  # a rare token costs e^-4 of a common one
    special_penalty=100.0,  # special tokens mean nothing in a search
    stopword_penalty=15.0,  # V26's
    top_k=5,  # a text keeps five tokens at least
    threshold=0.5,
    balanced=True,  # so that a long text's many silent tokens do not outweigh its own
    warmup={"query_flops": 0.5, "document_flops": 0.5},
    target_active={"document_flops": 64},
)

_SIDES = {
    "sides": "the notes raise the anchors' positive tokens and name no side of the other terms, "
    "which are query_... here; the documents are indexed, so consider document_... too",
    "special tokens": "the token losses ignore them, because FLOPS lowers them",
    "short texts": "min activation averages no more activations than a text has tokens",
}
_PLAIN = {**_SIDES, "idf_alpha": "none: IDF-aware FLOPS begins with V25"}

V22 = Preset(
    name="V22",
    weights={
        "info_nce": 2.0,
        "query_self_reconstruction": 4.0,
        "query_positive_activation": 10.0,
        "triplet_margin": 2.5,
        "query_flops": 0.005,
        "query_min_activation": 1.0,
    },
    ours=_PLAIN,
)

V23 = Preset(
    name="V23",
    weights={
        "info_nce": 2.5,
        "query_self_reconstruction": 1.0,
        "query_positive_activation": 3.0,
        "triplet_margin": 0.0,
        "query_flops": 0.003,
        "query_min_activation": 1.0,
        "distillation": 1.0,
    },
    ours=_PLAIN,
)

V25 = Preset(
    name="V25",
    weights={
        "info_nce": 3.0,
        "query_self_reconstruction": 0.5,
        "query_positive_activation": 2.0,
        "triplet_margin": 0.0,
        "query_flops": 0.002,
        "query_min_activation": 1.0,
        "distillation": 2.0,
    },
    beta=0.3,
    idf_alpha=2.5,
    stopword_penalty=5.0,
    ours=_SIDES,
)

V26 = Preset(
    name="V26",
    teacher="BAAI/bge-m3",
    weights={
        "info_nce": 3.0,
        "query_self_reconstruction": 0.5,
        "query_positive_activation": 2.0,
        "triplet_margin": 0.0,
        "query_flops": 0.010,
        "query_min_activation": 1.0,
        "distillation": 2.0,
    },
    temperature=0.07,
    margin=0.3,
    distillation_temperature=3.0,
    alpha_kl=0.7,
    alpha_mse=0.3,
    beta=0.3,
    idf_alpha=4.0,
    special_penalty=100.0,
    stopword_penalty=15.0,
    top_k=5,
    threshold=0.5,
    curriculum=Curriculum(
        [
            Phase(1, 8, temperature=0.08, weights={"info_nce": 2.5, "distillation": 2.5}),
            Phase(9, 17, temperature=0.05, weights={"info_nce": 3.0, "distillation": 1.5}),
            Phase(18, 25, temperature=0.04, weights={"info_nce": 3.0, "distillation": 0.8}),
        ]
    ),
    ours=_SIDES,
)

V28 = V26.replace(
    name="V28",
    weights={"query_language_penalty": 0.5, "context_distillation": 1.0},
    language_penalty=100.0,
    training={
        "num_epochs": 25,
        "batch_size": 24,
        "learning_rate": 3.0e-5,
        "gradient_accumulation_steps": 4,
        "context_gate_hidden": 256,
        "context_attention_heads": 4,
        "context_gate_dropout": 0.1,
    },
    ours={
        **_SIDES,
        "context_distillation": "named without a formula: here distillation of the anchors' scores "
        "with one another",
        "unchanged": "numbers that the notes on V28 do not repeat are V26's",
        "phases": "the notes on V28 list no info_nce: V26's 2.5, 3.0 and 3.0",
    },
)
