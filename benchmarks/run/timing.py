"""Interleaved timing: every round times all variants, in rotated order, and compares them.

If the machine slows down for a second, it affects all variants of a round: ratios within a round
stay meaningful, while a ratio of two means would not.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Quartiles", "Run", "Samples", "interleave"]

Run = Callable[[int], object]  # the argument is the number of the call, to rotate inputs


@dataclass(frozen=True)
class Quartiles:
    """The median and the quartiles."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """Return inclusive quartiles; for a single value, it three times."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def columns(self, name: str) -> dict[str, float]:
        """Return the quartiles as columns of a table."""
        return {name: self.median, f"{name}_q1": self.q1, f"{name}_q3": self.q3}


@dataclass(frozen=True)
class Samples:
    """Seconds per call for every variant; entry ``i`` of each list belongs to round ``i``."""

    seconds: Mapping[str, list[float]]

    def times(self, name: str) -> Quartiles:
        """Return the times of a variant."""
        return Quartiles.of(self.seconds[name])

    def ratios(self, name: str, baseline: str) -> Quartiles:
        """Return the baseline's time over the variant's, per round."""
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
    """Time all runs in rounds until the budget is spent.

    Args:
        runs: the warmed-up variants.
        device: the device of the inputs.
        budget: seconds for all rounds together.
        first: rough seconds per call of each, which determine the number of calls per sample.
        min_rounds: minimal number of rounds, even if they exceed the budget.
        max_rounds: maximal number of rounds.
        shortest: minimal seconds of a sample; a shorter call is repeated within it.
    """
    take = _cuda_sampler(device) if device.type == "cuda" else _cpu_sample
    names = list(runs)
    number = {name: max(1, min(1000, round(shortest / max(first[name], 1e-7)))) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
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
        gc.enable()
    return Samples(seconds)


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
