"""The settings of complete training runs, as data.

``RECOMMENDED`` is the recipe to start with. V22 to V28 are versions of a Korean neural sparse
retriever: V22 to V26 come from its notes on loss functions, V28 from the notes on that experiment.
A number that the notes do not give is ``None`` here and must be set before use.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from sparse_losses._core.checks import check_choice, check_shapes
from sparse_losses._core.token_ids import TokenIds
from sparse_losses.losses.idf_flops import IdfFlopsLoss
from sparse_losses.losses.language_penalty import LanguagePenaltyLoss
from sparse_losses.objective import terms
from sparse_losses.objective.objective import SpladeObjective
from sparse_losses.objective.schedules import Curriculum, Phase, TrainingSchedule
from sparse_losses.vocabulary.penalties import idf_penalty, language_penalty

_TAUGHT = ("distillation_temperature", "alpha_kl", "alpha_mse")
# By term, without its side, the settings of its loss: fields of the preset, and the special tokens.
SETTINGS: dict[str, tuple[str, ...]] = {
    "info_nce": ("temperature", "similarity"),
    "triplet_margin": ("margin",),
    **dict.fromkeys(("distillation", "context_distillation"), _TAUGHT),
    "min_activation": ("top_k", "threshold"),
    **dict.fromkeys(("self_reconstruction", "positive_activation"), ("ignore_token_ids",)),
    **dict.fromkeys(("flops", "language_penalty"), ()),
}


_SIDES = {x: "side" in inspect.signature(getattr(terms, x)).parameters for x in SETTINGS}
_PREFIXES = {False: [""], True: ["query_", "document_"]}
TERMS = [prefix + kind for kind, has_side in _SIDES.items() for prefix in _PREFIXES[has_side]]


@dataclasses.dataclass(frozen=True)
class Preset:
    """Weights and hyperparameters of a run; change them with ``replace``.

    Fields that are not listed are settings of losses and terms, and arguments of ``idf_penalty``;
    ``None`` is their default, or a number that must be set.

    Attributes:
        weights: by term: ``"info_nce"``, ``"query_flops"``, ``"document_flops"``, ...
        start_active, target_active: active dimensions of a text before training and of a document
            after it: arguments of ``calibrate``, with ``method="shift"`` and ``"prune"``.
        idf_alpha: steepness of the token penalties; ``None``: plain FLOPS, without penalties.
        ours: what the source leaves open, with our reading.

    Examples:
        >>> from sparse_losses import RECOMMENDED
        >>> recipe = RECOMMENDED.replace(temperature=0.5, weights={"query_flops": 0.2})
        >>> objective = recipe.objective()
        >>> objective.weights, objective.terms["info_nce"].loss.temperature
        ({'info_nce': 1.0, 'query_flops': 0.2}, 0.5)
    """

    name: str
    weights: Mapping[str, float]
    temperature: float | None = None
    similarity: Literal["cosine", "dot"] = "cosine"
    start_active: int | None = None
    target_active: int | None = None
    margin: float | None = None
    score_scale: float = 1.0
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
    language_penalty: float | None = None
    curriculum: Curriculum | None = None
    ours: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def replace(self, *, weights: Mapping[str, float] | None = None, **changes: Any) -> "Preset":
        """Return a copy with other numbers; weights replace those of the same names.

        A term of weight 0 is off, in every phase. Other mappings are replaced as a whole. A
        curriculum's temperature and weights override yours: see ``curriculum=None``.
        """
        for term in weights or {}:
            check_choice("weights", term, TERMS)
        return dataclasses.replace(self, weights={**self.weights, **(weights or {})}, **changes)

    def missing(self) -> list[str]:
        """Return the fields that must be set before ``objective``."""
        kinds = {_split(term)[-1] for term, weight in self.weights.items() if weight}
        # `language_penalty` is also the name of its number.
        needed = {*kinds, *(name for kind in kinds for name in SETTINGS[kind])}
        needed |= {"beta", "stopword_penalty"} if self.idf_alpha is not None else set()
        return [name for name, value in vars(self).items() if name in needed and value is None]

    def objective(
        self,
        *,
        idf: Tensor | None = None,
        special_token_ids: TokenIds = (),
        stopword_ids: TokenIds = (),
        allowed_token_ids: TokenIds | None = None,
        hide_stopwords: bool = False,
        gather: bool = False,
    ) -> SpladeObjective:
        """Return the objective with this preset's numbers; ``RECOMMENDED`` needs no argument.

        Args:
            idf: inverse document frequency ``[V]``; needed with ``idf_alpha``.
            special_token_ids: they get ``special_penalty``, and the losses of tokens ignore them.
            stopword_ids: they get ``stopword_penalty``.
            allowed_token_ids: the wanted languages' tokens; they and ``idf`` are needed with
                ``language_penalty``.
            hide_stopwords: whether to hide them from InfoNCE and FLOPS.
            gather: whether the terms use the texts of all ranks.
        """
        if missing := ", ".join(f"{name}=..." for name in self.missing()):
            raise ValueError(f"expected numbers for {self.name}.replace({missing}), got None")
        if hide_stopwords and isinstance(stopword_ids, (tuple, list)) and not stopword_ids:
            raise ValueError("expected `stopword_ids` with hide_stopwords=True, got none")
        ids, special = {"stopword_ids": stopword_ids}, {"special_token_ids": special_token_ids}
        scores = {name: vars(self)[name] for name in ("score_scale", "teacher_scale", "similarity")}
        hidden = ids if hide_stopwords else {}
        options: dict[str, Any] = {"distillation": scores, "context_distillation": scores}
        options |= {"info_nce": hidden, "flops": hidden, "min_activation": special}
        numbers: Any = {**vars(self), "ignore_token_ids": special_token_ids}
        made = {}
        for term, weight in ((term, weight) for term, weight in self.weights.items() if weight):
            *side, kind = _split(term)
            loss: Any = None
            is_weighted = kind == "flops" and self.idf_alpha is not None
            if idf is None and (is_weighted or kind == "language_penalty"):
                raise ValueError(f"expected `idf` for {term!r} of {self.name}, got None")
            if is_weighted:
                given: Any = {"idf": idf, "alpha": self.idf_alpha, **ids}
                given |= {"stopword_penalty": self.stopword_penalty}
                if self.special_penalty is not None:
                    given |= {"special_penalty": self.special_penalty, **special}
                loss = IdfFlopsLoss(idf_penalty(**given), beta=numbers["beta"])
            elif kind == "language_penalty":
                if allowed_token_ids is None:
                    raise ValueError(f"expected `allowed_token_ids` for {self.name}, got None")
                given = {"penalty": self.language_penalty, **special}
                size = check_shapes(idf=(idf, "V"))["V"]
                loss = LanguagePenaltyLoss(language_penalty(size, allowed_token_ids, **given))
            built = getattr(terms, kind)(*side, loss, **options.get(kind, {}))
            if given := {x.removeprefix("distillation_"): numbers[x] for x in SETTINGS[kind]}:
                built.loss = type(built.loss)(**given)
            made[term] = weight, built
        return SpladeObjective(made, gather=gather)

    def schedules(
        self, objective: SpladeObjective, *, steps_per_epoch: int | None = None
    ) -> list[TrainingSchedule]:
        """Return what sets the weights and the temperature; phases need ``steps_per_epoch``."""
        options: Any = {"steps_per_epoch": steps_per_epoch}
        curriculum = self.curriculum and dataclasses.replace(self.curriculum, **options)
        return [TrainingSchedule(objective, curriculum)]


def _split(term: str) -> list[str]:
    """Return the side of a term, if it has one, and its name without it."""
    return term.split("_", 1) if term.startswith(("query_", "document_")) else [term]


# Train from a sparse start, then prune: the three steps are `calibrate` with `start_active` and
# method="shift", training, and `calibrate` with `target_active`. The numbers are those for trained
# models. From scratch: cosines, temperature .05, a start of a quarter of the vocabulary (rows
# "bert cosine" to "static dot" of start.csv). A trained SPLADE model needs no start.
RECOMMENDED = Preset(
    name="RECOMMENDED",
    weights={"info_nce": 1.0},  # small FLOPS weights lose .05 and .79: "bert cosine", "static dot"
    temperature=1.0,  # the SPLADE model's rows of collection.csv, as the similarity
    similarity="dot",
    start_active=256,  # where the dense MiniLM of collection.csv starts
    target_active=64,
)


def _weights(*column: float) -> dict[str, float]:
    """Return a column of the notes' table "Loss weights by version"."""
    names = "info_nce query_self_reconstruction query_positive_activation triplet_margin"
    names += " query_flops query_min_activation distillation"
    return dict(zip(names.split(), column, strict=False))  # V22 has no distillation


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
V26 = V25.replace(
    name="V26",
    weights={"query_flops": 0.010},
    temperature=0.07,
    margin=0.3,
    distillation_temperature=3.0,
    alpha_kl=0.7,
    alpha_mse=0.3,
    idf_alpha=4.0,
    special_penalty=100.0,
    stopword_penalty=15.0,
    top_k=5,
    threshold=0.5,
    curriculum=Curriculum(
        [
            Phase(8, temperature=0.08, weights={"info_nce": 2.5, "distillation": 2.5}),
            Phase(17, temperature=0.05, weights={"info_nce": 3.0, "distillation": 1.5}),
            Phase(25, temperature=0.04, weights={"info_nce": 3.0, "distillation": 0.8}),
        ]
    ),
)
V28 = V26.replace(
    name="V28",
    weights={"query_language_penalty": 0.5, "context_distillation": 1.0},
    language_penalty=100.0,
    ours={
        **_OURS,
        "context_distillation": "named without a formula: here of the anchors' mutual scores",
        "unchanged": "what the notes on V28 do not repeat is V26's, as the phases' info_nce",
    },
)
