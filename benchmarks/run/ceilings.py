"""The rates of this machine for copies and matrix products, measured in the same run."""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Ceilings", "measure"]


@dataclass(frozen=True)
class Ceilings:
    """The rates that bound every row: its time is at least its bytes and operations over them."""

    bytes_per_second: float
    flops_per_second: float  # fp32
    bf16_flops_per_second: float = math.nan  # on a GPU

    def seconds(self, num_bytes: float, num_flops: float, *, is_half: bool = False) -> float:
        """Return the least time for these numbers of bytes and operations."""
        rate = self.bf16_flops_per_second if is_half else self.flops_per_second
        if math.isnan(rate):
            rate = self.flops_per_second
        return max(num_bytes / self.bytes_per_second, num_flops / rate)


def measure(device: torch.device, *, copy_mib: int = 256, side: int = 2048) -> Ceilings:
    """Return the best of several measurements, that is, the rates without disturbance."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        copy_mib, side = 4 * copy_mib, 4 * side
    source = torch.ones(copy_mib * 2**18, device=device)
    target = torch.zeros_like(source)
    copying = _best(lambda: target.copy_(source), device)
    a, b = torch.randn(2, side, side, device=device)
    multiplying = _best(lambda: a @ b, device)
    rates = [2 * source.numel() * 4 / copying, 2 * side**3 / multiplying]
    if is_cuda:
        a, b = a.bfloat16(), b.bfloat16()
        rates.append(2 * side**3 / _best(lambda: a @ b, device))
    return Ceilings(*rates)


def _best(function: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Return the least seconds; the first call, which pages memory in or compiles, is not timed."""
    function()
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        for event in events[:-1]:
            event.record()
            function()
        events[-1].record()
        torch.cuda.synchronize(device)
        return min(one.elapsed_time(next_) for one, next_ in itertools.pairwise(events)) / 1e3
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
