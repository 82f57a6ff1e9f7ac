"""Measurement of one case: check all variants, then measure memory and interleaved times."""

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.run import memory, timing
from benchmarks.run.available import variants as available_variants
from benchmarks.run.check import Mismatch, Ready, Reference, compare, ready, reference
from benchmarks.schema import DTYPES, Case, Inputs, Maker, Variant

SLOW = 20.0  # seconds per call from which one round is enough


Row = dict[str, Any]  # one variant of one case, forward and backward; what is missing has no key


def about(case: Case, variant: Variant, status: str) -> Row:
    """Return the columns of a variant that need no measurement."""
    return {
        "loss": case.loss,
        "case": case.name,
        "group": case.group,
        "elements": case.elements,
        "variant": variant.name,
        "kind": variant.kind,
        "status": status,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == case.dtype),
    }


def measure(
    case: Case,
    device: torch.device,
    budget: float,
    *,
    compiled: bool = True,
    min_rounds: int = 3,
    max_rounds: int = 20,
) -> list[Row]:
    """Return all rows of a case; ``budget`` is the seconds for the rounds.

    A variant that differs from the plain formula, fails, or needs too much memory is not timed; the
    status of its row says why.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # free the blocks of the last case
    # Without a reset, the ninth size of a formula falls back to eager.
    torch._dynamo.reset()
    variants = available_variants(case, compiled=compiled)
    # On a GPU inputs are rotated, so that a repetition does not find them in the cache.
    copies = 3 if device.type == "cuda" and case.elements < 2**26 else 1
    inputs = [case.inputs(Maker(device, seed=seed)) for seed in range(copies)]
    status, runs, first = _warm_up(case, variants, inputs, device)
    peaks = {name: memory.peak_bytes(run.train, device) for name, run in runs.items()}
    is_slow = max(first.values(), default=0.0) > SLOW
    seconds = timing.interleave(
        {name: run.train for name, run in runs.items()},
        device,
        budget=budget,
        first=first,
        min_rounds=1 if is_slow else min_rounds,
        max_rounds=max_rounds,
    )
    results = []
    for variant in variants:
        name = variant.name
        row = about(case, variant, status[name])
        if name in runs:
            row |= {"rounds": len(seconds[name]), **timing.columns("seconds", seconds[name])}
            row |= timing.speedup(seconds, name)
            row["peak_bytes"], row["peak_bytes_without_gradients"] = peaks[name]
        results.append(row)
    return results


def _warm_up(
    case: Case, variants: Sequence[Variant], inputs: list[Inputs], device: torch.device
) -> tuple[dict[str, str], dict[str, Ready], dict[str, float]]:
    """Call every variant, which compiles it and fills caches, and compare it with the first.

    The first is the plain formula, if it fits. Returns the status of all, and those that are right
    with the seconds of a call.
    """
    needed, available = case.plain_bytes(), memory.available_bytes(device)
    status, runs, first = {}, {}, {}
    expected: Reference | None = None
    for variant in variants:
        name = variant.name
        if variant.needs_plain_memory and needed > 0.9 * available:
            status[name] = f"skipped: needs about {needed / 2**30:.0f} GiB"
            continue
        try:
            run = ready(case, variant, inputs)
            start = time.perf_counter()
            outputs = run.both()
            first[name] = time.perf_counter() - start
            if expected is None:
                tolerance = case.benchmark.tolerance
                expected = Reference(outputs, tolerance)
                if case.dtype.itemsize == 2:
                    fits = needed * 8 / case.dtype.itemsize < 0.5 * available
                    exact = next(v for v in variants if fits or not v.needs_plain_memory)
                    expected = reference(case, exact, inputs[0], variant, outputs)
                    # The arg-max may differ between scores that are equal in the dtype.
                    expected = replace(expected, tolerance=max(tolerance, expected.tolerance))
            else:
                compare(case, variant, inputs[0], outputs, expected)
            del outputs
            if first[name] < 0.25 or variant.compiled:  # most of it was not the computation
                for _ in range(2):
                    start = time.perf_counter()
                    run.train()
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)  # reports errors of kernels
                    first[name] = time.perf_counter() - start
            status[name], runs[name] = "ok", run
        except Exception as error:  # the suite continues, and fails at its end
            line = (str(error).strip().splitlines() or [""])[0]
            wrong = f"failed: {type(error).__name__}: {line[:150]}"
            status[name] = f"MISMATCH: {error}" if isinstance(error, Mismatch) else wrong
            first.pop(name, None)
    return status, runs, first
