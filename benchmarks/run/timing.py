"""Interleaved timing: every round times all variants, in rotated order, and compares them.

If the machine slows down for a second, it affects all variants of a round: ratios within a round
stay meaningful, while a ratio of two means would not.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Run = Callable[[int], object]  # the argument is the number of the call, to rotate inputs
Seconds = dict[str, list[float]]  # entry i of each list belongs to round i


def columns(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median and the inclusive quartiles as columns of a table."""
    three = values * 3 if len(values) == 1 else statistics.quantiles(values, method="inclusive")
    return {f"{name}{end}": x for end, x in zip(("_q1", "", "_q3"), three, strict=True)}


def speedup(seconds: Mapping[str, Sequence[float]], name: str) -> dict[str, float]:
    """Return eager's time over a variant's per round, as columns; none if eager was not timed."""
    if "eager" not in seconds:
        return {}
    pairs = zip(seconds["eager"], seconds[name], strict=True)
    return columns("speedup", [eager / own for eager, own in pairs])


def interleave(
    runs: Mapping[str, Run],
    device: torch.device,
    *,
    budget: float,
    first: Mapping[str, float] | None = None,
    min_rounds: int = 3,
    max_rounds: int = 20,
    shortest: float = 2e-3,
) -> Seconds:
    """Time all runs in rounds until the budget is spent; return seconds per call.

    Args:
        runs: the warmed-up variants.
        device: the device of the inputs.
        budget: seconds for all rounds together.
        first: rough seconds per call of each, from which follows the number of calls per sample;
            without them a sample is one call.
        min_rounds: minimal number of rounds, even if they exceed the budget.
        max_rounds: maximal number of rounds.
        shortest: minimal seconds of a sample; a shorter call is repeated within it.
    """
    take = _cuda_sampler(device) if device.type == "cuda" else _cpu_sample
    names = list(runs)
    number = dict.fromkeys(names, 1)
    for name, each in (first or {}).items():
        number[name] = max(1, min(1000, round(shortest / max(each, 1e-7))))
    seconds: Seconds = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for turn in range(max_rounds):
            if turn >= min_rounds and time.perf_counter() - start > budget:
                break
            shift = turn % max(1, len(names))
            for name in names[shift:] + names[:shift]:
                seconds[name].append(take(runs[name], number[name]))
    finally:
        gc.enable()
    return seconds


def _cpu_sample(run: Run, number: int) -> float:
    start = time.perf_counter()
    for call in range(number):
        run(call)
    return (time.perf_counter() - start) / number


def _cuda_sampler(device: torch.device) -> Callable[[Run, int], float]:
    """Return a sampler with events around each call; the L2 cache is flushed before a call."""
    size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 2**26
    flush = torch.empty(2 * size, dtype=torch.int8, device=device)

    def sample(run: Run, number: int) -> float:
        number = min(number, 50)
        starts, stops = (
            [torch.cuda.Event(enable_timing=True) for _ in range(number)] for _ in range(2)
        )
        torch.cuda.synchronize(device)
        for call in range(number):
            flush.zero_()
            starts[call].record()
            run(call)
            stops[call].record()
        torch.cuda.synchronize(device)
        pairs = zip(starts, stops, strict=True)
        return statistics.median(start.elapsed_time(stop) for start, stop in pairs) / 1e3

    return sample
