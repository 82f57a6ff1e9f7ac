"""Precision of the computation: inputs may be fp16 or bf16, a loss is computed in fp32 or fp64."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_off(device: torch.device) -> AbstractContextManager[None]:
    """Return a context without autocast: with it ``x.float() @ y.float()`` is a bf16 product."""
    kind = device.type
    if torch.compiler.is_compiling():  # the calls below cannot be traced before PyTorch 2.12
        is_on = kind != "meta"
    else:  # entering the context costs as much as a small loss
        is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if is_on else nullcontext()


def compute_dtype(**tensors: Tensor | None) -> torch.dtype:
    """Return the dtype to compute in: fp64 if any of the data tensors is fp64, else fp32."""
    dtype = torch.float32
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise TypeError(f"expected `{name}` to be floating point, got {tensor.dtype}")
        if tensor.dtype == torch.float64:
            dtype = torch.float64
    return dtype


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for long sums: fp64, or fp32 on Apple's GPUs, which lack fp64."""
    return torch.float32 if device.type == "mps" else torch.float64
