"""The description of a benchmark: inputs, sizes, plain formula, variants.

A file in ``losses/`` defines one :class:`Benchmark`; a :class:`Case` is a benchmark at one size.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Sizes = Mapping[str, Any]
Inputs = dict[str, Tensor]
When = Callable[[Sizes], bool]
BERT, XLM = 30_522, 250_002
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Maker:
    """Random inputs for one seed, dtype and device."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        self.device, self.dtype = device, dtype
        self.generator = None  # meta tensors have no values
        if device.type != "meta":
            self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard Gaussian numbers."""
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Draw uniform numbers in [0, 1)."""
        return torch.rand(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Draw uniform integers in ``[0, high)``."""
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def zipf(self, rows: int, columns: int, density: float) -> Tensor:
        """Draw sparse activations: column ``j`` of a random order is active with probability ~ 1/j.

        A few columns are active in nearly every row, as in a retriever's vectors. Probabilities are
        capped at 0.95; bisection gives the scale.
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
        # A draw below the probability, divided by it, is uniform again.
        return values.div_(chance).mul_(2.0).add_(0.05).mul_(active)

    def mask(self, rows: int, length: int, share: float = 0.75) -> Tensor:
        """Draw attention masks with this mean share of tokens; every row has at least one."""
        least = 2 * share - 1
        lengths = (length * (least + (1 - least) * self.uniform(rows))).round().clamp(1, length)
        return (torch.arange(length, device=self.device) < lengths[:, None]).long()

    def texts(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Draw token ids and an attention mask, ``[B, S]``."""
        ids = self.integers(sizes["V"], sizes["B"], sizes["S"])
        return ids, self.mask(sizes["B"], sizes["S"], sizes.get("mask", 0.75))

    def pairs(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Draw anchors and positives, dense or sparse; each pair has about half in common."""
        rows = sizes["B"]
        if "D" in sizes:
            anchor = self.normal(rows, sizes["D"])
            return anchor, anchor + 2 * self.normal(rows, sizes["D"])
        anchor = self.zipf(rows, sizes["V"], sizes["density"])
        # Every column has the anchor's value or that of another text.
        is_shared = self.uniform(*anchor.shape) < 0.5
        return anchor, torch.where(is_shared, anchor, anchor.roll(1 + rows // 2, 0))


def _always(sizes: Sizes) -> bool:
    return True


def is_dense(sizes: Sizes) -> bool:
    """Whether the vectors of a case are dense embeddings."""
    return "D" in sizes


@dataclass(frozen=True)
class Variant:
    """One implementation of a loss."""

    name: str
    call: Callable[..., Any]
    kind: str = "ours"  # eager, compile, ours or peer
    when: When = _always
    compiled: bool = False  # whether to use torch.compile
    builds: bool = False  # whether `call` takes the inputs and returns the function to measure
    prepare: Callable[[Inputs], Inputs] | None = None  # converts the inputs
    at_stored_entries: bool = False  # gradients exist only at the stored entries
    needs_plain_memory: bool = False  # needs about as much memory as the plain formula
    package: str = ""  # of a peer


def implementations(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names in the table ``IMPLEMENTATIONS`` of a function's module, if it has one."""
    if "impl" not in inspect.signature(function).parameters:
        return ()
    table = getattr(inspect.getmodule(function), "IMPLEMENTATIONS", ())
    return tuple(each.name for each in table)


def ours(
    function: Callable[..., Tensor], when: Mapping[str, When] | None = None
) -> tuple[Variant, ...]:
    """Return the variants of our function: default, compiled, and every implementation.

    Args:
        function: a public function.
        when: for which sizes an implementation is measured; by default all.
    """
    variants = [
        Variant("ours", function),
        Variant("ours, compiled", function, compiled=True, needs_plain_memory=True),
    ]
    if names := implementations(function):
        definition = functools.partial(function, impl="definition")
        variants.append(Variant("ours, definition", definition, needs_plain_memory=True))
        variants += [
            Variant(
                f"ours, {name}",
                functools.partial(function, impl=name),
                when=(when or {}).get(name, _always),
            )
            for name in names
        ]
    return tuple(variants)


def peer(
    package: str, build: Callable[[Inputs], Callable[..., Tensor]], when: When = _always
) -> Variant:
    """Return a variant that is the same loss in another package; ``build`` imports it."""
    return Variant(package, build, "peer", when=when, builds=True, package=package)


@dataclass(frozen=True)
class Benchmark:
    """A loss and everything needed to measure it."""

    loss: str  # stem of its file
    inputs: Callable[[Sizes, Maker], Inputs]
    wrt: tuple[str, ...]  # names of the inputs that have gradients
    plain: Callable[..., Tensor]  # the formula as written by hand, the baseline
    variants: tuple[Variant, ...]
    tiny: Sequence[Sizes]  # for tests and for the check in fp64
    quick: Sequence[Sizes]
    full: Sequence[Sizes]  # in addition to quick
    gpu: Sequence[Sizes]
    calculated: Sequence[Sizes] = ()  # counted on meta tensors, in addition to quick and gpu
    aims: Sequence[Sizes] = ()  # some of full, which the pages show
    options: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    plain_bytes: Callable[[Sizes], float] | None = None
    elements: Callable[[Sizes], int] | None = None
    tolerance: float = 1e-3  # of gradients at full size in fp32, relative to their norm
    # The derivative of |x| at 0 is undefined, and implementations choose different values.
    kink_at_zero: bool = False


@dataclass(frozen=True)
class Case:
    """A benchmark at one size."""

    benchmark: Benchmark
    sizes: Sizes

    @property
    def loss(self) -> str:
        """Return the stem of the loss."""
        return self.benchmark.loss

    @functools.cached_property
    def name(self) -> str:
        """Return the sizes as a string, which identifies the case within its loss."""
        return case_name(self.sizes)

    @property
    def elements(self) -> int:
        """Return the number of elements of the main tensor, by which sizes are compared."""
        if self.benchmark.elements is not None:
            return self.benchmark.elements(self.sizes)
        return math.prod(self.sizes[x] for x in ("B", "D", "S", "V", "C") if x in self.sizes)

    @property
    def group(self) -> str:
        """Return the sizes other than those that count elements."""
        fixed = [_spelt(k, v) for k, v in self.sizes.items() if k in ("density", "part", "dtype")]
        return " ".join(fixed)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the inputs, unless the maker draws them in fp64."""
        return DTYPES[self.sizes.get("dtype", "fp32")]

    def inputs(self, maker: Maker) -> Inputs:
        """Draw the inputs, as leaves that require gradients where ``wrt`` names them.

        Half precision is rounded from fp32, as it is too coarse for draws with small probabilities.
        """
        made = self.benchmark.inputs(self.sizes, maker)
        if maker.dtype == torch.float32:
            made = {k: x.to(self.dtype) if x.is_floating_point() else x for k, x in made.items()}
        for name in self.benchmark.wrt:
            made[name].requires_grad_()
        return made

    def variants(self) -> list[Variant]:
        """Return the plain formula, the same compiled, then ours and the peers."""
        options = self.benchmark.options(self.sizes)
        plain = functools.partial(self.benchmark.plain, **options)
        variants = [
            Variant("eager", plain, "eager", needs_plain_memory=True),
            Variant("torch.compile", plain, "compile", compiled=True, needs_plain_memory=True),
        ]
        for variant in self.benchmark.variants:
            if variant.kind == "ours" and options:
                variant = replace(variant, call=functools.partial(variant.call, **options))
            if variant.when(self.sizes):
                variants.append(variant)
        return variants

    def plain_bytes(self) -> float:
        """Return roughly the bytes that the plain formula needs in addition to its inputs."""
        in_fp32 = 4.0 * 6 * self.elements
        if self.benchmark.plain_bytes is not None:
            in_fp32 = self.benchmark.plain_bytes(self.sizes)
        return in_fp32 * self.dtype.itemsize / 4


def case_name(sizes: Sizes) -> str:
    """Return the sizes as a string, with the dtype last."""
    last = sorted(sizes.items(), key=lambda item: item[0] == "dtype")
    return " ".join(_spelt(name, value) for name, value in last)


def _spelt(name: str, value: Any) -> str:
    if name == "density":
        return f"{100 * value:g}%"
    if name == "mask":
        return f"mask={100 * value:g}%"
    return str(value) if name in ("part", "dtype") else f"{name}={value}"


# Shared by several losses.


def _is_worth(sizes: Sizes) -> bool:
    """Whether to time sparse products; at high density they take minutes and are pointless."""
    return sizes.get("density", 1.0) <= 0.2


# Sizes for which the implementations of a product of two batches are measured.
PRODUCT_IMPLEMENTATIONS: dict[str, When] = {"nonzeros": _is_worth}


def activations(sizes: Sizes, make: Maker) -> Inputs:
    """Draw sparse activations."""
    return {"activations": make.zipf(sizes["B"], sizes["V"], sizes["density"])}


def penalised_activations(sizes: Sizes, make: Maker) -> Inputs:
    """Draw sparse activations and token penalties."""
    return activations(sizes, make) | {"token_penalty": make.uniform(sizes["V"])}


# Sizes of the losses that read `[B, V]` once.
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
