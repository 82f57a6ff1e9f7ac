"""What this machine can do: copy bandwidth and fp32 matrix products, measured in the same run."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Ceilings", "measure"]


@dataclass(frozen=True)
class Ceilings:
    """The two rates that bound every row: a row's time cannot fall below its floor over them."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, num_bytes: float, num_flops: float) -> float:
        """The time under which no correct implementation of these floors can stay."""
        return max(num_bytes / self.bytes_per_second, num_flops / self.flops_per_second)


def measure(device: torch.device, *, copy_mib: int = 256, side: int = 2048) -> Ceilings:
    """The best of several, because a ceiling is what the machine does undisturbed."""
    if device.type == "cuda":
        copy_mib, side = 4 * copy_mib, 4 * side
    source = torch.ones(copy_mib * 2**18, device=device)
    target = torch.zeros_like(source)
    copying = _best(lambda: target.copy_(source), device)
    a, b = torch.randn(2, side, side, device=device)
    multiplying = _best(lambda: a @ b, device)
    return Ceilings(2 * source.numel() * 4 / copying, 2 * side**3 / multiplying)


def _best(function: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    seconds = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])  # the first one pages memory in
