"""What the kernels share: products, comparisons and launches."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "INTERPRETED",
    "dot",
    "larger",
    "log1p",
    "next_power_of_2",
    "on_device",
    "shared_memory",
]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

next_power_of_2 = triton.next_power_of_2


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Where kernels are launched: Triton takes the current device, whatever the tensors' is."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block of threads may have; a Hopper's where none is asked."""
    if device.type != "cuda":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b``, summed in fp32: half precision as it is, fp32 without TF32's rounding."""
    if INTERPRETED:  # its product of bf16 numbers is wrong
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def larger(a, b):
    """The larger number, or a NaN: what ``tl.max`` would drop."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log1p(x):
    """``log(1 + x)`` for ``x >= 0``, with the digits that ``1 + x`` drops."""
    u = 1.0 + x
    is_lost = (u == 1.0) | (x == float("inf"))
    # An ordinary division is off by two units in the last place.
    return tl.where(is_lost, x, tl.log(u) * tl.div_rn(x, tl.where(is_lost, 1.0, u - 1.0)))
