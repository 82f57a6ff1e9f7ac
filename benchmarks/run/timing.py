"""Interleaved rounds: every variant once a round, in rotated order, compared within the round.

A machine that slows down for a second slows all variants of that round; the ratio of two
neighbours keeps its meaning where a ratio of two means would not.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Quartiles", "Run", "Samples", "cuda_sampler", "interleave"]

Run = Callable[[int], object]  # takes the number of the call, to rotate inputs


@dataclass(frozen=True)
class Quartiles:
    """The median and what half of the samples lie between."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """Inclusive quartiles; of a single value, that value three times."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def columns(self, name: str) -> dict[str, float]:
        """As a row of a table has them."""
        return {name: self.median, f"{name}_q1": self.q1, f"{name}_q3": self.q3}


@dataclass(frozen=True)
class Samples:
    """Seconds a call, by variant; one entry a round, so that entries of a round belong together."""

    seconds: Mapping[str, list[float]]

    def times(self, name: str) -> Quartiles:
        """Of one variant."""
        return Quartiles.of(self.seconds[name])

    def ratios(self, name: str, baseline: str) -> Quartiles:
        """How many times faster than the baseline, round by round."""
        pairs = zip(self.seconds[baseline], self.seconds[name], strict=True)
        return Quartiles.of([slow / fast for slow, fast in pairs])


def interleave(
    runs: Mapping[str, Run],
    device: torch.device,
    *,
    budget: float,
    first: Mapping[str, float],
    min_rounds: int = 3,
    max_rounds: int = 20,
    shortest: float = 2e-3,
) -> Samples:
    """Times all runs in rounds until the budget is spent.

    Args:
        runs: the variants, warmed up.
        device: where they run.
        budget: seconds for all rounds together; ``min_rounds`` are taken whatever they cost.
        first: a rough time of each, from which the number of calls in a sample follows.
        min_rounds: rounds that are taken in any case.
        max_rounds: rounds after which nothing is learned any more.
        shortest: seconds that a sample lasts at least; a shorter call is repeated within it.
    """
    take = cuda_sampler(device) if device.type == "cuda" else _cpu_sample
    names = list(runs)
    number = {name: max(1, min(1000, round(shortest / max(first[name], 1e-7)))) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for turn in range(max_rounds):
            if turn >= min_rounds and time.perf_counter() - start > budget:
                break
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                seconds[name].append(take(runs[name], number[name]))
    finally:
        if was_enabled:
            gc.enable()
    return Samples(seconds)


def _cpu_sample(run: Run, number: int) -> float:
    start = time.perf_counter()
    for call in range(number):
        run(call)
    return (time.perf_counter() - start) / number


def cuda_sampler(device: torch.device) -> Callable[[Run, int], float]:
    """Events around each call, the L2 cache flushed before it: small inputs would never leave."""
    size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 2**26
    flush = torch.empty(2 * size, dtype=torch.int8, device=device)

    def sample(run: Run, number: int) -> float:
        number = min(number, 50)
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(number)]
        stops = [torch.cuda.Event(enable_timing=True) for _ in range(number)]
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
