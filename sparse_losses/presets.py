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

from sparse_losses._core.checks import check_choice, check_integer
from sparse_losses._core.token_ids import TokenIds
from sparse_losses.losses.idf_flops import IdfFlopsLoss
from sparse_losses.losses.language_penalty import LanguagePenaltyLoss
from sparse_losses.objective.controller import SparsityController
from sparse_losses.objective.objective import SpladeObjective
from sparse_losses.objective.schedules import Curriculum, Phase, ReadOnly, TrainingSchedule, Warmup
from sparse_losses.objective.terms import NEEDS
from sparse_losses.vocabulary.penalties import idf_penalty, language_penalty

# The fields that are a loss's numbers, and the loss's name for each.
_KD = {"distillation_temperature": "temperature", "alpha_kl": "alpha_kl", "alpha_mse": "alpha_mse"}
_NUMBERS = {
    "info_nce": {name: name for name in ("temperature", "similarity", "symmetric")},
    "triplet_margin": {"margin": "margin"},
    "distillation": _KD,
    "context_distillation": _KD,
    "min_activation": {"top_k": "top_k", "threshold": "threshold"},
    "self_reconstruction": {"balanced": "balanced"},
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
            ``SparsityController`` aims at; the term's weight is then not used.
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
        if not all(0 < share <= 1 for share in self.warmup.values()):
            raise ValueError(f"expected `warmup` as shares in (0, 1], got {self.warmup}")

    def replace(self, *, weights: Mapping[str, float] | None = None, **changes: Any) -> "Preset":
        """Return a copy with other numbers; weights replace those of the same names.

        A weight of 0 removes the term, as ``without`` does. Other mappings are replaced as a whole.
        A curriculum's temperature and weights override yours, unless you pass ``curriculum=None``.
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

        curriculum = self.curriculum
        if curriculum is not None:
            phases = [dataclasses.replace(p, weights=rest(p.weights)) for p in curriculum.phases]
            curriculum = dataclasses.replace(curriculum, phases=phases)
        return dataclasses.replace(
            self,
            weights=rest(self.weights),
            warmup=rest(self.warmup),
            target_active=rest(self.target_active),
            curriculum=curriculum,
        )

    def missing(self, passed: Collection[str] = ()) -> list[str]:
        """Return the fields that must be set, but those of losses ``passed`` to ``objective``."""
        losses = self._losses() - {*passed}
        needed = {field for loss in losses for field in _NUMBERS.get(loss, ())}
        if "language_penalty" in losses:
            needed.add("language_penalty")
        if self.idf_alpha is not None and "flops" not in passed:
            needed |= {"beta", "stopword_penalty"}
        return [name for name, value in vars(self).items() if name in needed and value is None]

    def _losses(self) -> set[str]:
        active = (term for term, weight in self.weights.items() if weight)
        return {term.removeprefix("query_").removeprefix("document_") for term in active}

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
        passed = [name for name, loss in options.items() if loss is not None]
        if missing := self.missing(passed):
            raise ValueError(
                f"expected all numbers of {self.name}, got None for {', '.join(missing)}: set "
                f"{self.name}.replace({', '.join(f'{name}=...' for name in missing)})"
            )
        made: dict[str, Any] = {"special_token_ids": special_token_ids}
        made["stopword_ids"] = stopword_ids if hide_stopwords else ()
        made |= {"score_scale": self.score_scale or 1.0, "teacher_scale": self.teacher_scale}
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
        if "language_penalty" in self._losses() - {*options}:
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
        objective = SpladeObjective(self.weights, **(made | options))
        for loss, names in _NUMBERS.items():
            for field, name in names.items() if loss not in passed else ():
                if (number := getattr(self, field)) is not None:
                    setattr(getattr(objective, loss), name, number)
        return objective

    def schedules(
        self,
        objective: SpladeObjective,
        *,
        steps: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> list[TrainingSchedule | SparsityController]:
        """Return a ``TrainingSchedule``, then one ``SparsityController`` per target.

        They set the objective's weights in training: ``attach`` each to the optimiser. Warm-ups
        need ``steps``, the optimiser steps of the whole training, and controllers plan by them;
        phases need ``steps_per_epoch``.
        """
        warmups = {}
        for term, share in self.warmup.items():
            if term not in self.target_active:
                check_integer("steps", steps, minimum=1)
                warmups[term] = Warmup(max(1, round(share * (steps or 0))), "quadratic")
        schedule = TrainingSchedule(
            objective, self.curriculum, warmups=warmups, steps_per_epoch=steps_per_epoch
        )
        return [
            schedule,
            *(
                SparsityController(objective, term, target_active=target, steps=steps)
                for term, target in self.target_active.items()
                if term in objective.weights  # which may be without the term
            ),
        ]


# Every number is one line, with its reason. Figures are nDCG@10 on the docstrings and on Debian's
# packages, of validation queries at target 64 and of one seed where nothing else is said:
# docs/results/recipe.csv.
RECOMMENDED = Preset(
    name="RECOMMENDED",
    weights={
        "info_nce": 1.0,  # the scale of all others
        "distillation": 3.0,  # 1: -.006 and -.006; 6: -.005 and -.001
        "document_flops": 0.1,  # without a target; else the controller sets it
        "query_flops": 0.1,  # 0.3: +.001 and -.003
    },
    temperature=1.0,  # the encoder learns the scale of dot products; 2: +.001 to +.008
    similarity="dot",  # COSINE: -.028 and -.010, means of three seeds
    teacher="bm25",  # no model; without it: +.005 and +.001, means of three seeds
    distillation_temperature=1.0,  # unused: the KL is off
    alpha_kl=0.0,  # the KL in place of the z-scores, weight 1: -.006 and -.014
    alpha_mse=1.0,  # z-scores need no scale
    # It learns to rank before it learns to be sparse (documents: where no controller steers).
    warmup={"query_flops": 0.5, "document_flops": 0.5},
    # 32: -.010 and -.004, means of three seeds. With 24 for the queries too: +.002 and -.014.
    target_active={"document_flops": 64},
)

COSINE = Preset(  # docs/demo.md has an ablation of these losses
    name="COSINE",
    weights={
        "info_nce": 1.0,
        "distillation": 1.0,
        "document_flops": 0.03,  # likewise
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

_TERMS = (
    "info_nce",
    "query_self_reconstruction",
    "query_positive_activation",
    "triplet_margin",
    "query_flops",
    "query_min_activation",
    "distillation",
)


def _weights(*column: float) -> dict[str, float]:
    """Return a column of the notes' table "Loss weights by version"."""
    return dict(zip(_TERMS, column, strict=False))  # V22 has no distillation


_OURS = {
    "sides": "the notes name a side only for positive tokens (anchors): all are query_... here; "
    "you index documents, so consider document_... too",
    "special tokens": "the token losses ignore them, because FLOPS lowers them",
    "short texts": "min activation averages no more activations than a text has tokens",
}
_PLAIN = {**_OURS, "idf_alpha": "not set, because IDF-aware FLOPS begins with V25"}


V22 = Preset(name="V22", weights=_weights(2.0, 4.0, 10.0, 2.5, 0.005, 1.0), ours=_PLAIN)
V23 = Preset(name="V23", weights=_weights(2.5, 1.0, 3.0, 0.0, 0.003, 1.0, 1.0), ours=_PLAIN)
V25 = Preset(
    name="V25",
    weights=_weights(3.0, 0.5, 2.0, 0.0, 0.002, 1.0, 2.0),
    beta=0.3,
    idf_alpha=2.5,
    stopword_penalty=5.0,
    ours=_OURS,
)
V26 = Preset(
    name="V26",
    weights=_weights(3.0, 0.5, 2.0, 0.0, 0.010, 1.0, 2.0),
    temperature=0.07,
    margin=0.3,
    teacher="BAAI/bge-m3",
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
    ours=_OURS,
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
        **_OURS,
        "context_distillation": "named without a formula: here of the anchors' mutual scores",
        "unchanged": "numbers that the notes on V28 do not repeat are V26's",
        "phases": "the notes on V28 list no weights of info_nce: V26's 2.5, 3.0 and 3.0 are used",
    },
)
