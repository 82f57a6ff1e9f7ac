"""Checks against the plain formula; a variant that differs is not timed."""

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

# Allowed error relative to the norm, beyond the plain formula's own error in the same dtype, both
# against fp64: a rounding of the result and, for fp32, a different order of a sum.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

Found = tuple[Tensor, Sequence[Tensor]]  # a value and gradients


class Mismatch(AssertionError):
    """A variant does not compute what the plain formula computes."""


@dataclass
class Ready:
    """A variant with its inputs prepared."""

    variant: Variant
    inputs: list[Inputs]  # several on a GPU, for rotation
    calls: list[Callable[..., Tensor]]  # one per element of `inputs`
    wrt: tuple[str, ...]

    def forward(self, turn: int = 0) -> Tensor:
        """Return the value, computed without a graph."""
        with torch.no_grad():
            return self._call(turn % len(self.inputs))

    def train(self, turn: int = 0) -> tuple[Tensor, ...]:
        """Return the gradients instead of accumulating them."""
        return self._gradients(turn % len(self.inputs))[1]

    def both(self) -> Found:
        """Return the detached value and the gradients."""
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
    """Return the upstream gradient in the dtype of ``value``; the cast is done once."""
    given = inputs.get("upstream")
    if given is not None and given.dtype != value.dtype:
        given = inputs["upstream"] = given.to(value.dtype)
    return given


def ready(case: Case, variant: Variant, inputs: Sequence[Inputs]) -> Ready:
    """Prepare inputs and calls; compile compiled variants, ours without graph breaks."""
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
    """The expected results, and the tolerance."""

    found: Found
    tolerance: float
    # If the reference has higher precision: the plain formula's errors in the dtype of the case,
    # for the value and every gradient.
    plain: Sequence[float] | None = None


def _told(name: str) -> str:
    return name if name == "value" else f"gradient of {name}"


def _errors(case: Case, variant: Variant, inputs: Inputs, found: Found, wanted: Found) -> list[Any]:
    """Return the relative errors of the value and every gradient, as 0-d tensors or zeros."""
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
    """Compare a variant with the reference.

    Raises:
        Mismatch: for the first of value and gradients whose error is too large.
    """
    errors = _errors(case, variant, inputs, found, wanted.found)
    names = ["value", *case.benchmark.wrt]
    for number, (name, error) in enumerate(zip(names, errors, strict=True)):
        # The value is a sum of many terms without ties, so its error is smaller.
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
    """Compare value and gradients of all variants with those of the first, the plain formula.

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
    """Check in the dtype of the case that no error against fp64 exceeds the plain formula's.

    Raises:
        Mismatch: for the first that exceeds it by more than a rounding.
    """
    inputs = case.inputs(maker)
    wanted = rounded_reference(case, variants[0], inputs, variants[0])
    for variant in variants[1:]:
        found = ready(case, variant, [inputs]).both()
        compare(case, variant, inputs, found, for_variant(variant, wanted))


def for_variant(variant: Variant, wanted: Reference) -> Reference:
    """Return the reference, for peers with a larger tolerance, as they may round in between."""
    if variant.kind != "peer" or wanted.plain is None:
        return wanted
    return replace(wanted, tolerance=max(1e-3, 4 * wanted.tolerance))


def rounded_reference(
    case: Case, exact: Variant, inputs: Inputs, plain: Variant, own: Found | None = None
) -> Reference:
    """Return the fp64 reference for the same rounded inputs, with the plain formula's errors."""
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
