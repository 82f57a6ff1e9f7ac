"""Checks against the plain formula; a variant that differs is not timed."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.schema import Case, Inputs, Maker, Variant

# Allowed error relative to the norm, beyond the plain formula's own error in the same dtype, both
# against fp64: a rounding of the result and, for fp32, a different order of a sum.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

Outputs = tuple[Tensor, Sequence[Tensor]]  # a value and gradients


class Mismatch(AssertionError):
    """A variant does not compute what the plain formula computes."""


@dataclass
class Ready:
    """A variant with its inputs prepared."""

    inputs: list[Inputs]  # several on a GPU, for rotation
    calls: list[Callable[..., Tensor]]  # one per element of `inputs`
    wrt: tuple[str, ...]

    def both(self, turn: int = 0) -> Outputs:
        """Return the detached value and the gradients."""
        number = turn % len(self.inputs)
        inputs = self.inputs[number]
        value = self.calls[number](**{k: v for k, v in inputs.items() if k != "upstream"})
        if "upstream" in inputs:  # in the dtype of the value; the cast is done once
            inputs["upstream"] = inputs["upstream"].to(value.dtype)
        leaves = [inputs[name] for name in self.wrt]
        return value.detach(), torch.autograd.grad(value, leaves, inputs.get("upstream"))

    def train(self, turn: int = 0) -> Sequence[Tensor]:
        """Return the gradients instead of accumulating them."""
        return self.both(turn)[1]


def ready(case: Case, variant: Variant, inputs: Sequence[Inputs]) -> Ready:
    """Prepare inputs and calls; compile compiled variants, ours without graph breaks."""
    prepared = [dict(each) for each in inputs]
    if variant.prepare is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            prepared = [variant.prepare(each) for each in prepared]
    calls = [variant.call(each) if variant.builds else variant.call for each in prepared]
    if variant.compiled:
        one_graph = variant.kind == "ours"
        calls = [torch.compile(call, dynamic=False, fullgraph=one_graph) for call in calls]
    return Ready(prepared, calls, case.benchmark.wrt)


@dataclass(frozen=True)
class Reference:
    """The expected outputs, and the tolerance beyond the plain formula's own errors."""

    outputs: Outputs
    tolerance: float
    plain: Sequence[float] | None = None  # its errors, if the reference has higher precision


def _errors(
    case: Case, variant: Variant, inputs: Inputs, outputs: Outputs, expected: Outputs
) -> dict[str, float]:
    """Return the relative errors of the value and every gradient."""
    names = ("value", *case.benchmark.wrt)
    errors = {}
    pairs = zip((outputs[0], *outputs[1]), (expected[0], *expected[1]), strict=True)
    for name, (one, other) in zip(names, pairs, strict=True):
        if one.layout != torch.strided:
            one = one.to_dense()
        if one.shape != other.shape:
            shapes = f"of shape {list(other.shape)}, got {list(one.shape)}"
            raise Mismatch(f"{variant.name}: expected {name} {shapes}")
        one, other = one.to(torch.float64), other.to(torch.float64)
        if name != "value" and (variant.at_stored_entries or case.benchmark.kink_at_zero):
            support = inputs[name].detach() != 0
            one, other = one * support, other * support
        is_equal = torch.equal(one, other)  # also where all is 0
        size = torch.linalg.vector_norm(other)
        errors[name] = 0.0 if is_equal else float(torch.linalg.vector_norm(one - other) / size)
    return errors


def compare(
    case: Case, variant: Variant, inputs: Inputs, outputs: Outputs, expected: Reference
) -> None:
    """Compare a variant with the reference.

    Raises:
        Mismatch: for the first of value and gradients whose error is too large.
    """
    tolerance = expected.tolerance
    if variant.kind == "peer":  # some round in between, or add an epsilon
        tolerance = max(tolerance if expected.plain is None else 4 * tolerance, 1e-3)
    errors = _errors(case, variant, inputs, outputs, expected.outputs)
    for number, (name, error) in enumerate(errors.items()):
        # The value is a sum of many terms without ties, so its error is smaller.
        allowed = tolerance if name != "value" else min(tolerance, 1e-3)
        beyond = ""
        if expected.plain is not None:
            allowed = expected.plain[number] + tolerance
            beyond = f", of which eager's own {expected.plain[number]:.0e}"
        if not error <= allowed:
            label = name if name == "value" else f"gradient of {name}"
            raise Mismatch(
                f"{case.loss}, {case.name}, {variant.name}: {label} is off by "
                f"{error:.1e} of its norm, allowed {allowed:.0e}{beyond}"
            )


def reference(
    case: Case, exact: Variant, inputs: Inputs, plain: Variant, outputs: Outputs
) -> Reference:
    """Return the fp64 reference for the same rounded inputs, with the plain formula's errors."""
    double = {
        name: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for name, x in inputs.items()
    }
    expected = ready(case, exact, [double]).both()
    errors = list(_errors(case, plain, inputs, outputs, expected).values())
    if not all(math.isfinite(error) for error in errors):
        raise Mismatch(f"{case.loss}, {case.name}: the plain formula is not finite")
    return Reference(expected, ROUNDING[case.dtype], errors)


def check(case: Case, variants: Sequence[Variant], maker: Maker) -> None:
    """Compare value and gradients of all variants with those of the first, the plain formula.

    In fp64 they are equal; in the dtype of the case no error against fp64 exceeds the plain
    formula's by more than a rounding.

    Raises:
        Mismatch: for the first that differs.
    """
    inputs = case.inputs(maker)
    plain = ready(case, variants[0], [inputs]).both()
    if maker.dtype == torch.float64:
        expected = Reference(plain, 1e-6)
    else:
        expected = reference(case, variants[0], inputs, variants[0], plain)
    for variant in variants[1:]:
        compare(case, variant, inputs, ready(case, variant, [inputs]).both(), expected)
