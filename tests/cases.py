"""One table of calls, a row for every option of every loss, pooling, head and objective.

The contract tests (tests/losses/test_contract.py) and the tests on several ranks loop over it. To
add a loss:

1. Write its oracle in tests/oracles.py, in NumPy loops, named like the loss. It takes the arrays
   and hyperparameters; where the loss has a ``reduction``, it yields a value a row, or ``None``.
2. Add a ``Loss`` to ``LOSSES``: its names, and of each tensor, in order, the shape and roles, as in
   ``"B N D or N D, grad, private"``. B is the batch; " or " parts shapes that differ in the
   number of dimensions. Roles are ``grad`` (differentiable), ``mask``, ``buffer`` (the module keeps
   it), ``void 0`` (a 0 in it makes a row not valid), ``private`` (a row of it concerns no other
   row) and ``csr`` (it may be a CSR tensor). ``bad`` are values of hyperparameters to be refused
   besides those of ``REFUSED``.
3. Add one ``Case`` or more to ``BASE_CASES``, the plainest first: a function that makes the arrays
   for any batch size, and hyperparameters.
"""

import inspect
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tests import oracles

B, D, V, S, N, C, L = 4, 5, 11, 6, 3, 5, 4
Arrays = dict[str, np.ndarray]
Rng = np.random.Generator


class Loss:
    """What all calls of one loss share: ``stem: Module``, and its tensors with shapes and roles."""

    def __init__(
        self,
        names: str,
        *,
        implementations: tuple[str, ...] = (),  # beside the definition
        bad: Any = (),  # a dict of values of hyperparameters that must be refused
        function: str = "",  # where it is neither `<stem>_loss` nor a layer's `<stem>`
        layer_oracle: Callable[..., float] | None = None,  # of a layer: of what `weigh` returns
        call: Callable[..., torch.Tensor] | None = None,  # where it is no function of the package
        **tensors: str,
    ) -> None:
        self.stem, _, self.module = names.partition(": ")
        self.tensors, self.implementations, self.bad = tensors, implementations, dict(bad)
        self.function = function or (self.stem if layer_oracle else f"{self.stem}_loss")
        self.oracle = layer_oracle or getattr(oracles, self.stem)
        self.layer_oracle, self.call = layer_oracle, call
        self.constructor = self.those("buffer")

    def shapes(self, name: str) -> list[str]:
        return self.tensors[name].split(", ")[0].split(" or ")

    def those(self, role: str) -> tuple[str, ...]:
        return tuple(n for n, roles in self.tensors.items() if role in roles.split(", ")[1:])

    @cached_property
    def hyperparameters(self) -> dict[str, Any]:
        """The function's, with their defaults."""
        import sparse_losses.functional as F

        function = self.call or getattr(F, self.function)
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.name not in self.tensors}

    @property
    def reduces(self) -> bool:
        return "reduction" in self.hyperparameters

    @property
    def reductions(self) -> tuple[str | None, ...]:
        """Those that it takes; ``None`` where it has no such argument."""
        return ("none", "mean", "sum") if self.reduces else (None,)

    @property
    def numbers(self) -> list[str]:
        """Hyperparameters whose default is a float."""
        return [name for name, default in self.hyperparameters.items() if type(default) is float]

    @property
    def refused(self) -> list[tuple[str, Any]]:
        """Hyperparameters that must be refused."""
        tables = dict.fromkeys(self.numbers, (float("nan"),)), REFUSED, self.bad
        pairs = [(n, value) for table in tables for n, values in table.items() for value in values]
        return [(name, value) for name, value in pairs if name in self.hyperparameters]


def by_stem(*losses: Loss) -> dict[str, Loss]:
    return {loss.stem: loss for loss in losses}


def weigh(*outputs: Any) -> Any:
    """A layer's outputs as one number, to which no two of the last dimension give alike."""
    tensors = [torch.as_tensor(x) for x in outputs]
    weights = torch.linspace(0.5, 1.5, tensors[0].shape[-1], dtype=torch.float64)
    weighed = [x * weights.to(x.device, x.dtype) for x in tensors]
    return sum(n * x.sum() for n, x in enumerate(weighed, start=1))


REFUSED = {  # by every loss that has the hyperparameter
    "gather": ("yes", 1, None),
    "reduction": ("avg", None),
    "impl": ("cuda", None),
    "estimator": ("ustat",),
    "similarity": ("manhattan",),
    "ignore_token_ids": ([V], [-1], 1, [[1]], "1"),
    "temperature": (0.0, -1.0, float("inf"), 10**400, "0.07", None, torch.ones(1), torch.ones(2)),
}

LOSSES = by_stem(
    Loss(
        "info_nce: InfoNCELoss",
        anchor="B D, grad, private, csr",
        positive="B D, grad, csr",
        negative="N D or B N D, grad, private, csr",
        positive_ids="B",
        positive_mask="B B, mask, void 0",
        candidate_mask="B B, mask, void 0",  # and a column a negative
        bad={
            "similarity": ("euclidean",),
            "symmetric": ("False",),
            "decoupled": (None,),
            "negatives_from": ("document", ("query",), ("document", "passage")),
            "false_negative_margin": (float("inf"), "0.1"),
            "false_negative_ratio": (-0.1,),
        },
        implementations=("direct", "blocks", "nonzeros"),
    ),
    Loss(
        "info_nce_from_scores: InfoNCEFromScoresLoss",
        scores="B C, grad, private",
        positive_mask="B C, mask, void 0",
        candidate_mask="B C, mask",
        function="info_nce_from_scores",
    ),
    Loss(
        "n_pair: NPairLoss",
        anchor="B D, grad, csr",
        positive="B D, grad, csr",
        negative="N D or B N D, grad, csr",
    ),
    Loss(
        "pairwise_contrastive: PairwiseContrastiveLoss",
        x1="B D, grad",
        x2="B D, grad",
        same="B, mask",
        bad={"margin": ("1",)},
    ),
    Loss(
        "triplet_margin: TripletMarginLoss",
        anchor="B D, grad, private",
        positive="B D, grad, private",
        negative="B D or B N D, grad, private",
        candidate_mask="B N, mask, void 0",
    ),
    Loss(
        "self_reconstruction: SelfReconstructionLoss",
        activations="B V, grad",
        input_ids="B S",
        attention_mask="B S, mask",
        bad={"balanced": (1,)},
    ),
    Loss(
        "positive_activation: PositiveActivationLoss",
        activations="B V, grad, private, csr",
        positive_input_ids="B S",
        positive_attention_mask="B S, mask, void 0",
        token_weight="V, buffer",
        bad={"saturating": (1,)},
    ),
    Loss(
        "flops: FlopsLoss",
        activations="B V, grad, csr",
        token_weight="V, buffer",
        bad={"threshold": (-1, "5", float("nan"))},
    ),
    Loss(
        "idf_flops: IdfFlopsLoss",
        activations="B V, grad, csr",
        token_penalty="V, buffer",
        bad={"threshold": (-1,)},
    ),
    Loss(
        "min_activation: MinActivationLoss",
        activations="B V, grad, private, csr",
        token_counts="B, void 0",
        bad={"top_k": (0, -1, 2.5, V + 1)},
    ),
    Loss(
        "language_penalty: LanguagePenaltyLoss",
        activations="B V, grad, csr",
        token_penalty="V, buffer",
    ),
    Loss(
        "distillation: DistillationLoss",
        student_scores="B C, grad, private",
        teacher_scores="B C, private",
        candidate_mask="B C, mask, void 0",
        bad={"standardize": ("column",), "alpha_kl": (-1.0,), "alpha_mse": (-1.0,)},
    ),
    Loss(
        "margin_mse: MarginMSELoss",
        student_positive="B, grad, private",
        student_negative="B or B N, grad, private",
        teacher_positive="B, void -inf",
        teacher_negative="B or B N, private",
        candidate_mask="B or B N, mask",
    ),
    Loss(
        "ranknet: RankNetLoss",
        student_scores="B C, grad, private",
        teacher_scores="B C, private",
        candidate_mask="B C, mask, void 0",
    ),
    Loss(
        "masked_logit_mse: MaskedLogitMSELoss",
        student_logits="B V, grad, private",
        teacher_logits="B V, private",
    ),
    Loss(
        "nws: NWSLoss",
        query="B D, grad, private",
        query_labels="B L, mask, void 0",
        prototype="L D, grad",
        label_similarity="L L, buffer",
        key="K D",
        key_labels="K L, mask",
        queue="Q D",
        queue_labels="Q L, mask",
        queue_mask="Q, mask",
        bad={"aggregation": ("sum",), "alpha": (-1.0,), "beta": (-1.0,), "eps": (-1e-8,)},
    ),
)


def _pooled(logits: Any, attention_mask: Any, return_logits: bool = False, **options: Any) -> float:
    outputs = [oracles.splade_pool(logits, attention_mask, **options)]
    if return_logits:
        outputs.append(oracles.pooled_logits(logits, attention_mask, options.get("softcap")))
    return weigh(*outputs).item()


def _headed(
    return_logits: bool = False,
    attention_mask: Any = None,
    activation: str = "relu",
    threshold: float | None = None,
    **arrays: Any,
) -> float:
    logits = oracles.head_logits(mask=attention_mask, **arrays)
    outputs = [oracles.head_activations(logits, activation=activation, threshold=threshold)]
    return weigh(*outputs, *([logits] if return_logits else [])).item()


OBJECTIVE = {  # of each term the weight, its builder, and the side that this takes
    "info_nce": (1.0, "info_nce"),
    "distillation": (0.5, "distillation"),
    "context_distillation": (0.4, "context_distillation"),
    "query_flops": (0.3, "flops", "query"),
    "document_flops": (0.7, "flops", "document"),
    "query_min_activation": (0.2, "min_activation", "query"),
    "document_self_reconstruction": (0.6, "self_reconstruction", "document"),
    "query_positive_activation": (0.8, "positive_activation", "query"),
    "document_language_penalty": (0.1, "language_penalty", "document"),
    "triplet_margin": (0.9, "triplet_margin"),  # these two of own negatives
    "margin_mse": (0.35, "margin_mse"),
}


def _objective_of(
    query, document, document_ids, document_mask, teacher, context, penalty, negative=None
) -> torch.Tensor:
    """Every term at once, as a function of tensors."""
    import sparse_losses as s
    from sparse_losses.objective import terms

    built = {}
    for name, (weight, builder, *given) in OBJECTIVE.items():
        if builder == "language_penalty":
            given.append(s.LanguagePenaltyLoss(penalty))
        if negative is not None or builder not in ("triplet_margin", "margin_mse"):
            built[name] = (weight, getattr(terms, builder)(*given))
    objective = s.SpladeObjective(built)
    own = None
    if negative is not None:  # its tokens are the positives' here: [B, 1, S]
        shape = (-1, negative.shape[1], -1)
        words = (x[:, None].expand(*shape) for x in (document_ids, document_mask))
        own = s.Texts(negative, *words)
    texts = s.Texts(query), s.Texts(document, document_ids, document_mask), own
    scores = {"teacher_scores": teacher, "teacher_anchor_scores": context}
    batch = s.SpladeBatch(*texts, **scores, teacher_candidates="batch")
    return objective(batch).total


def _objective_in_fp64(**arrays: Any) -> float:
    """That it is the weighted sum of its losses, tests/objective/test_objective.py says."""
    return _objective_of(**to_tensors(arrays)).item()


LOGITS = {"logits": "B S V, grad, private", "attention_mask": "B S, mask, void 0"}

# They return a vector a text, or a number a token, and have no module of that name.
LAYERS = by_stem(
    Loss("splade_pool", **LOGITS, implementations=("nonzeros",), layer_oracle=_pooled),
    Loss(
        "token_weights",
        **LOGITS,
        layer_oracle=lambda *args, **arrays: weigh(oracles.token_weights(*args, **arrays)).item(),
    ),
    Loss(
        "splade_head",
        hidden="B S D, grad, private",
        weight="V D, grad",
        bias="V, grad",
        attention_mask="B S, mask, void 0",
        gate="B V, grad",
        implementations=("packed", "tiles"),
        layer_oracle=_headed,
    ),
    Loss(
        "objective",
        query="B V, grad",
        document="B V, grad",
        document_ids="B S",
        document_mask="B S, mask",
        teacher="B B",  # with negatives [B, B + N]
        context="B B",
        penalty="V",
        negative="B N V, grad",
        layer_oracle=_objective_in_fp64,
        call=_objective_of,
    ),
)


@dataclass(frozen=True)
class Case:
    """One call: the arrays of its tensors for any batch size, and its hyperparameters."""

    stem: str
    name: str
    make: Callable[[Rng, int], Arrays]
    kwargs: dict[str, Any] = field(default_factory=dict)
    not_private: tuple[str, ...] = ()  # in this call
    implementations: tuple[str, ...] | None = None  # that support the call; by default all
    impl: str | None = None  # how it is computed; by default without the argument

    def __post_init__(self) -> None:
        if self.implementations is None:
            object.__setattr__(self, "implementations", self.loss.implementations)

    @property
    def id(self) -> str:
        return f"{self.stem}-{self.name}" + (f"-{self.impl}" if self.impl else "")

    @property
    def loss(self) -> Loss:
        return LOSSES.get(self.stem) or LAYERS[self.stem]

    @cached_property
    def dims(self) -> dict[str, list[str]]:
        """The names of the dimensions of each tensor of the call."""
        dims = {}
        for name, array in self.arrays().items():
            if array is not None:
                shapes = (shape.split() for shape in self.loss.shapes(name))
                dims[name] = next(shape for shape in shapes if len(shape) == array.ndim)
        return dims

    def those(self, role: str) -> tuple[str, ...]:
        """Tensors of the call that have this role."""
        return tuple(name for name in self.loss.those(role) if name in self.dims)

    @property
    def rows(self) -> tuple[str, ...]:
        """Tensors whose first dimension is the batch."""
        return tuple(n for n, dims in self.dims.items() if dims[0] == "B" and dims != ["B", "B"])

    @property
    def square(self) -> tuple[str, ...]:
        """Tensors with the batch in both dimensions."""
        return tuple(n for n, dims in self.dims.items() if dims == ["B", "B"])

    @property
    def free(self) -> list[tuple[str, int]]:
        """Dimensions that no other tensor shares."""
        count = Counter(dim for dims in self.dims.values() for dim in dims)
        pairs = ((n, i, dim) for n, dims in self.dims.items() for i, dim in enumerate(dims))
        return [(name, i) for name, i, dim in pairs if count[dim] == 1]

    @property
    def differentiable(self) -> tuple[str, ...]:
        return self.those("grad")

    @property
    def masks(self) -> tuple[str, ...]:
        return self.those("mask")

    @property
    def invalidate(self) -> tuple[str, float] | None:
        """The tensor and the value in it that make a row not valid."""
        for name in self.dims:
            for role in self.loss.tensors[name].split(", ")[1:]:
                if role.startswith("void "):
                    return name, float(role.removeprefix("void "))
        return None

    @property
    def private(self) -> tuple[str, ...]:
        """Tensors of which a row is seen by no other row."""
        rows = (name for name in self.those("private") if name in self.rows)
        return tuple(name for name in rows if name not in self.not_private)

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
        return oracles.reduce_rows(value, reduction) if self.loss.reduces else value

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
    tensors: dict[str, Any] = dict(arrays)
    for name, array in arrays.items():
        if array is not None:
            tensor = torch.from_numpy(np.array(array))
            tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensors


def sparse_pair(
    case: Case, tensors: dict[str, Any], index: torch.dtype = torch.int64
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a call with zeros in its matrices, dense and with these as CSR tensors, as leaves."""
    generator = torch.Generator().manual_seed(0)
    dense, sparse = dict(tensors), dict(tensors)
    for name in case.those("csr"):
        x = tensors[name]
        if x.ndim == 2:
            kept = torch.rand(x.shape, generator=generator) < 0.6
            kept[:2] = True
            x = (x.abs() if case.stem == "min_activation" else x) * kept
            x[-1:] = 0 * x[-1:] if case.stem not in ("info_nce", "n_pair") else x[-1:]
            dense[name] = x.requires_grad_()
            csr = x.detach().to_sparse_csr()
            parts = csr.crow_indices().to(index), csr.col_indices().to(index), csr.values()
            csr = torch.sparse_csr_tensor(*parts, x.shape, check_invariants=True)
            sparse[name] = csr.requires_grad_()
    return dense, sparse


def to_arrays(tensors: dict[str, torch.Tensor]) -> Arrays:
    """Convert tensors back, exactly, to what the oracles read."""
    arrays: dict[str, Any] = dict(tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            tensor = tensor.detach()
            arrays[name] = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    return arrays


# Factories ----------------------------------------------------------------------------------------


def _factory(make: Callable[..., Arrays]) -> Callable[..., Callable[..., Arrays]]:
    """Take the options now, the generator and the batch size later."""
    return lambda *options, **named: lambda rng, batch: make(rng, batch, *options, **named)


@_factory
def _pairs(rng: Rng, batch: int, negative=None, ids=False, mask=False, candidates=False) -> Arrays:
    arrays = {"anchor": rng.normal(size=(batch, D)), "positive": rng.normal(size=(batch, D))}
    if negative:
        shapes = {"shared": (N, D), "row": (batch, D)}
        arrays["negative"] = rng.normal(size=shapes.get(negative, (batch, N, D)))
    if negative == "ragged":
        arrays["candidate_mask"] = np.arange(N) <= np.arange(batch)[:, None]
    if ids:
        arrays["positive_ids"] = np.arange(batch) // 2 * 7  # rows 0 and 1 share one, 2 and 3
    if mask:
        some = rng.random((batch, batch)) < 0.3
        arrays["positive_mask"] = some | np.roll(np.eye(batch, dtype=bool), 1, axis=1)
    if candidates:  # a row keeps its positive and a key of another id
        width = batch + (N if negative else 0)
        own = np.eye(batch, width, dtype=bool)
        kept = own | np.roll(own, 2, axis=0) | (rng.random((batch, width)) < 0.6)
        kept[:1, batch:] = True  # every negative is a candidate somewhere
        arrays["candidate_mask"] = kept
    return arrays


def _same(rng: Rng, batch: int) -> Arrays:
    pairs = {name: rng.normal(size=(batch, D)) for name in ("x1", "x2")}
    return {**pairs, "same": np.arange(batch) % 2 == 0}


def _labels(rng: Rng, rows: int) -> np.ndarray:
    """Return multi-hot labels, every row with at least one."""
    labels = rng.random((rows, L)) < 0.4
    labels[np.arange(rows), rng.integers(0, L, rows)] = True
    return labels.astype(np.int64)


@_factory
def _nws(rng: Rng, batch: int, key=False, queue=False, mask=False, similar=True) -> Arrays:
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


@_factory
def _activations(
    rng: Rng, batch: int, penalty=False, counts=False, signed=False, weight=False
) -> Arrays:
    values = rng.normal(size=(batch, V))
    if not signed:  # sparse, but no column and no top of a row is all zero: there are kinks
        active = rng.random((batch, V)) < 0.8
        active[:2] = True
        values = np.log1p(np.abs(values)) * active
    arrays = {"activations": values}
    if penalty:
        arrays["token_penalty"] = rng.random(V) * 3
    if counts:
        arrays["token_counts"] = np.arange(batch) + 1
    if weight:
        arrays["token_weight"] = rng.random(V) * 2
    return arrays


@_factory
def _tokens(rng: Rng, batch: int, prefix="", weight=False) -> Arrays:
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


@_factory
def _scores(rng: Rng, batch: int, mask=False, infinite=False) -> Arrays:
    names = ("student_scores", "teacher_scores")
    arrays = {name: rng.normal(size=(batch, C)) * 3 for name in names}
    if mask:
        arrays["candidate_mask"] = np.ones((batch, C), dtype=bool)
        arrays["candidate_mask"][1:2, 2] = False
        arrays["candidate_mask"][2:3, :3] = False
    if infinite:
        arrays["teacher_scores"][:1, 1] = -np.inf
        arrays["teacher_scores"][3:4] = -np.inf
    return arrays


def _two_logits(rng: Rng, batch: int) -> Arrays:
    logits = {f"{whose}_logits": rng.normal(size=(batch, V)) for whose in ("student", "teacher")}
    for x in logits.values():
        x[3:4] = -np.abs(x[3:4])  # a row that neither activates
    logits["student_logits"][:1] = np.linspace(5.8, 6.8, V)  # thresholds up here count, too
    return logits


@_factory
def _score_table(rng: Rng, batch: int, candidates=False, several=False) -> Arrays:
    arrays: Arrays = {"scores": rng.normal(size=(batch, C)) * 3}
    arrays["positive_mask"] = np.eye(batch, C, dtype=bool)
    if several:
        arrays["positive_mask"] |= rng.random((batch, C)) < 0.3
    if candidates:
        arrays["candidate_mask"] = arrays["positive_mask"] | (rng.random((batch, C)) < 0.7)
    return arrays


@_factory
def _margins(rng: Rng, batch: int, infinite=False, several=False, mask=False) -> Arrays:
    arrays = {}
    for whose, which in itertools.product(("student", "teacher"), ("positive", "negative")):
        is_list = several and which == "negative"
        arrays[f"{whose}_{which}"] = rng.normal(size=(batch, N) if is_list else batch)
    if infinite:
        arrays["teacher_negative"][:1] = -np.inf
    if mask:
        arrays["candidate_mask"] = np.arange(N) <= np.arange(batch)[:, None]
        arrays["teacher_negative"][2:3, 1] = -np.inf
    return arrays


def _logits(rng: Rng, batch: int) -> Arrays:
    mask = rng.random((batch, S)) < 0.7
    mask[:, 1] = True
    return {"logits": rng.normal(size=(batch, S, V)) * 2, "attention_mask": mask}


@_factory
def _hidden(rng: Rng, batch: int, bias=False, mask=False, gate=False) -> Arrays:
    arrays = {"hidden": rng.normal(size=(batch, S, D)), "weight": rng.normal(size=(V, D))}
    if bias:
        arrays["bias"] = rng.normal(size=V)
    if mask:
        arrays["attention_mask"] = rng.random((batch, S)) < 0.7
        arrays["attention_mask"][:, 1] = True
    if gate:
        arrays["gate"] = rng.random((batch, V))
    return arrays


@_factory
def _objective(rng: Rng, batch: int, negative=False) -> Arrays:
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


# The table ----------------------------------------------------------------------------------------


DENSE = ("direct", "blocks")  # those that support negatives per row


def _info_nce(
    name, negative=None, ids=False, mask=False, candidates=False, implementations=None, **kwargs
) -> Case:
    kwargs = {"temperature": 0.3, **kwargs}
    more = kwargs.get("symmetric") or "query" in kwargs.get("negatives_from", ())
    arrays = _pairs(negative, ids, mask, candidates)
    return Case("info_nce", name, arrays, kwargs, ("anchor",) if more else (), implementations)


def _nws_case(name: str, arrays: dict, **kwargs) -> Case:
    return Case("nws", name, _nws(**arrays), {"temperature": 0.3, **kwargs})


def _by_implementation(cases: tuple[Case, ...], *impls: str) -> tuple[Case, ...]:
    """Each case by the definition and by ``impls``, or by its implementations, where it has any."""
    return tuple(
        replace(case, impl=impl)
        for case in cases
        for impl in (
            ("definition", *(impls or case.implementations)) if case.implementations else (None,)
        )
    )


ALL_REFERENCES = {"key": True, "queue": True, "mask": True}
KEYS_AND_QUEUE = {"key": True, "queue": True}
BOTH = {"symmetric": True}
BOTH_DECOUPLED = {"symmetric": True, "decoupled": True}
ALONE = {"implementations": ()}  # by the definition
OUTSIDE = {"in_batch": False}
BOUNDS = {"false_negative_margin": 0.4, "false_negative_ratio": 0.9}
FROM_ALL = {"negatives_from": ("document", "query", "positive"), "decoupled": True}
FAR = {"similarity": "euclidean", "margin": 4.0}
UNBIASED = {"estimator": "unbiased"}
BY_ROW = {"standardize": "row"}
WEIGHTED = _tokens("positive_", weight=True)

BASE_CASES = (
    _info_nce("plain"),
    _info_nce("dot", similarity="dot", temperature=1.5),
    _info_nce("shared", "shared"),
    _info_nce("per_row", "per_row", implementations=DENSE),
    _info_nce("shared_only", "shared", **OUTSIDE),
    _info_nce("per_row_only", "per_row", **OUTSIDE, implementations=DENSE),
    _info_nce("symmetric", **BOTH),
    _info_nce("symmetric_shared", "shared", **BOTH),
    _info_nce("symmetric_per_row", "per_row", **BOTH, similarity="dot", implementations=DENSE),
    _info_nce("ids", ids=True),
    _info_nce("ids_symmetric_decoupled", ids=True, **BOTH_DECOUPLED, **ALONE),
    _info_nce("positives", mask=True, **ALONE),
    _info_nce("positives_decoupled", "shared", mask=True, decoupled=True, **ALONE),
    _info_nce("positives_ids_symmetric_decoupled", "shared", True, True, **BOTH_DECOUPLED, **ALONE),
    _info_nce("decoupled", decoupled=True, **ALONE),
    _info_nce("candidates", "shared", candidates=True),
    _info_nce("candidates_symmetric", "per_row", candidates=True, **BOTH, implementations=DENSE),
    _info_nce("candidates_decoupled", ids=True, candidates=True, **BOTH_DECOUPLED, **ALONE),
    _info_nce("false_negatives", "shared", false_negative_margin=0.3, false_negative_ratio=0.9),
    _info_nce("false_negatives_symmetric", ids=True, **BOTH, false_negative_margin=0.2),
    _info_nce("false_negatives_positives", mask=True, candidates=True, **BOTH, **BOUNDS, **ALONE),
    _info_nce("from_queries", negatives_from=("document", "query"), **BOTH, **ALONE),
    _info_nce("from_positives", ids=True, negatives_from=("document", "positive"), **ALONE),
    _info_nce("from_all", "per_row", mask=True, candidates=True, **BOUNDS, **FROM_ALL, **ALONE),
    Case("info_nce_from_scores", "one", _score_table()),
    Case("info_nce_from_scores", "several", _score_table(several=True)),
    Case("info_nce_from_scores", "candidates", _score_table(True, True)),
    Case("info_nce_from_scores", "decoupled", _score_table(True, True), {"decoupled": True}),
    Case("info_nce_from_scores", "warm", _score_table(True, True), {"temperature": 0.3}),
    Case("n_pair", "in_batch", _pairs()),
    Case("n_pair", "shared", _pairs("shared")),
    Case("n_pair", "per_row", _pairs("per_row")),
    Case("pairwise_contrastive", "apart", _same, {"margin": 1.0}),
    Case("pairwise_contrastive", "inside_margin", _same, {"margin": 6.0}),
    Case("triplet_margin", "cosine", _pairs("row")),
    Case("triplet_margin", "dot", _pairs("row"), {"similarity": "dot", "margin": 2.0}),
    Case("triplet_margin", "euclidean", _pairs("row"), FAR),
    Case("triplet_margin", "many", _pairs("per_row")),
    Case("triplet_margin", "ragged", _pairs("ragged"), {"margin": 2.0}),
    Case("triplet_margin", "ragged_euclidean", _pairs("ragged"), FAR),
    _nws_case("prototypes", {"similar": False}),
    _nws_case("key", {"key": True}),
    _nws_case("queue", {"queue": True}),
    _nws_case("all", ALL_REFERENCES, alpha=0.5, beta=2.0),
    _nws_case("max", ALL_REFERENCES, aggregation="max"),
    _nws_case("coupled", KEYS_AND_QUEUE, decoupled=False),
    _nws_case("exact", ALL_REFERENCES, eps=0.0, alpha=0.9),
    _nws_case("large_eps", KEYS_AND_QUEUE, eps=0.2, alpha=3.0, decoupled=False),
    Case("flops", "biased", _activations()),
    Case("flops", "unbiased", _activations(), UNBIASED),
    Case("flops", "weighted", _activations(weight=True)),
    Case("flops", "threshold", _activations(), {"threshold": 9}),
    Case("flops", "all", _activations(weight=True), UNBIASED | {"threshold": 9}),
    Case("idf_flops", "biased", _activations(penalty=True)),
    Case("idf_flops", "signed", _activations(penalty=True, signed=True), {"beta": 2.0}),
    Case("idf_flops", "unbiased", _activations(penalty=True), UNBIASED | {"beta": 0.7}),
    Case("idf_flops", "threshold", _activations(penalty=True), {"threshold": 9}),
    Case("min_activation", "plain", _activations(), {"threshold": 3.0}),
    Case("min_activation", "counted", _activations(counts=True), {"threshold": 3.0, "top_k": 3}),
    Case("min_activation", "signed", _activations(signed=True), {"threshold": 0.9, "top_k": 10}),
    Case("language_penalty", "plain", _activations(penalty=True)),
    Case("self_reconstruction", "plain", _tokens()),
    Case("self_reconstruction", "ignored", _tokens(), {"ignore_token_ids": [0, 3, 3, 5]}),
    Case("self_reconstruction", "balanced", _tokens(), {"balanced": True}),
    Case("self_reconstruction", "both", _tokens(), {"balanced": True, "ignore_token_ids": (2, 4)}),
    Case("positive_activation", "plain", _tokens("positive_")),
    Case("positive_activation", "weighted", WEIGHTED),
    Case("positive_activation", "saturating", _tokens("positive_"), {"saturating": True}),
    Case("positive_activation", "all", WEIGHTED, {"saturating": True, "ignore_token_ids": [1, 3]}),
    Case("distillation", "batch", _scores()),
    Case("distillation", "row", _scores(), BY_ROW | {"temperature": 1.0}),
    Case("distillation", "masked", _scores(mask=True)),
    Case("distillation", "masked_row", _scores(True), BY_ROW | {"alpha_kl": 0.4, "alpha_mse": 1.2}),
    Case("distillation", "infinite", _scores(infinite=True)),
    Case("margin_mse", "plain", _margins()),
    Case("margin_mse", "infinite", _margins(infinite=True)),
    Case("margin_mse", "several", _margins(several=True)),
    Case("margin_mse", "ragged", _margins(several=True, mask=True)),
    Case("masked_logit_mse", "plain", _two_logits),
    Case("masked_logit_mse", "threshold", _two_logits, {"threshold": 0.5}),
    Case("ranknet", "plain", _scores(), {"temperature": 0.7}),
    Case("ranknet", "masked", _scores(mask=True)),
    Case("ranknet", "infinite", _scores(True, True)),
)

HEAD = {"bias": True, "mask": True, "gate": True}
CAPPED = {"activation": "log1p_relu", "softcap": 1.5, "threshold": 0.125}

LAYER_CASES = (
    Case("splade_pool", "plain", _logits),
    Case("splade_pool", "logits", _logits, {"return_logits": True}),
    Case("splade_pool", "capped", _logits, {**CAPPED, "return_logits": True}),
    Case("token_weights", "plain", _logits),
    Case("splade_head", "plain", _hidden()),
    Case("splade_head", "all", _hidden(**HEAD)),
    Case("splade_head", "all_logits", _hidden(**HEAD), {"return_logits": True}),
    Case("splade_head", "capped_logits", _hidden(**HEAD), {**CAPPED, "return_logits": True}),
)

# Its errors name its own arguments: tests/objective/test_objective.py.
OBJECTIVE_CASES = (
    Case("objective", "pairs", _objective()),
    Case("objective", "negatives", _objective(negative=True)),
)

CASES = _by_implementation(BASE_CASES, "auto")
CASES_AND_LAYERS = CASES + _by_implementation(LAYER_CASES + OBJECTIVE_CASES)
FIRST = {case.stem: case for case in reversed(BASE_CASES)}  # one case a loss, its plainest


def assert_follows_the_formula(stem: str, arrays: Arrays, **options: Any) -> None:
    """Compare the definition, ``impl="auto"`` and every reduction with the oracle, to 1e-9."""
    case, tensors = Case(stem, "", dict, options), to_tensors(arrays)
    loss, function = case.loss, case.function()
    expected = loss.oracle(**arrays, **options)
    expected = list(expected) if loss.reduces else expected
    impls = ({"impl": "definition"}, {"impl": "auto"}) if loss.implementations else ({},)
    for reduction, impl in itertools.product(loss.reductions, impls):
        reduced = expected if reduction is None else oracles.reduce_rows(expected, reduction)
        impl = impl if reduction is None else {**impl, "reduction": reduction}
        value = function(**tensors, **impl)
        assert value.shape == np.shape(reduced)
        np.testing.assert_allclose(value.numpy(), reduced, rtol=1e-9, atol=1e-9)
