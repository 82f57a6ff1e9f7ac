"""The rates of this machine for copies and matrix products, measured in the same run."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.run import timing

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

    def least_seconds(run: Callable[[], object]) -> float:
        run()  # pages memory in, or compiles
        runs, first = {"run": lambda _: run()}, {"run": 1.0}
        samples = timing.interleave(runs, device, budget=60.0, first=first, max_rounds=7)
        return min(samples.seconds["run"])

    source = torch.ones(copy_mib * 2**18, device=device)
    target = torch.zeros_like(source)
    rates = [2 * source.nbytes / least_seconds(lambda: target.copy_(source))]
    a, b = torch.randn(2, side, side, device=device)
    rates.append(2 * side**3 / least_seconds(lambda: a @ b))
    if is_cuda:
        half = a.bfloat16(), b.bfloat16()
        rates.append(2 * side**3 / least_seconds(lambda: half[0] @ half[1]))
    return Ceilings(*rates)
