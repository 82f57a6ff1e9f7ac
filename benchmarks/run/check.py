"""Every variant computes what the plain formula computes, or it is not timed."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.schema import Case, Inputs, Maker, Variant

__all__ = [
    "Found",
    "Mismatch",
    "Ready",
    "Reference",
    "check",
    "check_rounded",
    "compare",
    "for_variant",
    "ready",
    "rounded_reference",
]

# What a variant may be off by beyond the plain formula in the same dtype, both from fp64, relative
# to the norm: a rounding of the result, and for fp32 what another order of a sum may cost.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

Found = tuple[Tensor, Sequence[Tensor]]  # a value and gradients


class Mismatch(AssertionError):
    """A variant does not compute what the plain formula computes."""


@dataclass
class Ready:
    """A variant with its inputs prepared."""

    variant: Variant
    inputs: list[Inputs]  # several on a GPU, to be rotated
    calls: list[Callable[..., Tensor]]  # one for each of the inputs
    wrt: tuple[str, ...]

    def forward(self, turn: int = 0) -> Tensor:
        """The value alone, without a graph."""
        with torch.no_grad():
            return self._call(turn % len(self.inputs))

    def train(self, turn: int = 0) -> tuple[Tensor, ...]:
        """The gradients, returned rather than accumulated."""
        return self._gradients(turn % len(self.inputs))[1]

    def both(self) -> Found:
        """The detached value and the gradients, to be compared."""
        value, gradients = self._gradients(0)
        return value.detach(), gradients

    def _call(self, number: int) -> Tensor:
        inputs = self.inputs[number]
        return self.calls[number](**{k: v for k, v in inputs.items() if k != "upstream"})

    def _gradients(self, number: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        inputs, value = self.inputs[number], self._call(number)
        leaves = [inputs[name] for name in self.wrt]
        return value, torch.autograd.grad(value, leaves, _upstream(inputs, value))


def _upstream(inputs: Inputs, value: Tensor) -> Tensor | None:
    """In the dtype that comes out, which is not everyone's; cast once."""
    given = inputs.get("upstream")
    if given is not None and given.dtype != value.dtype:
        given = inputs["upstream"] = given.to(value.dtype)
    return given


def ready(case: Case, variant: Variant, inputs: Sequence[Inputs]) -> Ready:
    """Prepares inputs and calls, and compiles what is to be compiled; ours in one graph."""
    given = [dict(each) for each in inputs]
    if variant.prepare is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            given = [variant.prepare(each) for each in given]
    calls = [variant.call(each) if variant.builds else variant.call for each in given]
    if variant.compiled:
        one_graph = variant.kind == "ours"
        calls = [torch.compile(call, dynamic=False, fullgraph=one_graph) for call in calls]
    return Ready(variant, given, calls, case.benchmark.wrt)


@dataclass(frozen=True)
class Reference:
    """What everyone is held against, and how far off may be."""

    found: Found
    tolerance: float
    # Of the value and of every gradient, if the reference is of higher precision: how far the plain
    # formula is off in the dtype of the case.
    plain: Sequence[float] | None = None


def _told(name: str) -> str:
    return name if name == "value" else f"gradient of {name}"


def _errors(case: Case, variant: Variant, inputs: Inputs, found: Found, wanted: Found) -> list[Any]:
    """The relative errors of the value and of every gradient, 0-d tensors or zeros."""
    names = ["value", *case.benchmark.wrt]
    errors: list[Any] = []
    for name, one, other in zip(names, [found[0], *found[1]], [wanted[0], *wanted[1]], strict=True):
        if one.layout != torch.strided:
            one = one.to_dense()
        if one.shape != other.shape:
            raise Mismatch(
                f"{variant.name}: expected {_told(name)} of shape {list(other.shape)}, "
                f"got {list(one.shape)}"
            )
        if one.dtype != other.dtype:
            one, other = one.to(torch.float64), other.to(torch.float64)
        on_support = variant.at_stored_entries or case.benchmark.kink_at_zero
        if on_support and name != "value":
            support = inputs[name].detach() != 0
            one, other = one * support, other * support
        if torch.equal(one, other):
            errors.append(0.0)
            continue
        errors.append(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other))
    return errors


def compare(case: Case, variant: Variant, inputs: Inputs, found: Found, wanted: Reference) -> None:
    """Holds a variant against the reference.

    Raises:
        Mismatch: for the first of value and gradients that is too far off.
    """
    errors = _errors(case, variant, inputs, found, wanted.found)
    names = ["value", *case.benchmark.wrt]
    for number, (name, error) in enumerate(zip(names, errors, strict=True)):
        # The value is a sum of many terms and has no ties: it agrees to more digits.
        allowed = wanted.tolerance if name != "value" else min(wanted.tolerance, 1e-3)
        beyond = ""
        if wanted.plain is not None:
            allowed = wanted.plain[number] + wanted.tolerance
            beyond = f", of which eager's own {wanted.plain[number]:.0e}"
        if not error <= allowed:
            raise Mismatch(
                f"{case.loss}, {case.name}, {variant.name}: {_told(name)} is off by "
                f"{float(error):.1e} of its norm, allowed {allowed:.0e}{beyond}"
            )


def check(case: Case, variants: Sequence[Variant], maker: Maker) -> None:
    """Compares value and gradients of all variants with those of the first, the plain formula.

    Raises:
        Mismatch: for the first that differs.
    """
    inputs = case.inputs(maker)
    wanted = ready(case, variants[0], [inputs]).both()
    for variant in variants[1:]:
        found = ready(case, variant, [inputs]).both()
        tolerance = 1e-6 if maker.dtype == torch.float64 else case.benchmark.tolerance
        if variant.kind == "peer":  # some compute in single precision, or add an epsilon
            tolerance = max(tolerance, 1e-3)
        compare(case, variant, inputs, found, Reference(wanted, tolerance))


def check_rounded(case: Case, variants: Sequence[Variant], maker: Maker) -> None:
    """The same in the dtype of the case: none further from fp64 than the plain formula is.

    Raises:
        Mismatch: for the first that is, by more than a rounding.
    """
    inputs = case.inputs(maker)
    wanted = rounded_reference(case, variants[0], inputs, variants[0])
    for variant in variants[1:]:
        found = ready(case, variant, [inputs]).both()
        compare(case, variant, inputs, found, for_variant(variant, wanted))


def for_variant(variant: Variant, wanted: Reference) -> Reference:
    """Peers may keep less between two steps than the plain formula does."""
    if variant.kind != "peer" or wanted.plain is None:
        return wanted
    return replace(wanted, tolerance=max(1e-3, 4 * wanted.tolerance))


def rounded_reference(
    case: Case, exact: Variant, inputs: Inputs, plain: Variant, own: Found | None = None
) -> Reference:
    """The reference in fp64, of the same rounded inputs, and how far the plain formula is off."""
    double = {
        name: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for name, x in inputs.items()
    }
    wanted = ready(case, exact, [double]).both()
    if own is None:
        own = ready(case, plain, [inputs]).both()
    errors = _errors(case, plain, inputs, own, wanted)
    if not all(math.isfinite(float(error)) for error in errors):
        raise Mismatch(f"{case.loss}, {case.name}: the plain formula is not finite")
    return Reference(wanted, ROUNDING[case.dtype], [float(error) for error in errors])
