"""One table of calls, a row for every option of every loss, pooling, head and objective.

The contract tests (tests/losses/test_contract.py) and the tests on several ranks loop over it. To
add a loss:

1. Write its oracle in tests/oracles.py, in NumPy loops, named like the loss. It takes the arrays
   and hyperparameters; where the loss has a ``reduction``, it returns values and validity of rows.
2. Add a ``Loss`` to ``LOSSES``: its signature, written out, and hyperparameters it must refuse.
3. Add one ``Case`` or more to ``BASE_CASES``, the plainest first: a function that makes the arrays
   for any batch size, hyperparameters, and facts about the tensors (the fields of ``Case``).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tests import oracles
from tests.representation import head_oracle

B, D, V, S, N, C, L = 4, 5, 11, 6, 3, 5, 4
MARGINS = ("student_positive", "student_negative", "teacher_positive", "teacher_negative")
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Loss:
    """What all calls of one loss share."""

    stem: str
    module: str
    signature: str  # of the function, written out: users rely on it
    constructor: tuple[str, ...] = ()  # tensors that the module keeps as buffers
    keyword_tensors: tuple[str, ...] = ()  # tensors of `forward` that are keyword-only
    implementations: tuple[str, ...] = ()  # names beside the definition
    function: str = ""  # where it is not `<stem>_loss`
    bad: tuple[tuple[str, Any], ...] = ()  # hyperparameters that must be refused
    layer_oracle: Callable[..., float] | None = None  # of a layer: of what `weigh` returns
    call: Callable[..., torch.Tensor] | None = None  # where it is no function of the package

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", self.function or f"{self.stem}_loss")

    @property
    def reduces(self) -> bool:
        return "reduction" in self.signature

    @property
    def oracle(self) -> Callable[..., Any]:
        return self.layer_oracle or getattr(oracles, self.stem)


def weigh(*outputs: Any) -> Any:
    """A layer's outputs as one number, to which no two of the last dimension give alike."""
    tensors = [torch.as_tensor(x) for x in outputs]
    weights = torch.linspace(0.5, 1.5, tensors[0].shape[-1], dtype=torch.float64)
    return sum(
        (n * x * weights.to(x.device, x.dtype)).sum() for n, x in enumerate(tensors, start=1)
    )


_NAN = float("nan")
_BAD_TEMPERATURES = tuple(
    ("temperature", t)
    for t in (0.0, -1.0, float("inf"), _NAN, 10**400, "0.07", None, torch.ones(1), torch.ones(2))
)
_BAD_IDS = tuple(("ignore_token_ids", ids) for ids in ([V], [-1], 1, [[1]], "1"))

LOSSES = {
    loss.stem: loss
    for loss in (
        Loss(
            "info_nce",
            "InfoNCELoss",
            "(anchor, positive, negative=None, *, temperature=0.07, similarity='cosine', "
            "symmetric=False, in_batch=True, positive_ids=None, positive_mask=None, "
            "decoupled=False, gather=False, impl='auto', reduction='mean')",
            bad=(
                *_BAD_TEMPERATURES,
                ("similarity", "manhattan"),
                ("similarity", "euclidean"),
                ("impl", "cuda"),
                ("impl", None),
                ("symmetric", "False"),
                ("decoupled", None),
            ),
            implementations=("direct", "blocks", "nonzeros"),
            keyword_tensors=("positive_ids", "positive_mask"),
        ),
        Loss(
            "info_nce_from_scores",
            "InfoNCEFromScoresLoss",
            "(scores, positive_mask, candidate_mask=None, *, decoupled=False, gather=False, "
            "reduction='mean')",
            function="info_nce_from_scores",
        ),
        Loss(
            "n_pair",
            "NPairLoss",
            "(anchor, positive, negative=None, *, gather=False, reduction='mean')",
        ),
        Loss(
            "pairwise_contrastive",
            "PairwiseContrastiveLoss",
            "(x1, x2, same, *, margin=1.0, gather=False, reduction='mean')",
            bad=(("margin", _NAN), ("margin", "1")),
        ),
        Loss(
            "triplet_margin",
            "TripletMarginLoss",
            "(anchor, positive, negative, *, margin=0.3, similarity='cosine', "
            "gather=False, reduction='mean')",
            bad=(("margin", _NAN), ("similarity", "manhattan")),
        ),
        Loss(
            "self_reconstruction",
            "SelfReconstructionLoss",
            "(activations, input_ids, attention_mask, *, ignore_token_ids=None, balanced=False, "
            "gather=False, reduction='mean')",
            bad=(*_BAD_IDS, ("balanced", 1)),
        ),
        Loss(
            "positive_activation",
            "PositiveActivationLoss",
            "(activations, positive_input_ids, positive_attention_mask, token_weight=None, *, "
            "saturating=False, ignore_token_ids=None, gather=False, reduction='mean')",
            constructor=("token_weight",),
            bad=(*_BAD_IDS, ("saturating", 1)),
        ),
        Loss(
            "flops",
            "FlopsLoss",
            "(activations, *, estimator='biased', gather=False)",
            bad=(("estimator", "ustat"),),
        ),
        Loss(
            "idf_flops",
            "IdfFlopsLoss",
            "(activations, token_penalty, *, beta=0.3, estimator='biased', gather=False)",
            constructor=("token_penalty",),
            bad=(("estimator", "ustat"), ("beta", _NAN)),
        ),
        Loss(
            "min_activation",
            "MinActivationLoss",
            "(activations, token_counts=None, *, top_k=5, threshold=0.5, "
            "gather=False, reduction='mean')",
            bad=(
                ("top_k", 0),
                ("top_k", -1),
                ("top_k", 2.5),
                ("top_k", V + 1),
                ("threshold", _NAN),
            ),
        ),
        Loss(
            "language_penalty",
            "LanguagePenaltyLoss",
            "(activations, token_penalty, *, gather=False, reduction='mean')",
            constructor=("token_penalty",),
        ),
        Loss(
            "distillation",
            "DistillationLoss",
            "(student_scores, teacher_scores, *, temperature=3.0, alpha_kl=0.7, alpha_mse=0.3, "
            "standardize='batch', candidate_mask=None, gather=False)",
            keyword_tensors=("candidate_mask",),
            bad=(
                *_BAD_TEMPERATURES,
                ("standardize", "column"),
                ("alpha_kl", -1.0),
                ("alpha_kl", _NAN),
                ("alpha_mse", -1.0),
                ("alpha_mse", _NAN),
            ),
        ),
        Loss(
            "margin_mse",
            "MarginMSELoss",
            "(student_positive, student_negative, teacher_positive, teacher_negative, *, "
            "gather=False, reduction='mean')",
        ),
        Loss(
            "nws",
            "NWSLoss",
            "(query, query_labels, prototype, label_similarity, *, key=None, key_labels=None, "
            "queue=None, queue_labels=None, queue_mask=None, alpha=1.0, beta=1.0, "
            "temperature=0.07, aggregation='mean', decoupled=True, eps=1e-08, "
            "gather=False, impl='auto', reduction='mean')",
            constructor=("label_similarity",),
            bad=(
                *_BAD_TEMPERATURES,
                ("aggregation", "sum"),
                ("alpha", -1.0),
                ("alpha", _NAN),
                ("beta", -1.0),
                ("beta", _NAN),
                ("eps", -1e-8),
                ("eps", _NAN),
                ("impl", "cuda"),
            ),
            implementations=("direct",),
            keyword_tensors=("key", "key_labels", "queue", "queue_labels", "queue_mask"),
        ),
    )
}


def _pooled(logits: Any, attention_mask: Any, return_logits: bool = False) -> float:
    outputs = [oracles.splade_pool(logits, attention_mask)]
    if return_logits:
        outputs.append(oracles.pooled_logits(logits, attention_mask))
    return weigh(*outputs).item()


def _headed(return_logits: bool = False, attention_mask: Any = None, **arrays: Any) -> float:
    logits = head_oracle.logits(mask=attention_mask, **arrays)
    outputs = [head_oracle.activations(logits)]
    return weigh(*outputs, *([logits] if return_logits else [])).item()


OBJECTIVE = {
    "info_nce": 1.0,
    "distillation": 0.5,
    "context_distillation": 0.4,
    "query_flops": 0.3,
    "document_flops": 0.7,
    "query_min_activation": 0.2,
    "document_self_reconstruction": 0.6,
    "query_positive_activation": 0.8,
    "document_language_penalty": 0.1,
}
OWN_NEGATIVES = {"triplet_margin": 0.9, "margin_mse": 0.35}


def _objective_of(
    query: Any,
    document: Any,
    document_ids: Any,
    document_mask: Any,
    teacher: Any,
    context: Any,
    penalty: Any,
    negative: Any = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Every term at once, as a function of tensors."""
    import sparse_losses as s

    weights = OBJECTIVE | (OWN_NEGATIVES if negative is not None else {})
    language_penalty = s.LanguagePenaltyLoss(penalty)
    objective = s.SpladeObjective(weights, language_penalty=language_penalty, impl=impl)
    own = None
    if negative is not None:  # its tokens are the positives' here: [B, 1, S]
        words = [
            x[:, None].expand(-1, negative.shape[1], -1) for x in (document_ids, document_mask)
        ]
        own = s.Texts(negative, *words)
    batch = s.SpladeBatch(
        s.Texts(query),
        s.Texts(document, document_ids, document_mask),
        own,
        teacher_scores=teacher,
        teacher_anchor_scores=context,
        teacher_candidates="batch",
    )
    return objective(batch).total


def _objective_oracle(
    query, document, document_ids, document_mask, teacher, context, penalty, negative=None
) -> float:
    def cosines(a, b):
        return np.array([[oracles.sim(x, y, "cosine") for y in b] for x in a])

    def mean(rows):
        return oracles.reduce_rows(*rows, "mean")

    documents, ids, mask = document, document_ids, document_mask
    scores = cosines(query, document)
    if negative is not None:
        own = [cosines([x], each)[0] for x, each in zip(query, negative, strict=True)]
        scores = np.concatenate([scores, np.reshape(own, (len(query), -1))], axis=1)
        documents = np.concatenate([document, *negative])
        ids, mask = (
            np.concatenate([x, np.repeat(x, negative.shape[1], axis=0)]) for x in (ids, mask)
        )
    terms = {
        "info_nce": mean(oracles.info_nce(query, document, negative)),
        "distillation": oracles.distillation(scores, teacher),
        "context_distillation": oracles.distillation(cosines(query, query), context),
        "query_flops": oracles.flops(query),
        "document_flops": oracles.flops(documents),
        "query_min_activation": mean(oracles.min_activation(query)),
        "document_self_reconstruction": mean(oracles.self_reconstruction(documents, ids, mask)),
        "query_positive_activation": mean(
            oracles.positive_activation(query, document_ids, document_mask)
        ),
        "document_language_penalty": mean(oracles.language_penalty(documents, penalty)),
    }
    if negative is not None:
        terms["triplet_margin"] = mean(oracles.triplet_margin(query, document, negative))
        first, rest = ((x.diagonal()[:, None], x[:, len(query) :]) for x in (scores, teacher))
        both = [np.broadcast_arrays(*pair) for pair in (first, rest)]
        student, taught = ([x.ravel() for x in pair] for pair in both)
        terms["margin_mse"] = mean(oracles.margin_mse(*student, *taught))
    weights = OBJECTIVE | OWN_NEGATIVES
    return sum(weights[name] * value for name, value in terms.items())


# They return a vector a text, or a number a token, and have no module of that name.
LAYERS = {
    layer.stem: layer
    for layer in (
        Loss(
            "splade_pool",
            "",
            "(logits, attention_mask, *, return_logits=False, impl='auto')",
            implementations=("nonzeros",),
            function="splade_pool",
            layer_oracle=_pooled,
        ),
        Loss(
            "token_weights",
            "",
            "(logits, attention_mask)",
            function="token_weights",
            layer_oracle=lambda *args, **arrays: weigh(
                oracles.token_weights(*args, **arrays)
            ).item(),
        ),
        Loss(
            "splade_head",
            "",
            "(hidden, weight, bias=None, attention_mask=None, *, gate=None, return_logits=False, "
            "sparse_grad=False, impl='auto')",
            implementations=("packed", "tiles"),
            function="splade_head",
            layer_oracle=_headed,
        ),
        Loss(
            "objective",
            "",
            "",
            implementations=("auto",),
            layer_oracle=_objective_oracle,
            call=_objective_of,
        ),
    )
}


@dataclass(frozen=True)
class Case:
    """One call: the arrays of its tensors for any batch size, its hyperparameters, its facts."""

    stem: str
    name: str
    make: Callable[[np.random.Generator, int], Arrays]
    kwargs: dict[str, Any] = field(default_factory=dict)
    differentiable: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()  # tensors whose first dimension is the batch
    square: tuple[str, ...] = ()  # tensors with the batch in both dimensions
    masks: tuple[str, ...] = ()
    free: tuple[tuple[str, int], ...] = ()  # dimensions that no other tensor shares
    invalidate: tuple[str, float] | None = None  # row tensor and the value that voids a row
    private: tuple[str, ...] = ()  # row tensors that no other row looks at
    implementations: tuple[str, ...] = ()  # those of the loss that support the call
    impl: str | None = None  # how it is computed; by default without the argument

    @property
    def id(self) -> str:
        return f"{self.stem}-{self.name}" + (f"-{self.impl}" if self.impl else "")

    @property
    def loss(self) -> Loss:
        return LOSSES.get(self.stem) or LAYERS[self.stem]

    @property
    def fewest_rows(self) -> int:
        return 2 if self.kwargs.get("estimator") == "unbiased" else 0

    def arrays(self, batch: int = B, seed: int = 0) -> Arrays:
        return self.make(np.random.default_rng(seed), batch)

    def tensors(
        self, batch: int = B, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> dict[str, torch.Tensor]:
        """Return the tensors: floating ones in ``dtype``, ids, masks and labels as they are."""
        return to_tensors(self.arrays(batch, seed), dtype)

    def expected(self, arrays: Arrays, reduction: str = "mean") -> Any:
        """Return the oracle's value."""
        value = self.loss.oracle(**arrays, **self.kwargs)
        return oracles.reduce_rows(*value, reduction) if self.loss.reduces else value

    def function(self) -> Callable[..., torch.Tensor]:
        """Return the functional loss with this case's hyperparameters."""
        import sparse_losses.functional as F

        function = self.loss.call or getattr(F, self.loss.function)
        impl = {} if self.impl is None else {"impl": self.impl}

        def call(**arguments: Any) -> torch.Tensor:
            outputs = function(**{**self.kwargs, **impl, **arguments})
            if self.loss.layer_oracle is None or self.loss.call:
                return outputs
            return weigh(*outputs) if isinstance(outputs, tuple) else weigh(outputs)

        return call

    def module(self, tensors: dict[str, torch.Tensor], **changes: Any) -> tuple[Any, dict]:
        """Return the module and the tensors that its ``forward`` takes."""
        import sparse_losses

        kept = {k: v for k, v in tensors.items() if k in self.loss.constructor}
        rest = {k: v for k, v in tensors.items() if k not in self.loss.constructor}
        if self.stem == "nws":
            kept.setdefault("label_similarity", None)
        impl = {} if self.impl is None else {"impl": self.impl}
        options = {**self.kwargs, **impl, **changes}
        return getattr(sparse_losses, self.loss.module)(**kept, **options), rest


def to_tensors(arrays: Arrays, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Convert arrays; floating ones to ``dtype``."""
    tensors = {}
    for name, array in arrays.items():
        tensor = None if array is None else torch.from_numpy(np.array(array))
        tensors[name] = (
            tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor
        )
    return tensors


def to_arrays(tensors: dict[str, torch.Tensor]) -> Arrays:
    """Convert tensors back, exactly, to what the oracles read."""
    arrays = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            tensor = tensor.detach()
            arrays[name] = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
        else:
            arrays[name] = tensor
    return arrays


# ------------------------------------------------------------------------------------------------
# Factories


def _pairs(negative: str | None = None, ids: bool = False, mask: bool = False):
    def make(rng: np.random.Generator, batch: int) -> Arrays:
        arrays = {
            "anchor": rng.normal(size=(batch, D)),
            "positive": rng.normal(size=(batch, D)),
        }
        if negative == "shared":
            arrays["negative"] = rng.normal(size=(N, D))
        if negative == "per_row":
            arrays["negative"] = rng.normal(size=(batch, N, D))
        if negative == "row":
            arrays["negative"] = rng.normal(size=(batch, D))
        if ids:
            arrays["positive_ids"] = np.arange(batch) // 2 * 7  # rows 0 and 1 share one, 2 and 3
        if mask:
            some = rng.random((batch, batch)) < 0.3
            arrays["positive_mask"] = some | np.roll(np.eye(batch, dtype=bool), 1, axis=1)
        return arrays

    return make


def _same(rng: np.random.Generator, batch: int) -> Arrays:
    return {
        "x1": rng.normal(size=(batch, D)),
        "x2": rng.normal(size=(batch, D)),
        "same": np.arange(batch) % 2 == 0,
    }


def _labels(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return multi-hot labels, every row with at least one."""
    labels = rng.random((rows, L)) < 0.4
    labels[np.arange(rows), rng.integers(0, L, rows)] = True
    return labels.astype(np.int64)


def _nws(key: bool = False, queue: bool = False, mask: bool = False, similar: bool = True):
    def make(rng: np.random.Generator, batch: int) -> Arrays:
        arrays: Arrays = {
            "query": rng.normal(size=(batch, D)),
            "query_labels": _labels(rng, batch),
            "prototype": rng.normal(size=(L, D)),
            "label_similarity": None,
        }
        if batch:
            arrays["query_labels"][0] = [1, 0, 0, 0]  # room for negatives
        if similar:
            half = rng.random((L, L))
            arrays["label_similarity"] = (half + half.T) / 2
            np.fill_diagonal(arrays["label_similarity"], 1.0)
        if key:
            arrays["key"] = rng.normal(size=(5, D))
            arrays["key_labels"] = _labels(rng, 5)
            arrays["key_labels"][4] = 0
        if queue:
            arrays["queue"] = rng.normal(size=(6, D))
            arrays["queue_labels"] = _labels(rng, 6)
            arrays["queue_labels"][1] = [0, 1, 0, 0]
        if mask:
            arrays["queue_mask"] = np.array([1, 1, 0, 1, 0, 1], dtype=bool)
        return arrays

    return make


def _activations(penalty: bool = False, counts: bool = False, signed: bool = False):
    def make(rng: np.random.Generator, batch: int) -> Arrays:
        values = rng.normal(size=(batch, V))
        if not signed:  # sparse, but no column and no top of a row is all zero: there are kinks
            active = rng.random((batch, V)) < 0.8
            active[:1] = True
            values = np.log1p(np.abs(values)) * active
        arrays = {"activations": values}
        if penalty:
            arrays["token_penalty"] = rng.random(V) * 3
        if counts:
            arrays["token_counts"] = np.arange(batch) + 1
        return arrays

    return make


def _tokens(prefix: str = "", weight: bool = False):
    def make(rng: np.random.Generator, batch: int) -> Arrays:
        ids = rng.integers(0, V, size=(batch, S))
        mask = np.ones((batch, S), dtype=np.int64)
        for i in range(batch):
            mask[i, S - i % 3 :] = 0
        ids[:, 1] = ids[:, 0]  # a token that appears twice counts once
        ids[mask == 0] = -100
        arrays = {
            "activations": rng.normal(size=(batch, V)),
            f"{prefix}input_ids": ids,
            f"{prefix}attention_mask": mask,
        }
        if weight:
            arrays["token_weight"] = rng.random(V) + 0.1
        return arrays

    return make


def _scores(mask: bool = False, infinite: bool = False):
    def make(rng: np.random.Generator, batch: int) -> Arrays:
        arrays = {
            "student_scores": rng.normal(size=(batch, C)) * 3,
            "teacher_scores": rng.normal(size=(batch, C)) * 3,
        }
        if mask:
            arrays["candidate_mask"] = np.ones((batch, C), dtype=bool)
            arrays["candidate_mask"][1:2, 2] = False
            arrays["candidate_mask"][2:3, :3] = False
        if infinite:
            arrays["teacher_scores"][:1, 1] = -np.inf
            arrays["teacher_scores"][3:4] = -np.inf
        return arrays

    return make


def _score_table(candidates: bool = False, several: bool = False):
    def make(rng: np.random.Generator, batch: int) -> Arrays:
        arrays: Arrays = {"scores": rng.normal(size=(batch, C)) * 3}
        arrays["positive_mask"] = np.eye(batch, C, dtype=bool)
        if several:
            arrays["positive_mask"] |= rng.random((batch, C)) < 0.3
        if candidates:
            arrays["candidate_mask"] = arrays["positive_mask"] | (rng.random((batch, C)) < 0.7)
        return arrays

    return make


def _margins(rng: np.random.Generator, batch: int) -> Arrays:
    return {name: rng.normal(size=batch) for name in MARGINS}


def _margins_with_absent(rng: np.random.Generator, batch: int) -> Arrays:
    arrays = _margins(rng, batch)
    arrays["teacher_negative"][:1] = -np.inf
    return arrays


def _logits(rng: np.random.Generator, batch: int) -> Arrays:
    mask = rng.random((batch, S)) < 0.7
    mask[:, 1] = True
    return {"logits": rng.normal(size=(batch, S, V)) * 2, "attention_mask": mask}


def _hidden(bias: bool = False, mask: bool = False, gate: bool = False):
    def make(rng: np.random.Generator, batch: int) -> Arrays:
        arrays = {"hidden": rng.normal(size=(batch, S, D)), "weight": rng.normal(size=(V, D))}
        if bias:
            arrays["bias"] = rng.normal(size=V)
        if mask:
            arrays["attention_mask"] = rng.random((batch, S)) < 0.7
            arrays["attention_mask"][:, 1] = True
        if gate:
            arrays["gate"] = rng.random((batch, V))
        return arrays

    return make


def _objective(negative: bool = False):
    def make(rng: np.random.Generator, batch: int) -> Arrays:
        arrays = _tokens("document_")(rng, batch)
        del arrays["activations"]
        arrays = {
            "query": rng.random((batch, V)),
            "document": rng.random((batch, V)),
            "document_ids": arrays["document_input_ids"],
            "document_mask": arrays["document_attention_mask"],
            "teacher": rng.normal(size=(batch, batch)),
            "context": rng.normal(size=(batch, batch)),
            "penalty": rng.random(V),
        }
        if negative:
            arrays["negative"] = rng.random((batch, 2, V))
            arrays["teacher"] = rng.normal(size=(batch, batch + 2))
        return arrays

    return make


# ------------------------------------------------------------------------------------------------
# The table


ALL, DENSE = ("direct", "blocks", "nonzeros"), ("direct", "blocks")


def _info_nce(name: str, implementations, negative=None, ids=False, mask=False, **kwargs) -> Case:
    kwargs = {"temperature": 0.3, **kwargs}
    symmetric = kwargs.get("symmetric", False)
    return Case(
        "info_nce",
        name,
        _pairs(negative, ids, mask),
        kwargs,
        differentiable=("anchor", "positive") + (("negative",) if negative else ()),
        rows=("anchor", "positive")
        + (("negative",) if negative == "per_row" else ())
        + (("positive_ids",) if ids else ()),
        square=("positive_mask",) if mask else (),
        masks=("positive_mask",) if mask else (),
        free=(("negative", 0 if negative == "shared" else 1),),
        invalidate=("positive_mask", 0) if mask else None,
        private=(() if symmetric else ("anchor",))
        + (("negative",) if negative == "per_row" else ()),
        implementations=implementations,
    )


def _pair_case(stem: str, name: str, negative=None, **kwargs) -> Case:
    return Case(
        stem,
        name,
        _pairs(negative),
        kwargs,
        differentiable=("anchor", "positive") + (("negative",) if negative else ()),
        rows=("anchor", "positive") + (("negative",) if negative in ("row", "per_row") else ()),
        free={"shared": (("negative", 0),), "per_row": (("negative", 1),)}.get(negative, ()),
    )


def _nws_case(name: str, key=False, queue=False, mask=False, similar=True, **kwargs) -> Case:
    return Case(
        "nws",
        name,
        _nws(key, queue, mask, similar),
        {"temperature": 0.3, **kwargs},
        differentiable=("query", "prototype"),
        rows=("query", "query_labels"),
        masks=("query_labels",)
        + (("key_labels",) if key else ())
        + (("queue_labels",) if queue else ())
        + (("queue_mask",) if mask else ()),
        invalidate=("query_labels", 0),
        private=("query",),
        implementations=("direct",),
    )


def _token_case(stem: str, name: str, weight: bool = False, **kwargs) -> Case:
    prefix = "positive_" if stem == "positive_activation" else ""
    ids, mask = f"{prefix}input_ids", f"{prefix}attention_mask"
    return Case(
        stem,
        name,
        _tokens(prefix, weight),
        kwargs,
        differentiable=("activations",),
        rows=("activations", ids, mask),
        masks=(mask,),
        free=() if weight else (("activations", 1),),
        invalidate=(mask, 0) if prefix else None,
        private=("activations",),
    )


def _score_case(name: str, mask: bool = False, infinite: bool = False, **kwargs) -> Case:
    return Case(
        "distillation",
        name,
        _scores(mask, infinite),
        kwargs,
        differentiable=("student_scores",),
        rows=("student_scores", "teacher_scores") + (("candidate_mask",) if mask else ()),
        masks=("candidate_mask",) if mask else (),
        invalidate=("candidate_mask", 0) if mask else None,
        private=("student_scores", "teacher_scores"),
    )


def _vector_case(stem: str, name: str, penalty=False, counts=False, signed=False, **kwargs) -> Case:
    return Case(
        stem,
        name,
        _activations(penalty, counts, signed),
        kwargs,
        differentiable=("activations",),
        rows=("activations",) + (("token_counts",) if counts else ()),
        free=(() if counts else (("activations", 0),)) + (() if penalty else (("activations", 1),)),
        invalidate=("token_counts", 0) if counts else None,
        private=("activations",),
    )


def _from_scores_case(name: str, candidates=False, several=False, **kwargs) -> Case:
    masks = ("positive_mask", "candidate_mask") if candidates else ("positive_mask",)
    return Case(
        "info_nce_from_scores",
        name,
        _score_table(candidates, several),
        kwargs,
        differentiable=("scores",),
        rows=("scores", *masks),
        masks=masks,
        invalidate=("positive_mask", 0),
        private=("scores",),
    )


def _layer_case(stem: str, name: str, **kwargs: Any) -> Case:
    return Case(
        stem,
        name,
        _logits,
        kwargs,
        differentiable=("logits",),
        rows=("logits", "attention_mask"),
        masks=("attention_mask",),
        free=(("logits", 2),),
        invalidate=("attention_mask", 0),
        private=("logits",),
        implementations=LAYERS[stem].implementations,
    )


def _head_case(name: str, bias=False, mask=False, gate=False, **kwargs: Any) -> Case:
    free = (("hidden", 0), ("hidden", 1)) + (() if bias else (("weight", 0),))
    return Case(
        "splade_head",
        name,
        _hidden(bias, mask, gate),
        kwargs,
        differentiable=("hidden", "weight")
        + (("bias",) if bias else ())
        + (("gate",) if gate else ()),
        rows=("hidden",) + (("attention_mask",) if mask else ()) + (("gate",) if gate else ()),
        masks=("attention_mask",) if mask else (),
        free=() if mask else free,
        invalidate=("attention_mask", 0) if mask else None,
        private=("hidden",) + (("gate",) if gate else ()) if mask else (),
        implementations=("packed", "tiles"),
    )


def _objective_case(name: str, negative: bool = False) -> Case:
    sides = ("query", "document") + (("negative",) if negative else ())
    return Case(
        "objective",
        name,
        _objective(negative),
        differentiable=sides,
        rows=(*sides, "document_ids", "document_mask"),
        square=("context",) if negative else ("teacher", "context"),
        masks=("document_mask",),
        implementations=("auto",),
    )


def _by_implementation(cases: tuple[Case, ...], *impls: str) -> tuple[Case, ...]:
    """Each case by the definition and by ``impls``, or by its implementations, where it has any."""
    return tuple(
        replace(case, impl=impl)
        for case in cases
        for impl in (
            ("definition", *(impls or case.implementations)) if case.implementations else (None,)
        )
    )


BASE_CASES = (
    _info_nce("plain", ALL),
    _info_nce("cold", ALL, temperature=0.05),
    _info_nce("dot", ALL, similarity="dot", temperature=1.5),
    _info_nce("shared", ALL, negative="shared"),
    _info_nce("per_row", DENSE, negative="per_row"),
    _info_nce("shared_only", (), negative="shared", in_batch=False),
    _info_nce("per_row_only", (), negative="per_row", in_batch=False),
    _info_nce("per_row_only_decoupled", (), negative="per_row", in_batch=False, decoupled=True),
    _info_nce("symmetric", ALL, symmetric=True),
    _info_nce("symmetric_shared", ALL, negative="shared", symmetric=True),
    _info_nce("symmetric_per_row", DENSE, negative="per_row", symmetric=True, similarity="dot"),
    _info_nce("symmetric_per_row_only", (), negative="per_row", symmetric=True, in_batch=False),
    _info_nce("ids", ALL, ids=True),
    _info_nce("ids_symmetric_decoupled", (), ids=True, symmetric=True, decoupled=True),
    _info_nce("positives", (), mask=True),
    _info_nce("positives_shared", (), mask=True, negative="shared"),
    _info_nce("positives_symmetric", (), mask=True, symmetric=True, negative="per_row"),
    _info_nce("positives_decoupled", (), mask=True, decoupled=True, negative="shared"),
    _info_nce("positives_ids", (), mask=True, ids=True, negative="shared"),
    _info_nce(
        "positives_ids_symmetric_decoupled",
        (),
        "shared",
        ids=True,
        mask=True,
        symmetric=True,
        decoupled=True,
    ),
    _info_nce("decoupled", ALL, decoupled=True),
    _info_nce("decoupled_dot", DENSE, decoupled=True, similarity="dot", negative="per_row"),
    _from_scores_case("one"),
    _from_scores_case("several", several=True),
    _from_scores_case("candidates", candidates=True, several=True),
    _from_scores_case("decoupled", candidates=True, several=True, decoupled=True),
    _pair_case("n_pair", "in_batch"),
    _pair_case("n_pair", "shared", "shared"),
    _pair_case("n_pair", "per_row", "per_row"),
    *(
        Case(
            "pairwise_contrastive",
            name,
            _same,
            {"margin": margin},
            differentiable=("x1", "x2"),
            rows=("x1", "x2", "same"),
            masks=("same",),
        )
        for name, margin in (("apart", 1.0), ("inside_margin", 6.0))
    ),
    _pair_case("triplet_margin", "cosine", "row"),
    _pair_case("triplet_margin", "dot", "row", similarity="dot", margin=2.0),
    _pair_case("triplet_margin", "euclidean", "row", similarity="euclidean", margin=4.0),
    _pair_case("triplet_margin", "many", "per_row"),
    _pair_case("triplet_margin", "many_euclidean", "per_row", similarity="euclidean"),
    _nws_case("prototypes", similar=False),
    _nws_case("key", key=True),
    _nws_case("queue", queue=True),
    _nws_case("all", key=True, queue=True, mask=True, alpha=0.5, beta=2.0),
    _nws_case("max", key=True, queue=True, mask=True, aggregation="max"),
    _nws_case("coupled", key=True, queue=True, decoupled=False),
    _nws_case("exact", key=True, queue=True, mask=True, eps=0.0, alpha=0.9),
    _nws_case("prototypes_compete", key=True, queue=True, beta=0.0),
    _nws_case("large_eps", key=True, queue=True, eps=0.2, alpha=3.0, decoupled=False),
    _vector_case("flops", "biased"),
    _vector_case("flops", "unbiased", estimator="unbiased"),
    _vector_case("idf_flops", "biased", penalty=True),
    _vector_case("idf_flops", "signed", penalty=True, signed=True, beta=2.0),
    _vector_case("idf_flops", "unbiased", penalty=True, estimator="unbiased", beta=0.7),
    _vector_case("min_activation", "plain", threshold=3.0),
    _vector_case("min_activation", "counted", counts=True, threshold=3.0, top_k=3),
    _vector_case("min_activation", "signed", signed=True, threshold=0.9, top_k=4),
    _vector_case("language_penalty", "plain", penalty=True),
    _token_case("self_reconstruction", "plain"),
    _token_case("self_reconstruction", "ignored", ignore_token_ids=[0, 3, 3, 5]),
    _token_case("self_reconstruction", "balanced", balanced=True),
    _token_case("self_reconstruction", "balanced_ignored", balanced=True, ignore_token_ids=(2, 4)),
    _token_case("positive_activation", "plain"),
    _token_case("positive_activation", "weighted", weight=True),
    _token_case("positive_activation", "saturating", saturating=True),
    _token_case(
        "positive_activation", "all", weight=True, saturating=True, ignore_token_ids=[1, 3]
    ),
    _score_case("batch"),
    _score_case("row", standardize="row", temperature=1.0),
    _score_case("masked", mask=True),
    _score_case("masked_row", mask=True, standardize="row", alpha_kl=0.4, alpha_mse=1.2),
    _score_case("infinite", infinite=True),
    _score_case("infinite_row", infinite=True, mask=True, standardize="row"),
    *(
        Case(
            "margin_mse",
            name,
            make,
            differentiable=MARGINS[:2],
            rows=MARGINS,
            invalidate=("teacher_positive", -np.inf),
            private=MARGINS[:2],
        )
        for name, make in (("plain", _margins), ("infinite", _margins_with_absent))
    ),
)

LAYER_CASES = (
    _layer_case("splade_pool", "plain"),
    _layer_case("splade_pool", "logits", return_logits=True),
    _layer_case("token_weights", "plain"),
    _head_case("plain"),
    _head_case("biased", bias=True, return_logits=True),
    _head_case("all", bias=True, mask=True, gate=True),
    _head_case("all_logits", bias=True, mask=True, gate=True, return_logits=True),
)

# Its errors name its own arguments: tests/objective/test_objective.py.
OBJECTIVE_CASES = (_objective_case("pairs"), _objective_case("negatives", negative=True))

CASES = _by_implementation(BASE_CASES, "auto")
CASES_AND_LAYERS = CASES + _by_implementation(LAYER_CASES + OBJECTIVE_CASES)
FIRST = {case.stem: case for case in reversed(BASE_CASES)}  # one case a loss, its plainest


def assert_follows_the_formula(stem: str, arrays: Arrays, **options: Any) -> None:
    """Compare the definition, ``impl="auto"`` and every reduction with the oracle, to 1e-9."""
    case, tensors = Case(stem, "", dict, options), to_tensors(arrays)
    loss, function = case.loss, case.function()
    expected = loss.oracle(**arrays, **options)
    impls = ({"impl": "definition"}, {"impl": "auto"}) if loss.implementations else ({},)
    reductions = ("none", "mean", "sum") if loss.reduces else (None,)
    for reduction, impl in itertools.product(reductions, impls):
        reduced = expected if reduction is None else oracles.reduce_rows(*expected, reduction)
        impl = impl if reduction is None else {**impl, "reduction": reduction}
        value = function(**tensors, **impl)
        np.testing.assert_allclose(value.numpy(), reduced, rtol=1e-9, atol=1e-9)
