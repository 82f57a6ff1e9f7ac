"""Measurement of one case: check all variants, then measure memory and interleaved times."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.run import memory, timing
from benchmarks.run.available import variants as available_variants
from benchmarks.run.ceilings import Ceilings
from benchmarks.run.check import (
    Mismatch,
    Outputs,
    Ready,
    Reference,
    check,
    check_rounded,
    compare,
    ready,
    rounded_reference,
)
from benchmarks.schema import DTYPES, Benchmark, Case, Inputs, Maker, Variant

__all__ = ["FORWARD", "TRAINING", "Limits", "Result", "measure"]

FORWARD, TRAINING = "forward", "forward+backward"
SLOW = 20.0  # seconds per call from which one round is enough

# Small copies that passed in this process. The values keep the benchmarks, and so their ids, alive.
_PASSED: dict[tuple[int, str, str, str], Benchmark] = {}


@dataclass(frozen=True)
class Limits:
    """Limits on the time of a case."""

    budget: float  # seconds for the rounds of one pass of one case
    min_rounds: int = 3
    max_rounds: int = 20


@dataclass(frozen=True)
class Result:
    """One row: one variant of one case in one pass."""

    loss: str
    case: str
    group: str
    elements: int
    pass_: str
    variant: str
    kind: str
    status: str
    rounds: int = 0
    seconds: float = math.nan
    seconds_q1: float = math.nan
    seconds_q3: float = math.nan
    speedup: float = math.nan  # eager's time over this variant's, per round
    speedup_q1: float = math.nan
    speedup_q3: float = math.nan
    peak_bytes: float = math.nan
    peak_bytes_without_gradients: float = math.nan
    floor_bytes: float = math.nan
    floor_flops: float = math.nan
    share_of_ceiling: float = math.nan
    dtype: str = "fp32"

    def row(self) -> dict[str, Any]:
        """Return a CSV row: numbers with six digits, empty if not measured."""
        return {
            name: ("" if math.isnan(value) else f"{value:.6g}")
            if isinstance(value, float)
            else value
            for name, value in asdict(self).items()
        }


def measure(
    case: Case,
    device: torch.device,
    ceilings: Ceilings,
    limits: Limits,
    *,
    compiled: bool = True,
    passes: Sequence[str] = (FORWARD, TRAINING),
    say: Callable[[str], None] = lambda line: None,
) -> list[Result]:
    """Return all rows of a case.

    A variant that differs from the plain formula, fails, or needs too much memory is not timed; the
    status of its row says why.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # free the blocks of the last case
    # Without a reset, the ninth size of a formula falls back to eager.
    torch._dynamo.reset()
    variants = available_variants(case, compiled=compiled)
    status = {variant.name: "ok" for variant in variants}
    _check_small_copies(case, variants, device, status)

    # On a GPU inputs are rotated, so that a repetition does not find them in the cache.
    copies = 3 if device.type == "cuda" and case.elements < 2**26 else 1
    inputs = [case.inputs(Maker(device, seed=seed)) for seed in range(copies)]
    warm_up = _WarmUp(case, inputs, device, passes)
    needed, available = case.plain_bytes(), memory.available_bytes(device)
    for variant in variants:
        if variant.needs_plain_memory and needed > 0.9 * available:
            status[variant.name] = f"skipped: needs about {needed / 2**30:.0f} GiB"
    if case.dtype.itemsize == 2:
        fits = needed * 8 / case.dtype.itemsize < 0.5 * available
        warm_up.exact = next(v for v in variants if fits or not v.needs_plain_memory)
    for variant in variants:
        if status[variant.name] == "ok":
            say(variant.name)
            _guarded(status, variant, warm_up, variant)
    warm_up.expected = None
    results = []
    for pass_ in passes:
        say(pass_)
        results += _one_pass(case, pass_, variants, status, warm_up, ceilings, limits)
    return results


def _check_small_copies(
    case: Case, variants: Sequence[Variant], device: torch.device, status: dict[str, str]
) -> None:
    """Check small copies once per process, in fp64 and, if it is a half, in the case's dtype."""
    for tiny in case.benchmark.tiny:
        small = replace(case, sizes={**tiny, "dtype": case.sizes.get("dtype", "fp32")})
        plain, *others = available_variants(small)
        for variant in others:
            key = id(case.benchmark), small.name, variant.name, device.type
            if variant.name not in status or key in _PASSED:
                continue
            maker = Maker(device, torch.float64)
            _guarded(status, variant, check, small, [plain, variant], maker)
            if case.dtype.itemsize == 2:
                _guarded(status, variant, check_rounded, small, [plain, variant], Maker(device))
            if status[variant.name] == "ok":
                _PASSED[key] = case.benchmark


class _WarmUp:
    """The first calls of every variant: they compile, fill caches, and are compared and timed."""

    def __init__(
        self, case: Case, inputs: list[Inputs], device: torch.device, passes: Sequence[str]
    ) -> None:
        self.case, self.inputs, self.device = case, inputs, device
        self.ready: dict[str, Ready] = {}
        self.seconds: dict[str, dict[str, float]] = {pass_: {} for pass_ in passes}
        self.expected: Reference | None = None
        self.exact: Variant | None = None  # computes the reference in fp64

    def __call__(self, variant: Variant) -> None:
        """Call a variant once and compare the result; if it is right, call it in every pass."""
        prepared = ready(self.case, variant, self.inputs)
        start = time.perf_counter()
        outputs = prepared.both()
        took = time.perf_counter() - start
        if self.expected is not None:
            compare(self.case, variant, self.inputs[0], outputs, self.expected)
        else:  # the plain formula, or the first that fits
            self.expected = self._reference(variant, outputs)
        del outputs
        for pass_ in self.seconds:
            run = prepared.train if pass_ == TRAINING else prepared.forward
            # A slow variant is warm already, unless it is compiled: a pass may not be compiled
            # yet, and most of the first call was compilation.
            repeats = 2 if took < 0.25 or variant.compiled else 0
            times = [took, *(self._seconds(run) for _ in range(repeats))]
            self.seconds[pass_][variant.name] = times[-1]
        self.ready[variant.name] = prepared

    def _reference(self, variant: Variant, outputs: Outputs) -> Reference:
        tolerance = self.case.benchmark.tolerance
        if self.exact is None:
            return Reference(outputs, tolerance)
        expected = rounded_reference(self.case, self.exact, self.inputs[0], variant, outputs)
        # The arg-max may differ between scores that are equal in the dtype.
        return replace(expected, tolerance=max(tolerance, expected.tolerance))

    def _seconds(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def _one_pass(
    case: Case,
    pass_: str,
    variants: Sequence[Variant],
    status: dict[str, str],
    warm_up: _WarmUp,
    ceilings: Ceilings,
    limits: Limits,
) -> list[Result]:
    """Measure memory, then times, of all variants whose status is ok."""
    is_training = pass_ == TRAINING
    measured = {v.name: warm_up.ready[v.name] for v in variants if status[v.name] == "ok"}
    runs = {name: each.train if is_training else each.forward for name, each in measured.items()}
    first = {name: warm_up.seconds[pass_][name] for name in runs}
    # A forward pass returns no gradients to subtract from the peak.
    peaks = {
        name: memory.peak_bytes(
            lambda run=run: run(0) if is_training else _forget(run(0)), warm_up.device
        )
        for name, run in runs.items()
    }
    is_slow = max(first.values(), default=0.0) > SLOW
    samples = timing.interleave(
        runs,
        warm_up.device,
        budget=limits.budget,
        first=first,
        min_rounds=1 if is_slow else limits.min_rounds,
        max_rounds=limits.max_rounds,
    )
    dtype = next(name for name, dtype in DTYPES.items() if dtype == case.dtype)
    results = []
    for variant in variants:
        name = variant.name
        about = (case.loss, case.name, case.group, case.elements, pass_, name, variant.kind)
        row = Result(*about, status[name], dtype=dtype)
        if name in runs:
            times = samples.times(name)
            num_bytes, num_flops = case.floor(measured[name].inputs[0], backward=is_training)
            floor = ceilings.seconds(num_bytes, num_flops, is_half=case.dtype.itemsize == 2)
            row = replace(
                row,
                rounds=len(samples.seconds[name]),
                **times.columns("seconds"),
                **(samples.ratios(name, "eager").columns("speedup") if "eager" in runs else {}),
                peak_bytes=float(peaks[name][0]),
                peak_bytes_without_gradients=float(peaks[name][1]),
                floor_bytes=num_bytes,
                floor_flops=num_flops,
                share_of_ceiling=floor / times.median,
            )
        results.append(row)
    return results


def _forget(_: object) -> tuple[()]:
    return ()


def _guarded(
    status: dict[str, str], variant: Variant, run: Callable[..., object], *args: Any
) -> None:
    """Run and record an error as the status, so that the suite continues; it fails at its end."""
    try:
        run(*args)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # reports errors of kernels
    except Mismatch as error:
        status[variant.name] = f"MISMATCH: {error}"
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        status[variant.name] = f"failed: {type(error).__name__}: {line[:150]}"
