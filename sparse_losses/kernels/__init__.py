"""Twins of the hot functions in Triton, and the one place where they are chosen.

``impl="torch"`` is the reference. ``impl="triton"`` runs the kernel or says why it cannot.
``impl="auto"`` runs it where a committed measurement shows it ahead, and only there.
"""

import importlib.util
import os
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

__all__ = ["AHEAD", "Impl", "check_impl", "is_ahead", "uses_triton"]

Impl = Literal["auto", "torch", "triton"]

# Where `auto` takes a kernel: operation -> compute capability -> fewest elements of its largest
# matrix. An entry needs a committed benchmark that shows it ahead there; so far none was measured.
AHEAD: dict[str, dict[tuple[int, int], int]] = {}

OLDEST = (8, 0)  # Ampere: the first with bf16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_IS_INSTALLED = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs the kernels on a CPU, slowly, which is how the tests check them.
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def check_impl(impl: str) -> None:
    """Raises a ``ValueError`` for anything but auto, torch and triton."""
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"expected `impl` to be 'auto', 'torch' or 'triton', got {impl!r}")


def uses_triton(
    operation: str,
    impl: str,
    *tensors: Tensor | None,
    elements: int,
    needs: Mapping[str, bool] | None = None,
) -> bool:
    """Whether the kernel of an operation is to run.

    ``elements`` is the size of the operation's largest matrix, ``needs`` what the kernel asks of
    its arguments, in words that follow "expected", and whether it is so.

    Raises:
        ValueError: if the kernel is asked for and cannot run.
    """
    if impl == "torch":
        return False
    present = [tensor for tensor in tensors if tensor is not None]
    if impl == "auto" and not is_ahead(operation, present[0].device, elements):
        return False
    missing = _missing(present) or next((say for say, so in (needs or {}).items() if not so), None)
    if missing is not None and impl == "triton":
        raise ValueError(
            f'expected {missing} with impl="triton"; impl="auto" falls back to PyTorch'
        )
    return missing is None


def is_ahead(operation: str, device: torch.device, elements: int) -> bool:
    """Whether a measurement on such a device shows the kernel ahead at this size."""
    where = AHEAD.get(operation)
    if not where or device.type != "cuda" or torch.version.cuda is None:
        return False
    fewest = where.get(torch.cuda.get_device_capability(device))
    return fewest is not None and elements >= fewest


def _missing(tensors: list[Tensor]) -> str | None:
    """What stands in the way of any kernel, in words that follow "expected"."""
    if not _IS_INSTALLED:
        return "the package `triton` (pip install 'sparse-losses[kernels]')"
    device = tensors[0].device
    if not _runs_on(device):
        return (
            f"an NVIDIA GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer, got {device},"
        )
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype not in DTYPES:
            return f"fp32, fp16 or bf16 tensors, got {tensor.dtype},"
        if tensor.layout != torch.strided:
            return f"dense tensors, got {tensor.layout},"
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return "no torch.func transform"
    return None


def _runs_on(device: torch.device) -> bool:
    if _IS_INTERPRETED:
        return device.type in ("cpu", "cuda")
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    # The compiler need not trace the question: a kernel that is too new fails to compile itself.
    return torch.compiler.is_compiling() or torch.cuda.get_device_capability(device) >= OLDEST
