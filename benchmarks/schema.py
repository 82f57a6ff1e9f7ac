"""What the benchmark of a loss says: its inputs, sizes, plain formula, variants and aims.

A file in ``losses/`` fills in one :class:`Benchmark`; a :class:`Case` is a benchmark at a size.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ACTIVATION_SIZES",
    "BERT",
    "DTYPES",
    "PRODUCT_WAYS",
    "XLM",
    "Aim",
    "Benchmark",
    "Case",
    "Inputs",
    "Maker",
    "Sizes",
    "Variant",
    "case_name",
    "is_dense",
    "ours",
    "peer",
    "product_flops",
    "ways",
]

Sizes = Mapping[str, Any]
Inputs = dict[str, Tensor]
When = Callable[[Sizes], bool]
BERT, XLM = 30_522, 250_002
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        rank = torch.arange(1, columns + 1, device="cpu", dtype=torch.float64)
        low, high = 0.0, float(columns)
        for _ in range(60):
            scale = (low + high) / 2
            mean = (scale / rank).clamp(max=0.95).mean()
            low, high = (scale, high) if mean < density else (low, scale)
        chance = (high / rank).clamp(max=0.95)
        order = torch.randperm(columns, generator=self.generator, device=self.device)
        chance = chance.to(self.device)[order].to(self.dtype)
        values = self.uniform(rows, columns)
        active = values < chance
        # Given that it is below the chance, the draw over the chance is uniform again.
        return values.div_(chance).mul_(2.0).add_(0.05).mul_(active)

    def mask(self, rows: int, length: int, share: float = 0.75) -> Tensor:
        """Attention masks, tokens on that share of positions on average; every row has one."""
        least = 2 * share - 1
        lengths = (length * (least + (1 - least) * self.uniform(rows))).round().clamp(1, length)
        return (torch.arange(length, device=self.device) < lengths[:, None]).long()

    def texts(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask, ``[B, S]``."""
        ids = self.integers(sizes["V"], sizes["B"], sizes["S"])
        return ids, self.mask(sizes["B"], sizes["S"], sizes.get("mask", 0.75))

    def pairs(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Anchors and positives, dense or sparse; a positive shares about half with its anchor."""
        rows = sizes["B"]
        if "D" in sizes:
            anchor = self.normal(rows, sizes["D"])
            return anchor, anchor + 2 * self.normal(rows, sizes["D"])
        anchor = self.zipf(rows, sizes["V"], sizes["density"])
        # By column: the anchor's value, or another text's.
        is_shared = self.uniform(*anchor.shape) < 0.5
        return anchor, torch.where(is_shared, anchor, anchor.roll(1 + rows // 2, 0))


def _always(sizes: Sizes) -> bool:
    return True


def is_dense(sizes: Sizes) -> bool:
    """Whether the vectors of a case are dense embeddings."""
    return "D" in sizes


@dataclass(frozen=True)
class Variant:
    """One way to compute a loss."""

    name: str
    call: Callable[..., Any]
    kind: str = "ours"  # eager, compile, ours or peer
    when: When = _always
    compiled: bool = False  # by torch.compile
    builds: bool = False  # `call` takes the inputs and returns the function that is measured
    prepare: Callable[[Inputs], Inputs] | None = None  # another representation of the inputs
    at_stored_entries: bool = False  # gradients come back at the stored entries only
    needs_plain_memory: bool = False  # about what the plain formula needs
    package: str = ""  # a peer's
    is_triton: bool = False  # needs a GPU, has no fp64


def ways(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the ways in the table ``WAYS`` of a function's module, none without a table."""
    return tuple(way.name for way in getattr(inspect.getmodule(function), "WAYS", ()))


def ours(
    function: Callable[..., Tensor], when: Mapping[str, When] | None = None
) -> tuple[Variant, ...]:
    """The package's function: by default, compiled, by its definition, and by every other way.

    Args:
        function: a public function.
        when: at which sizes a way is measured; all sizes for a way that is not named.
    """
    found = [
        Variant("ours", function),
        Variant("ours, compiled", function, compiled=True, needs_plain_memory=True),
    ]
    if names := ways(function):
        by_definition = functools.partial(function, impl="definition")
        found.append(Variant("ours, definition", by_definition, needs_plain_memory=True))
        found += [
            Variant(
                f"ours, {name}",
                functools.partial(function, impl=name),
                when=(when or {}).get(name, _always),
                is_triton=name == "triton",
            )
            for name in names
        ]
    return tuple(found)


def peer(package: str, call: Callable[..., Tensor], when: When = _always) -> Variant:
    """The same loss in another package."""
    return Variant(package, call, "peer", when=when, package=package)


@dataclass(frozen=True)
class Aim:
    """What a figure of a variant should reach, at a size of the full suite."""

    text: str
    sizes: Sizes
    figure: str  # speedup, time, memory (of eager's), MiB, against
    bound: float
    variant: str = "ours"
    other: str = "eager"  # for `against`
    allocators: tuple[str, ...] = ("default", "warm")

    @property
    def is_lower_bound(self) -> bool:
        """Speed-ups should be large, everything else small."""
        return self.figure in ("speedup", "against")

    @property
    def wanted(self) -> str:
        """The bound in words."""
        kinds = {
            "speedup": f">= {self.bound:g}x eager",
            "against": f">= {self.bound:g}x {self.other}",
            "time": f"<= {self.bound:.3g} of eager's time",
            "memory": f"<= {self.bound:.3g} of eager's memory",
        }
        return kinds.get(self.figure, f"<= {self.bound:g} {self.figure}")


@dataclass(frozen=True)
class Benchmark:
    """A loss and everything needed to measure it."""

    loss: str  # the stem of its file
    inputs: Callable[[Sizes, Maker], Inputs]
    wrt: tuple[str, ...]  # the inputs that have gradients
    plain: Callable[..., Tensor]  # the formula as a reader would type it: the baseline
    variants: tuple[Variant, ...]
    tiny: Sequence[Sizes]  # for tests and for the check in fp64
    quick: Sequence[Sizes]
    full: Sequence[Sizes]  # beside the quick ones
    gpu: Sequence[Sizes]
    reckoned: Sequence[Sizes] = ()  # counted on the simulated device, beside the quick ones and gpu
    aims: Sequence[Aim] = ()
    crossover: Sequence[Sizes] = ()  # measured with the aims: where one way overtakes another
    options: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    num_flops: Callable[[Sizes, Inputs, bool], float] = lambda sizes, inputs, backward: 0.0
    plain_bytes: Callable[[Sizes], float] | None = None
    elements: Callable[[Sizes], int] | None = None
    tolerance: float = 1e-3  # of gradients at full size in fp32, relative to their norm
    # |x| has no slope at 0; whoever differentiates it there chooses one, and choices differ.
    kink_at_zero: bool = False


@dataclass(frozen=True)
class Case:
    """A benchmark at a size."""

    benchmark: Benchmark
    sizes: Sizes
    suite: str = ""

    @property
    def loss(self) -> str:
        """The stem of the loss."""
        return self.benchmark.loss

    @functools.cached_property
    def name(self) -> str:
        """Sizes in one string, which identifies the case within its loss."""
        return case_name(self.sizes)

    @property
    def elements(self) -> int:
        """What sizes are compared by: the elements of what the formula runs over."""
        if self.benchmark.elements is not None:
            return self.benchmark.elements(self.sizes)
        return math.prod(self.sizes[x] for x in ("B", "D", "S", "V", "C") if x in self.sizes)

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
        """Leaves that require gradients where the benchmark differentiates.

        Half precision is rounded from fp32: drawn in it, a chance of 0.3% would be none.
        """
        made = self.benchmark.inputs(self.sizes, maker)
        if maker.dtype == torch.float32:
            made = {k: x.to(self.dtype) if x.is_floating_point() else x for k, x in made.items()}
        for name in self.benchmark.wrt:
            made[name].requires_grad_()
        return made

    def variants(self) -> list[Variant]:
        """The plain formula first, the same compiled, then ours and the peers."""
        options = self.benchmark.options(self.sizes)
        plain = functools.partial(self.benchmark.plain, **options)
        found = [
            Variant("eager", plain, "eager", needs_plain_memory=True),
            Variant("torch.compile", plain, "compile", compiled=True, needs_plain_memory=True),
        ]
        for variant in self.benchmark.variants:
            if variant.kind == "ours" and options:
                variant = replace(variant, call=functools.partial(variant.call, **options))
            if variant.when(self.sizes):
                found.append(variant)
        return found

    def floor(self, inputs: Inputs, *, backward: bool) -> tuple[float, float]:
        """Bytes read and written once, and operations, that no implementation can do without."""
        num_bytes = sum(_bytes(tensor) for tensor in inputs.values())
        # A loss is a number; what is not has an upstream gradient of its own size: forward, that
        # many bytes are written instead of read, and with the backward both.
        if backward:
            num_bytes += _bytes(inputs["upstream"]) if "upstream" in inputs else 0
            num_bytes += sum(_bytes(inputs[name]) for name in self.benchmark.wrt)
        return float(num_bytes), self.benchmark.num_flops(self.sizes, inputs, backward)

    def plain_bytes(self) -> float:
        """Roughly what the plain formula needs beside its inputs."""
        in_fp32 = 4.0 * 6 * self.elements
        if self.benchmark.plain_bytes is not None:
            in_fp32 = self.benchmark.plain_bytes(self.sizes)
        return in_fp32 * self.dtype.itemsize / 4


def case_name(sizes: Sizes) -> str:
    """Sizes in one string, the dtype last."""
    last = sorted(sizes.items(), key=lambda item: item[0] == "dtype")
    return " ".join(_spelt(name, value) for name, value in last)


def _spelt(name: str, value: Any) -> str:
    if name == "density":
        return f"{100 * value:g}%"
    if name == "mask":
        return f"mask={100 * value:g}%"
    return str(value) if name in ("part", "dtype") else f"{name}={value}"


def _bytes(tensor: Tensor) -> int:
    if tensor.layout == torch.sparse_csr:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return sum(part.numel() * part.element_size() for part in parts)
    return tensor.numel() * tensor.element_size()


# What several losses share.


def product_flops(sizes: Sizes, anchor: Tensor, positive: Tensor, backward: bool) -> float:
    """Multiply-adds of pairs of entries that are both there; the backward has two such products."""
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


def _is_worth(sizes: Sizes) -> bool:
    """At half of the entries, sparse products take minutes and prove nothing."""
    return sizes.get("density", 1.0) <= 0.2


# When the ways of a product of two batches are measured; the ring needs several ranks.
PRODUCT_WAYS: dict[str, When] = {"nonzeros": _is_worth, "ring": lambda sizes: False}

# Of the losses that run over `[B, V]` once.
ACTIVATION_SIZES: dict[str, list[Sizes]] = {
    "tiny": [{"B": 4, "V": 50, "density": 0.4}],
    "quick": [{"B": rows, "V": BERT, "density": 0.05} for rows in (2, 64)],
    "full": [
        *[{"B": rows, "V": BERT, "density": 0.05} for rows in (16, 256)],
        *[{"B": 64, "V": BERT, "density": share} for share in (0.5, 0.005)],
        {"B": 64, "V": XLM, "density": 0.005},
    ],
    "gpu": [{"B": 512, "V": XLM, "density": 0.005, "dtype": "fp32"}],
}
