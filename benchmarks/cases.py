"""The table of cases: every loss, its sizes, its inputs, its variants and its floor.

A *family* is a loss with all that is needed to call it; a *case* is a family at a size. To add a
loss, add its plain formula to ``eager.py`` and a family here.
"""

import functools
import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks import eager, peers

__all__ = [
    "DTYPES",
    "FAMILIES",
    "Case",
    "Family",
    "Maker",
    "Sizes",
    "Variant",
    "cases",
    "family",
    "runs_kernels",
]

Sizes = Mapping[str, Any]
Inputs = dict[str, Tensor]
BERT, XLM = 30_522, 250_002
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The suite of the kernels begins with what they are for: a run that ends early has that.
KERNELS_FIRST = ("splade_head", "info_nce", "regularisers", "nws", "distillation")


@dataclass(frozen=True)
class Maker:
    """Draws inputs: one seed, one dtype, one device."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        object.__setattr__(self, "generator", generator)

    def normal(self, *shape: int) -> Tensor:
        """Standard Gaussian."""
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform on [0, 1)."""
        return torch.rand(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Uniform on ``[0, high)``."""
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def zipf(self, rows: int, columns: int, density: float) -> Tensor:
        """Sparse activations: column ``j`` of a random order is active with chance ~ 1 / j.

        A few columns are active in nearly every row, as in a retriever's vectors. Chances are
        capped at 0.95, the scale is found by bisection.
        """
        rank = torch.arange(1, columns + 1, device=self.device, dtype=torch.float64)
        low, high = 0.0, float(columns)
        for _ in range(60):
            scale = (low + high) / 2
            mean = (scale / rank).clamp(max=0.95).mean()
            low, high = (scale, high) if mean < density else (low, scale)
        chance = (high / rank).clamp(max=0.95)
        order = torch.randperm(columns, generator=self.generator, device=self.device)
        chance = chance[order].to(self.dtype)
        values = self.uniform(rows, columns)
        active = values < chance
        # Given that it is below the chance, the draw over the chance is uniform again.
        return values.div_(chance).mul_(2.0).add_(0.05).mul_(active)

    def mask(self, rows: int, length: int, share: float = 0.75) -> Tensor:
        """Attention masks, tokens on that share of positions on average; every row has one."""
        least = 2 * share - 1
        lengths = (length * (least + (1 - least) * self.uniform(rows))).round().clamp(1, length)
        return (torch.arange(length, device=self.device) < lengths[:, None]).long()


@dataclass(frozen=True)
class Variant:
    """One way to compute the loss of a family."""

    name: str
    call: Callable[..., Tensor]
    kind: str = "ours"  # eager, compile, ours or peer
    prepare: Callable[[Inputs], Inputs] | None = None  # another representation of the inputs
    when: Callable[[Sizes], bool] = lambda sizes: True
    at_stored_entries: bool = False  # whether gradients come back at the stored entries only
    package: str = ""  # a peer's
    impl: str = ""  # torch or triton, where that is what the variant is there for


@dataclass(frozen=True)
class Family:
    """A loss and everything needed to measure it."""

    loss: str
    inputs: Callable[[Sizes, Maker], Inputs]
    wrt: tuple[str, ...]
    eager: Callable[..., Tensor]
    variants: tuple[Variant, ...]
    tiny: Sequence[Sizes]  # for tests and for the check in fp64
    quick: Sequence[Sizes]
    full: Sequence[Sizes]  # beside the quick ones
    kernels: Sequence[Sizes] = ()  # what a GPU is asked for
    options: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    num_flops: Callable[[Sizes, Inputs, bool], float] = lambda sizes, inputs, backward: 0.0
    eager_bytes: Callable[[Sizes], float] | None = None
    tolerance: float = 1e-3  # of gradients at full size in fp32, relative to their norm
    # |x| has no slope at 0; whoever differentiates it there chooses one, and choices differ.
    kink_at_zero: bool = False


@dataclass(frozen=True)
class Case:
    """A family at a size."""

    family: Family
    sizes: Sizes
    suite: str = ""

    @property
    def loss(self) -> str:
        """The stem of the loss."""
        return self.family.loss

    @functools.cached_property
    def name(self) -> str:
        """Sizes in one string, which identifies the case within its loss."""
        last = sorted(self.sizes.items(), key=lambda item: item[0] == "dtype")
        return " ".join(_spelt(name, value) for name, value in last)

    @property
    def elements(self) -> int:
        """What sizes are compared by: the elements of what the formula runs over."""
        letters = [self.sizes[x] for x in ("B", "D", "S", "V", "C", "R") if x in self.sizes]
        if self.loss in ("self_reconstruction", "positive_activation", "regularisers"):
            letters = [self.sizes["B"], self.sizes["V"]]
        return math.prod(letters)

    @property
    def group(self) -> str:
        """What is fixed along a line of a plot."""
        fixed = [_spelt(k, v) for k, v in self.sizes.items() if k in ("density", "part", "dtype")]
        return " ".join(fixed)

    @property
    def dtype(self) -> torch.dtype:
        """Of the inputs, where the maker does not draw them in fp64."""
        return DTYPES[self.sizes.get("dtype", "fp32")]

    def inputs(self, maker: Maker) -> Inputs:
        """Leaves that require gradients where the family differentiates.

        Half precision is rounded from fp32: drawn in it, a chance of 0.3% would be none.
        """
        made = self.family.inputs(self.sizes, maker)
        if maker.dtype == torch.float32:
            made = _cast(made, self.dtype)
        for name in self.family.wrt:
            made[name].requires_grad_()
        return made

    def variants(self, device_type: str) -> list[Variant]:
        """The eager formula first, then ours and the peers that can be measured here.

        The suite of the kernels has nothing else of ours where there are two implementations.
        """
        options = self.family.options(self.sizes)
        found = [Variant("eager", functools.partial(self.family.eager, **options), "eager")]
        runs = runs_kernels(device_type, self.suite)
        has_kernel = runs and any(variant.impl for variant in self.family.variants)
        for variant in self.family.variants:
            missing = variant.package and peers.why_missing(variant.package, device_type)
            if missing or not variant.when(self.sizes) or (variant.impl and not runs):
                continue
            is_ours = variant.kind == "ours" and not variant.impl
            if self.suite == "kernels" and is_ours and (has_kernel or variant.name != "ours"):
                continue
            if variant.kind == "ours" and options:
                variant = _with_options(variant, options)
            found.append(variant)
        return found

    def floor(self, inputs: Inputs, *, backward: bool) -> tuple[float, float]:
        """Bytes read and written once, and operations, that no implementation can do without."""
        num_bytes = sum(_bytes(tensor) for tensor in inputs.values())
        # A loss is a number; what is not has an upstream gradient of its own size: forward, that
        # many bytes are written instead of read, and with the backward both.
        if backward:
            num_bytes += _bytes(inputs["upstream"]) if "upstream" in inputs else 0
            num_bytes += sum(_bytes(inputs[name]) for name in self.family.wrt)
        return float(num_bytes), self.family.num_flops(self.sizes, inputs, backward)

    def eager_bytes(self) -> float:
        """Roughly what the eager formula needs beside its inputs."""
        in_fp32 = 4.0 * 6 * self.elements
        if self.family.eager_bytes is not None:
            in_fp32 = self.family.eager_bytes(self.sizes)
        return in_fp32 * self.dtype.itemsize / 4


def _spelt(name: str, value: Any) -> str:
    if name == "density":
        return f"{100 * value:g}%"
    if name == "mask":
        return f"mask={100 * value:g}%"
    return str(value) if name in ("part", "dtype") else f"{name}={value}"


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}


def runs_kernels(device_type: str, suite: str) -> bool:
    """On a GPU; on a CPU only interpreted, which shows that it works, in tiny cases."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device_type == "cuda" or (suite == "tiny" and os.environ.get("TRITON_INTERPRET") == "1")


def _with_options(variant: Variant, options: dict[str, Any]) -> Variant:
    return replace(variant, call=functools.partial(variant.call, **options))


def _bytes(tensor: Tensor) -> int:
    if tensor.layout == torch.sparse_csr:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return sum(part.numel() * part.element_size() for part in parts)
    return tensor.numel() * tensor.element_size()


# The package's own functions, by name, so that the suite runs with those that exist.


def _ours(name: str, **options: Any) -> Callable[..., Tensor]:
    function = getattr(sparse_losses, name)
    return functools.partial(function, **options) if options else function


def _has(name: str) -> bool:
    return hasattr(sparse_losses, name)


def _takes(name: str, argument: str) -> bool:
    if not _has(name):
        return False
    return argument in inspect.signature(getattr(sparse_losses, name)).parameters


def _by_impl(call: Callable[..., Tensor], when: Any = None) -> tuple[Variant, ...]:
    """The two implementations, each asked for by name."""
    when = when or (lambda sizes: True)
    return tuple(
        Variant(f"ours, {impl}", functools.partial(call, impl=impl), when=when, impl=impl)
        for impl in ("torch", "triton")
    )


def _peer(package: str, call: Callable[..., Tensor], when: Any = None) -> Variant:
    return Variant(package, call, "peer", when=when or (lambda sizes: True), package=package)


# Inputs.


def _vectors(sizes: Sizes, make: Maker) -> tuple[Tensor, Tensor]:
    """Anchors and positives, dense or sparse; a positive shares about half with its anchor."""
    rows = sizes["B"]
    if "D" in sizes:
        anchor = make.normal(rows, sizes["D"])
        positive = anchor + 2 * make.normal(rows, sizes["D"])
        return anchor, positive
    anchor = make.zipf(rows, sizes["V"], sizes["density"])
    return anchor, _shared(anchor, sizes, make, 0.5)


def _shared(anchor: Tensor, sizes: Sizes, make: Maker, share: float) -> Tensor:
    """By column, for a share of them the anchor's value, else another text's."""
    kept = make.uniform(*anchor.shape) < share
    return torch.where(kept, anchor, anchor.roll(1 + anchor.shape[0] // 2, 0))


def _pair_inputs(sizes: Sizes, make: Maker) -> Inputs:
    anchor, positive = _vectors(sizes, make)
    return {"anchor": anchor, "positive": positive}


def _n_pair_inputs(sizes: Sizes, make: Maker) -> Inputs:
    anchor, positive = _vectors(sizes, make)
    # Raw dot products of four with the positive: much larger, and the softmax is one-hot and the
    # eager value is lost to cancellation; there is then nothing left to compare.
    length = sizes["D"] if "D" in sizes else sizes["V"] * sizes["density"]
    scale = (4 / length) ** 0.5
    return {"anchor": anchor * scale, "positive": positive * scale}


def _labelled_pair_inputs(sizes: Sizes, make: Maker) -> Inputs:
    x1, x2 = _vectors(sizes, make)
    x1, x2 = nnf.normalize(x1, dim=-1), nnf.normalize(x2, dim=-1)
    return {"x1": x1, "x2": x2, "same": make.integers(2, sizes["B"])}


def _triplet_inputs(sizes: Sizes, make: Maker) -> Inputs:
    anchor, positive = _vectors(sizes, make)
    return {"anchor": anchor, "positive": positive, "negative": positive.roll(1, 0).clone()}


def _text_inputs(sizes: Sizes, make: Maker) -> tuple[Tensor, Tensor]:
    ids = make.integers(sizes["V"], sizes["B"], sizes["S"])
    return ids, make.mask(sizes["B"], sizes["S"], sizes.get("mask", 0.75))


def _reconstruction_inputs(sizes: Sizes, make: Maker) -> Inputs:
    ids, mask = _text_inputs(sizes, make)
    logits = make.normal(sizes["B"], sizes["V"]) - 2
    return {"activations": logits, "input_ids": ids, "attention_mask": mask}


def _positive_inputs(sizes: Sizes, make: Maker) -> Inputs:
    ids, mask = _text_inputs(sizes, make)
    x = make.zipf(sizes["B"], sizes["V"], sizes["density"])
    return {"activations": x, "positive_input_ids": ids, "positive_attention_mask": mask}


def _activation_inputs(sizes: Sizes, make: Maker) -> Inputs:
    return {"activations": make.zipf(sizes["B"], sizes["V"], sizes["density"])}


def _penalised_inputs(sizes: Sizes, make: Maker) -> Inputs:
    return {**_activation_inputs(sizes, make), "token_penalty": make.uniform(sizes["V"])}


def _regulariser_inputs(sizes: Sizes, make: Maker) -> Inputs:
    ids, mask = _text_inputs(sizes, make)
    return {**_penalised_inputs(sizes, make), "input_ids": ids, "attention_mask": mask}


def _score_inputs(sizes: Sizes, make: Maker) -> Inputs:
    student = 5 * make.normal(sizes["B"], sizes["C"])
    return {
        "student_scores": student,
        "teacher_scores": student + 5 * make.normal(sizes["B"], sizes["C"]),
    }


def _margin_inputs(sizes: Sizes, make: Maker) -> Inputs:
    names = ("student_positive", "student_negative", "teacher_positive", "teacher_negative")
    return {name: make.normal(sizes["B"]) for name in names}


def _nws_inputs(sizes: Sizes, make: Maker) -> Inputs:
    num_labels, width = sizes["L"], sizes["F"]

    def labels(rows: int) -> Tensor:
        some = make.uniform(rows, num_labels) < min(3 / num_labels, 0.4)
        return some.scatter(1, make.integers(num_labels, rows, 1), True).to(make.dtype)

    similarity = make.uniform(num_labels, num_labels)
    similarity = torch.maximum(similarity, similarity.T)
    similarity.fill_diagonal_(1.0)
    return {
        "query": make.normal(sizes["B"], width),
        "query_labels": labels(sizes["B"]),
        "prototype": make.normal(num_labels, width),
        "label_similarity": similarity,
        "key": make.normal(sizes["K"], width),
        "key_labels": labels(sizes["K"]),
        "queue": make.normal(sizes["Q"], width),
        "queue_labels": labels(sizes["Q"]),
    }


def _pool_inputs(sizes: Sizes, make: Maker) -> Inputs:
    rows, length, vocabulary = sizes["B"], sizes["S"], sizes["V"]
    mask = make.mask(rows, length)
    logits = make.normal(rows, length, vocabulary)
    hidden = torch.where(mask[:, :, None] > 0, logits, -torch.inf).amax(1)
    logits -= _quantile(hidden, 1 - sizes["density"])
    return {
        "logits": logits,
        "attention_mask": mask,
        "upstream": make.uniform(rows, vocabulary),
    }


def _quantile(x: Tensor, q: float) -> Tensor:
    """Of a sample: ``torch.quantile`` refuses large tensors, and three digits are enough."""
    flat = x.reshape(-1)
    return flat[:: max(1, flat.numel() // 1_000_000)].quantile(q)


def _hidden(make: Maker, rows: int, length: int, width: int) -> Tensor:
    return nnf.layer_norm(make.normal(rows, length, width), (width,))


def _pooled(hidden: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """Pooled scores without a bias, text by text: only their distribution is wanted."""
    rows = [(h[m > 0] @ weight.T).amax(0) for h, m in zip(hidden, mask, strict=True)]
    return torch.stack(rows)


def _head_inputs(sizes: Sizes, make: Maker) -> Inputs:
    rows, vocabulary, width = sizes["B"], sizes["V"], sizes["H"]
    hidden = _hidden(make, rows, sizes["S"], width)
    mask = make.mask(rows, sizes["S"], sizes.get("mask", 0.75))
    weight = make.normal(vocabulary, width).mul_(0.02)
    noise = 0.02 * make.normal(vocabulary)
    pooled = _pooled(hidden, weight, mask) + noise
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": noise - _quantile(pooled, 1 - sizes["density"]),
        "attention_mask": mask,
        "upstream": make.uniform(rows, vocabulary),
    }


def _end_to_end_inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Queries of 16x32 and documents of 32x128 at ``B = 16``: a positive and a negative each."""
    rows, vocabulary, width = sizes["B"], sizes["V"], sizes["H"]
    query = _hidden(make, rows, sizes["S"] // 4, width)
    document = _hidden(make, 2 * rows, sizes["S"], width)
    query_mask, document_mask = make.mask(*query.shape[:2]), make.mask(*document.shape[:2])
    weight = make.normal(vocabulary, width).mul_(0.02)
    pooled = torch.cat(
        [_pooled(query, weight, query_mask), _pooled(document, weight, document_mask)]
    )
    bias = -_quantile(pooled, 1 - sizes["density"])
    return {
        "query_hidden": query,
        "document_hidden": document,
        "weight": weight,
        "bias": bias.expand(vocabulary).clone(),
        "query_mask": query_mask,
        "document_mask": document_mask,
    }


# Floors: operations. Elementwise work is bounded by its bytes; only products count here.


def _objective_inputs(sizes: Sizes, make: Maker) -> Inputs:
    query, document = _vectors(sizes, make)
    query_ids, query_mask = _text_inputs(sizes, make)
    document_ids, document_mask = _text_inputs(sizes, make)
    return {
        "query": query,
        "document": document,
        "query_ids": query_ids,
        "query_mask": query_mask,
        "document_ids": document_ids,
        "document_mask": document_mask,
        "token_penalty": make.uniform(sizes["V"]),
        "teacher_scores": make.normal(sizes["B"], sizes["B"]),
    }


def _objective_flops(sizes: Sizes, inputs: Inputs, backward: bool) -> float:
    return _product_flops(
        sizes, {"anchor": inputs["query"], "positive": inputs["document"]}, backward
    )


def _product_flops(sizes: Sizes, inputs: Inputs, backward: bool) -> float:
    """Multiply-adds of pairs of entries that are both there; the backward has two such products."""
    anchor, positive = inputs["anchor"], inputs["positive"]
    if "D" in sizes:
        pairs = float(sizes["B"]) ** 2 * sizes["D"]
    else:
        counts = [_column_counts(tensor) for tensor in (anchor, positive)]
        pairs = float((counts[0] * counts[1]).sum())
    return 2 * pairs * (3 if backward else 1)


def _column_counts(x: Tensor) -> Tensor:
    if x.layout == torch.sparse_csr:
        return torch.bincount(x.col_indices(), minlength=x.shape[1]).double()
    return (x.detach() != 0).sum(0).double()


def _nws_flops(sizes: Sizes, inputs: Inputs, backward: bool) -> float:
    """Query times references; gradients of query and of prototypes, which alone have them."""
    references = sizes["K"] + sizes["Q"] + sizes["L"]
    forward = 2.0 * sizes["B"] * references * sizes["F"]
    prototypes = 2.0 * sizes["B"] * sizes["L"] * sizes["F"]
    return 2 * forward + prototypes if backward else forward


def _head_flops(sizes: Sizes, inputs: Inputs, backward: bool) -> float:
    """Every attended score once; two products a feature for each active entry."""
    tokens = float(inputs["attention_mask"].sum())
    active = sizes["density"] * sizes["B"] * sizes["V"]
    return 2 * sizes["H"] * (tokens * sizes["V"] + (2 * active if backward else 0))


def _end_to_end_flops(sizes: Sizes, inputs: Inputs, backward: bool) -> float:
    tokens = float(inputs["query_mask"].sum() + inputs["document_mask"].sum())
    active = sizes["density"] * 3 * sizes["B"] * sizes["V"]
    return 2 * sizes["H"] * (tokens * sizes["V"] + (2 * active if backward else 0))


# Variants of ours.


@contextmanager
def _screening(value: str | bool) -> Iterator[None]:
    from sparse_losses.representation import head

    if not hasattr(head, "SCREENING"):
        yield
        return
    before, head.SCREENING = head.SCREENING, value
    try:
        yield
    finally:
        head.SCREENING = before


def _head_variant(name: str, call: Callable[..., Tensor], screening: bool) -> Variant:
    def screened(*args: Any, **kwargs: Any) -> Tensor:
        with _screening(screening):
            return call(*args, **kwargs)

    return Variant(name, screened)


def _head_variants() -> tuple[Variant, ...]:
    found: list[Variant] = []
    if _has("splade_head"):
        call = _ours("splade_head")
        sparse = _ours("splade_head", sparse_grad=True)
        found = [
            Variant("ours", call),
            *_by_impl(call),
            Variant("ours, sparse_grad", sparse),
            _head_variant("ours, screened", call, True),
            _head_variant("ours, unscreened", call, False),
        ]
    found.append(_peer("sentence-transformers", peers.st_splade_head))
    found.append(_peer("sparton", peers.sparton_head))
    return tuple(found)


def _our_end_to_end(
    query_hidden: Tensor,
    document_hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    query_mask: Tensor,
    document_mask: Tensor,
) -> Tensor:
    """The package's pieces, put together as its documentation does."""
    head = sparse_losses.splade_head  # type: ignore[attr-defined]
    queries = head(query_hidden, weight, bias, query_mask)
    documents = head(document_hidden, weight, bias, document_mask)
    positive, negative = documents[: len(queries)], documents[len(queries) :]
    contrast = sparse_losses.info_nce_loss(
        queries, positive, negative, temperature=1.0, similarity="dot"
    )
    flops = sparse_losses.flops_loss
    return contrast + 1e-3 * (flops(queries) + flops(documents))


def _end_to_end_variants() -> tuple[Variant, ...]:
    if not _has("splade_head"):
        return ()
    return (
        Variant("ours", _our_end_to_end),
        _head_variant("ours, screened", _our_end_to_end, True),
        _head_variant("ours, unscreened", _our_end_to_end, False),
    )


def _our_objective(
    query: Tensor,
    document: Tensor,
    query_ids: Tensor,
    query_mask: Tensor,
    document_ids: Tensor,
    document_mask: Tensor,
    token_penalty: Tensor,
    teacher_scores: Tensor,
    **options: Any,
) -> Tensor:
    """The same as :func:`benchmarks.eager.objective`, in one object."""
    weights = {
        "info_nce": 3.0,
        "distillation": 2.0,
        "query_self_reconstruction": 0.5,
        "query_positive_activation": 2.0,
        "query_min_activation": 1.0,
        "query_flops": 0.01,
        "document_flops": 0.01,
    }
    objective = sparse_losses.SpladeObjective(
        weights, flops=sparse_losses.IdfFlopsLoss(token_penalty, beta=0.3), **options
    )
    batch = sparse_losses.SpladeBatch(
        sparse_losses.Texts(query, query_ids, query_mask),
        sparse_losses.Texts(document, document_ids, document_mask),
        teacher_scores=teacher_scores,
    )
    return objective(batch).total


# Kept, as building it is not what is measured.
@functools.lru_cache(maxsize=4)
def _objective_of(
    terms: tuple[str, ...], token_penalty: Tensor | None, threshold: float, **options: Any
) -> torch.nn.Module:
    more: dict[str, Any] = {}
    if token_penalty is not None:
        more["flops"] = sparse_losses.IdfFlopsLoss(token_penalty, beta=0.3)
        more["language_penalty"] = sparse_losses.LanguagePenaltyLoss(token_penalty)
    return sparse_losses.SpladeObjective(
        {f"query_{term}": 1.0 for term in terms},
        min_activation=sparse_losses.MinActivationLoss(threshold=threshold),
        **more,
        **options,
    )


def _regularised(*terms: str) -> Callable[..., Tensor]:
    """Losses of one side's vectors as the terms of an objective, which has the kernel for them."""

    def call(
        activations: Tensor,
        token_penalty: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        threshold: float = 10.0,
        **options: Any,
    ) -> Tensor:
        texts = sparse_losses.Texts(activations, input_ids, attention_mask)
        # No term looks at the positives.
        batch = sparse_losses.SpladeBatch(texts, sparse_losses.Texts(activations.detach()))
        total: Tensor = _objective_of(terms, token_penalty, threshold, **options)(batch).total
        return total

    return call


_our_regularisers = _regularised(
    "flops", "min_activation", "self_reconstruction", "language_penalty"
)


def _one_by_one(
    query: Tensor,
    document: Tensor,
    query_ids: Tensor,
    query_mask: Tensor,
    document_ids: Tensor,
    document_mask: Tensor,
    token_penalty: Tensor,
    teacher_scores: Tensor,
) -> Tensor:
    """The package's losses without the objective, which shares their product."""
    ours = sparse_losses
    unit = nnf.normalize(query, dim=-1), nnf.normalize(document, dim=-1)
    penalised = functools.partial(ours.idf_flops_loss, token_penalty=token_penalty)
    return (
        3.0 * ours.info_nce_loss(query, document)
        + 2.0 * ours.distillation_loss(unit[0] @ unit[1].T, teacher_scores)
        + 0.5 * ours.self_reconstruction_loss(query, query_ids, query_mask)
        + 2.0 * ours.positive_activation_loss(query, document_ids, document_mask)
        + ours.min_activation_loss(query)
        + 0.01 * (penalised(query) + penalised(document))
    )


def _to_csr(inputs: Inputs) -> Inputs:
    """The vectors in compressed rows, as leaves of their own."""
    names = ("anchor", "positive")
    csr = {name: inputs[name].detach().to_sparse_csr().requires_grad_() for name in names}
    return {**inputs, **csr}


def _is_sparse(sizes: Sizes) -> bool:
    return "density" in sizes


def _is_worth(sizes: Sizes) -> bool:
    """At half of the entries, sparse products take minutes and prove nothing."""
    return sizes.get("density", 1.0) <= 0.2


def _is_dense_or_typical(sizes: Sizes) -> bool:
    """Peers do not look at zeros: one density speaks for all."""
    return "D" in sizes or sizes["density"] <= 0.005 or sizes["V"] < 1000


def _is_dense(sizes: Sizes) -> bool:
    return "D" in sizes


def _info_nce_variants() -> tuple[Variant, ...]:
    found = [
        Variant("ours", _ours("info_nce_loss")),
        *_by_impl(_ours("info_nce_loss"), when=_is_dense),
    ]
    if _takes("info_nce_loss", "sparse"):
        found += [
            Variant("ours, sparse=False", _ours("info_nce_loss", sparse=False), when=_is_sparse),
            Variant("ours, sparse=True", _ours("info_nce_loss", sparse=True), when=_is_worth),
            Variant(
                "ours, CSR input",
                _ours("info_nce_loss"),
                prepare=_to_csr,
                when=_is_worth,
                at_stored_entries=True,
            ),
        ]
    found += [
        Variant(
            f"ours, chunk_size={rows}",
            _ours("info_nce_loss", chunk_size=rows),
            when=lambda sizes, rows=rows: _is_dense(sizes) and sizes["B"] > rows,
        )
        for rows in (256, 1024)
    ]
    found += [
        _peer("sentence-transformers", peers.st_info_nce, when=_is_dense_or_typical),
        _peer("pytorch-metric-learning", peers.pml_info_nce, when=_is_dense_or_typical),
        _peer("info-nce-pytorch", peers.info_nce_pytorch, when=_is_dense_or_typical),
        _peer("liger-kernel", peers.liger_info_nce, when=_is_dense),
    ]
    return tuple(found)


def _is_small(sizes: Sizes) -> bool:
    return sizes["B"] <= 1024


def _is_list_kl(sizes: Sizes) -> bool:
    return sizes["part"] == "KL" and sizes["C"] <= 16


_PARTS = {
    "KL": {"alpha_kl": 1.0, "alpha_mse": 0.0},
    "z-MSE": {"alpha_kl": 0.0, "alpha_mse": 1.0},
    "both": {},
}


def _dense(*rows: int, width: int = 768) -> list[Sizes]:
    return [{"B": count, "D": width} for count in rows]


def _sparse(rows: int, vocabulary: int, density: float, **more: Any) -> Sizes:
    return {"B": rows, "V": vocabulary, **more, "density": density}


def _head_size(rows: int, length: int, vocabulary: int, density: float, width: int = 768) -> Sizes:
    return {"B": rows, "S": length, "V": vocabulary, "H": width, "density": density}


def _kernel_head(rows: int, length: int, vocabulary: int, density: float, dtype: str) -> Sizes:
    """Two thirds of the positions are tokens, as in the batches of a trained retriever."""
    size = _head_size(rows, length, vocabulary, density)
    return {**size, "mask": 0.67, "dtype": dtype}


def _scores(rows: int, columns: int, part: str, **more: Any) -> Sizes:
    return {"B": rows, "C": columns, "part": part, **more}


def _nws_size(rows: int, queue: int, width: int, labels: int, **more: Any) -> Sizes:
    return {"B": rows, "K": rows, "Q": queue, "F": width, "L": labels, **more}


def _activation_family(
    loss: str,
    inputs: Callable[[Sizes, Maker], Inputs],
    formula: Callable[..., Tensor],
    **more: Any,
) -> Family:
    """The losses that run over ``[B, V]`` once: one set of sizes for all."""
    peer = more.pop("peers", ())
    alone = _by_impl(_regularised("flops" if loss == "idf_flops" else loss))
    return Family(
        loss,
        inputs,
        ("activations",),
        formula,
        (Variant("ours", _ours(f"{loss}_loss")), *alone, *peer),
        tiny=[_sparse(4, 50, 0.4)],
        quick=[_sparse(2, BERT, 0.05), _sparse(64, BERT, 0.05)],
        full=[
            _sparse(16, BERT, 0.05),
            _sparse(256, BERT, 0.05),
            *[_sparse(64, BERT, share) for share in (0.5, 0.005)],
            _sparse(64, XLM, 0.005),
        ],
        kernels=[_sparse(512, XLM, 0.005, dtype="fp32")],
        **more,
    )


FAMILIES: tuple[Family, ...] = (
    Family(
        "info_nce",
        _pair_inputs,
        ("anchor", "positive"),
        eager.info_nce,
        _info_nce_variants(),
        tiny=[{"B": 5, "D": 8}, _sparse(6, 60, 0.2)],
        quick=[*_dense(64, 256, 1024), _sparse(256, BERT, 0.005)],
        full=[
            *_dense(4096),
            *[_sparse(1024, BERT, share) for share in (0.5, 0.12, 0.05, 0.005)],
            *[_sparse(256, BERT, share) for share in (0.5, 0.15, 0.12, 0.1, 0.05)],
            *[_sparse(64, BERT, share) for share in (0.5, 0.05, 0.005)],
            _sparse(64, XLM, 0.005),
        ],
        kernels=[
            *[{"B": rows, "D": 768, "dtype": "bf16"} for rows in (65_536, 8192, 1024, 256)],
            *[{"B": rows, "D": 768, "dtype": "fp32"} for rows in (8192, 1024)],
        ],
        num_flops=_product_flops,
        eager_bytes=lambda sizes: (
            4.0 * (6 * sizes["B"] ** 2 + 6 * sizes["B"] * sizes.get("D", sizes.get("V", 0)))
        ),
    ),
    Family(
        "n_pair",
        _n_pair_inputs,
        ("anchor", "positive"),
        eager.n_pair,
        (
            Variant("ours", _ours("n_pair_loss")),
            _peer("sentence-transformers", peers.st_n_pair),
            _peer("liger-kernel", peers.liger_n_pair, when=_is_dense),
        ),
        tiny=[{"B": 5, "D": 8}, _sparse(6, 60, 0.2)],
        quick=_dense(64, 1024),
        full=[*_dense(256, 4096), _sparse(256, BERT, 0.05), _sparse(256, BERT, 0.005)],
        kernels=[{"B": 8192, "D": 768, "dtype": "bf16"}],
        num_flops=_product_flops,
    ),
    Family(
        "pairwise_contrastive",
        _labelled_pair_inputs,
        ("x1", "x2"),
        eager.pairwise_contrastive,
        (
            Variant("ours", _ours("pairwise_contrastive_loss")),
            _peer("sentence-transformers", peers.st_pairwise_contrastive),
        ),
        tiny=[{"B": 6, "D": 8}, _sparse(6, 60, 0.3)],
        quick=_dense(64, 4096),
        full=[*_dense(512, 32768), _sparse(64, BERT, 0.05), _sparse(512, BERT, 0.05)],
        kernels=[{"B": 32_768, "D": 768, "dtype": "bf16"}],
    ),
    Family(
        "triplet_margin",
        _triplet_inputs,
        ("anchor", "positive", "negative"),
        eager.triplet_margin,
        (
            Variant("ours", _ours("triplet_margin_loss")),
            _peer("sentence-transformers", peers.st_triplet_margin),
            _peer("pytorch-metric-learning", peers.pml_triplet_margin, when=_is_small),
        ),
        tiny=[{"B": 6, "D": 8}, _sparse(6, 60, 0.3)],
        quick=_dense(64, 4096),
        full=[*_dense(512, 32768), _sparse(64, BERT, 0.05), _sparse(512, BERT, 0.05)],
        kernels=[{"B": 32_768, "D": 768, "dtype": "bf16"}],
    ),
    Family(
        "self_reconstruction",
        _reconstruction_inputs,
        ("activations",),
        eager.self_reconstruction,
        (
            Variant("ours", _ours("self_reconstruction_loss")),
            *_by_impl(_regularised("self_reconstruction")),
        ),
        tiny=[{"B": 4, "S": 6, "V": 30}],
        quick=[{"B": 2, "S": 128, "V": BERT}, {"B": 64, "S": 128, "V": BERT}],
        full=[
            {"B": 16, "S": 128, "V": BERT},
            {"B": 256, "S": 128, "V": BERT},
            {"B": 64, "S": 128, "V": XLM},
        ],
        kernels=[{"B": 512, "S": 256, "V": XLM, "dtype": "fp32"}],
    ),
    Family(
        "positive_activation",
        _positive_inputs,
        ("activations",),
        eager.positive_activation,
        (Variant("ours", _ours("positive_activation_loss")),),
        tiny=[{"B": 4, "S": 6, "V": 30, "density": 0.4}],
        quick=[_sparse(2, BERT, 0.05, S=128), _sparse(64, BERT, 0.05, S=128)],
        full=[
            _sparse(16, BERT, 0.05, S=128),
            _sparse(256, BERT, 0.05, S=128),
            _sparse(64, XLM, 0.005, S=128),
        ],
        kernels=[_sparse(512, XLM, 0.005, S=256, dtype="fp32")],
    ),
    _activation_family(
        "flops",
        _activation_inputs,
        eager.flops,
        peers=(_peer("sentence-transformers", peers.st_flops),),
        kink_at_zero=True,
    ),
    _activation_family("idf_flops", _penalised_inputs, eager.idf_flops),
    _activation_family(
        "min_activation",
        _activation_inputs,
        eager.min_activation,
        # A threshold that no row reaches: a hinge at rest has nothing to compute.
        options=lambda sizes: {"threshold": 10.0},
    ),
    _activation_family("language_penalty", _penalised_inputs, eager.language_penalty),
    Family(
        "regularisers",
        _regulariser_inputs,
        ("activations",),
        eager.regularisers,
        (Variant("ours", _our_regularisers), *_by_impl(_our_regularisers)),
        tiny=[_sparse(4, 60, 0.4, S=12)],
        quick=[_sparse(64, BERT, 0.05, S=128)],
        full=[_sparse(rows, BERT, 0.05, S=128) for rows in (16, 256)],
        kernels=[
            _sparse(512, XLM, 0.005, S=256, dtype="fp32"),
            _sparse(32, XLM, 0.005, S=256, dtype="fp32"),
            _sparse(32, BERT, 0.01, S=256, dtype="fp32"),
        ],
        eager_bytes=lambda sizes: 4.0 * 12 * sizes["B"] * sizes["V"],
    ),
    Family(
        "distillation",
        _score_inputs,
        ("student_scores",),
        eager.distillation,
        (
            Variant("ours", _ours("distillation_loss")),
            *_by_impl(_ours("distillation_loss")),
            _peer("sentence-transformers", peers.st_distillation, when=_is_list_kl),
            _peer("liger-kernel", peers.liger_distillation, when=lambda s: s["part"] == "KL"),
        ),
        tiny=[{"B": 4, "C": 6, "part": part} for part in _PARTS],
        quick=[
            {"B": 1024, "C": 8, "part": "KL"},
            *[{"B": 1024, "C": 1024, "part": part} for part in ("KL", "z-MSE")],
        ],
        full=[
            {"B": 1024, "C": 1024, "part": "both"},
            *[{"B": 256, "C": 256, "part": part} for part in _PARTS],
            *[{"B": 4096, "C": 4096, "part": part} for part in _PARTS],
        ],
        kernels=[
            *[_scores(4096, 4096, part, dtype="fp32") for part in _PARTS],
            *[_scores(1024, columns, "both", dtype="fp32") for columns in (1024, 32)],
        ],
        options=lambda sizes: _PARTS[sizes["part"]],
    ),
    Family(
        "margin_mse",
        _margin_inputs,
        ("student_positive", "student_negative"),
        eager.margin_mse,
        (
            Variant("ours", _ours("margin_mse_loss")),
            _peer("sentence-transformers", peers.st_margin_mse),
        ),
        tiny=[{"B": 7}],
        quick=[{"B": 1024}, {"B": 1_000_000}],
        full=[{"B": 65_536}, {"B": 10_000_000}],
        kernels=[{"B": 10_000_000, "dtype": "fp32"}],
    ),
    Family(
        "nws",
        _nws_inputs,
        ("query", "prototype"),
        eager.nws,
        (Variant("ours", _ours("nws_loss")), *_by_impl(_ours("nws_loss"))),
        tiny=[{"B": 4, "K": 3, "Q": 5, "F": 6, "L": 4}],
        quick=[
            {"B": 8, "K": 8, "Q": 512, "F": 128, "L": 128},
            {"B": 32, "K": 32, "Q": 2048, "F": 128, "L": 128},
        ],
        full=[
            {"B": 256, "K": 256, "Q": 8192, "F": 128, "L": 128},
            {"B": 64, "K": 64, "Q": 8192, "F": 128, "L": 512},
        ],
        # 66,048 references: the keys, the queue and the prototypes.
        kernels=[
            *[_nws_size(1024, 64_512, 256, 512, dtype=name) for name in ("bf16", "fp32")],
            _nws_size(256, 8192, 128, 128, dtype="bf16"),
            _nws_size(32, 2048, 128, 128, dtype="bf16"),
        ],
        num_flops=_nws_flops,
        eager_bytes=lambda sizes: (
            4.0 * 4 * sizes["B"] * (sizes["K"] + sizes["Q"] + sizes["L"]) * sizes["L"]
        ),
    ),
    Family(
        "splade_pool",
        _pool_inputs,
        ("logits",),
        eager.splade_pool,
        (
            Variant("ours", _ours("splade_pool")),
            _peer("sentence-transformers", peers.st_splade_pool),
        ),
        tiny=[{"B": 3, "S": 5, "V": 20, "density": 0.3}],
        quick=[{"B": rows, "S": 64, "V": BERT, "density": 0.05} for rows in (1, 4)],
        full=[
            *[{"B": 8, "S": 128, "V": BERT, "density": share} for share in (0.5, 0.05, 0.005)],
            {"B": 16, "S": 256, "V": BERT, "density": 0.05},
            {"B": 2, "S": 64, "V": XLM, "density": 0.005},
        ],
        kernels=[{"B": 32, "S": 256, "V": BERT, "density": 0.01, "dtype": "bf16"}],
    ),
    Family(
        "splade_head",
        _head_inputs,
        ("hidden", "weight", "bias"),
        eager.splade_head,
        _head_variants(),
        tiny=[_head_size(3, 5, 40, 0.3, width=8)],
        quick=[_head_size(1, 32, BERT, 0.05), _head_size(4, 64, BERT, 0.05)],
        full=[
            *[_head_size(8, 128, BERT, share) for share in (0.5, 0.05, 0.005)],
            _head_size(2, 64, XLM, 0.005),
            _head_size(16, 256, BERT, 0.005),
        ],
        kernels=[
            *[_kernel_head(32, 256, size, 0.01, "bf16") for size in (BERT, XLM)],
            *[_kernel_head(32, 256, size, 1.0, "bf16") for size in (BERT, XLM)],
            *[_kernel_head(8, 128, BERT, 0.01, name) for name in ("bf16", "fp32")],
            _kernel_head(32, 256, BERT, 0.01, "fp32"),
            _kernel_head(2, 32, BERT, 0.01, "bf16"),
        ],
        num_flops=_head_flops,
        eager_bytes=lambda sizes: 4.0 * (5 * sizes["B"] * sizes["S"] + 2 * sizes["H"]) * sizes["V"],
        # Two positions whose scores differ by less than fp32 can tell swap the arg-max here and
        # there; the fp64 check of a small copy has no such ties.
        tolerance=2e-2,
    ),
    Family(
        "end_to_end",
        _end_to_end_inputs,
        ("query_hidden", "document_hidden", "weight", "bias"),
        eager.end_to_end,
        _end_to_end_variants(),
        tiny=[_head_size(3, 8, 40, 0.3, width=8)],
        quick=[_head_size(4, 64, BERT, 0.02)],
        full=[_head_size(8, 128, BERT, 0.02), _head_size(16, 128, BERT, 0.02)],
        num_flops=_end_to_end_flops,
        eager_bytes=lambda sizes: (
            4.0 * (5 * 3 * sizes["B"] * sizes["S"] + 2 * sizes["H"]) * sizes["V"]
        ),
        tolerance=2e-2,
    ),
    Family(
        "objective",
        _objective_inputs,
        ("query", "document"),
        eager.objective,
        (
            Variant("ours", _our_objective),
            *_by_impl(_our_objective),
            Variant("ours, one by one", _one_by_one),
        ),
        tiny=[_sparse(4, 60, 0.4, S=12)],
        quick=[_sparse(32, BERT, 0.02, S=64)],
        full=[
            *[_sparse(rows, BERT, 0.02, S=64) for rows in (64, 128)],
            _sparse(64, XLM, 0.005, S=64),
        ],
        kernels=[_sparse(128, BERT, 0.02, S=256, dtype="fp32")],
        num_flops=_objective_flops,
        eager_bytes=lambda sizes: 4.0 * 16 * sizes["B"] * sizes["V"],
        # What |mean| does not have at a token that no text activates.
        kink_at_zero=True,
    ),
)


def family(loss: str) -> Family:
    """The family of that name."""
    return next(each for each in FAMILIES if each.loss == loss)


def cases(suite: str, only: Sequence[str] = ()) -> list[Case]:
    """The cases of a suite: ``tiny``, ``quick``, or ``full``, which holds the quick ones too.

    ``kernels`` are for a GPU. ``aims`` are those that an aim speaks of, and the densities between
    which a product changes.
    """
    unknown = set(only) - {each.loss for each in FAMILIES}
    if unknown:
        known = ", ".join(each.loss for each in FAMILIES)
        raise SystemExit(f"no such loss: {', '.join(sorted(unknown))}; there are {known}")
    if suite == "aims":
        from benchmarks.summary import AIMS  # which reads tables, which know the cases

        aimed = {(aim.loss, aim.case) for aim in AIMS}
        return [
            replace(case, suite=suite)
            for case in cases("full", only)
            if (case.loss, case.name) in aimed or case.name.startswith("B=256 V=30522 1")
        ]
    found = []
    for each in FAMILIES:
        if only and each.loss not in only:
            continue
        small = {"tiny": each.tiny, "quick": each.quick, "kernels": each.kernels}
        sizes = small.get(suite, [*each.quick, *each.full])
        found += [Case(each, one, suite) for one in sizes]
    if suite == "kernels":
        order = {loss: number for number, loss in enumerate(KERNELS_FIRST)}
        found.sort(key=lambda case: order.get(case.loss, len(order)))
    return found
