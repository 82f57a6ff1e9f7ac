"""Operators that bring their gradients along: what a compiler and autocast know of the kernels."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_losses._core.fused import is_batched
from sparse_losses.kernels._language import on_device

__all__ = ["gradient_dtype", "only", "scale_", "with_gradients"]


def with_gradients(operator: Any, count: int) -> None:
    """Tells autograd of an operator ``-> list[Tensor]``: a 0-d value, then its gradients.

    There are ``count`` of them, by the first ``count`` arguments, empty where none is needed. In
    eager mode ``fuse`` comes first, for the sake of second derivatives; this serves the compiler.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.save_for_backward(*output[1:])
        ctx.num_inputs = len(inputs)

    def backward(ctx: Any, upstream: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # The gradients are numbers to autograd here: their own would silently be left out.
            raise RuntimeError(
                "expected first derivatives alone of a compiled kernel, got create_graph=True; "
                'call it in eager mode, or with impl="torch"'
            )
        of_value = upstream[0]
        assert of_value is not None
        found = [
            gradient * of_value if need else None
            for gradient, need in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        ]
        return *found, *[None] * (ctx.num_inputs - count)

    operator.register_autograd(backward, setup_context=keep)


def gradient_dtype(x: Tensor) -> torch.dtype:
    """What a gradient is held in until it is scaled: fp16 loses what a loss scaler would keep."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def only(needs: Sequence[bool], gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients that are needed, of those that an operator gave."""
    return [g if need else None for need, g in zip(needs, gradients, strict=False)]


@triton.jit
def _scale(x_pointer, factor_pointer, size, BLOCK: tl.constexpr):
    factor = tl.load(factor_pointer)
    if factor != 1.0:  # `loss.backward()` starts from 1: then nothing is read or written
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_pointer + index, mask=index < size)
        tl.store(x_pointer + index, (x * factor).to(x.dtype), mask=index < size)


def scale_(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """Scales in place by a 0-d factor, without a pass over the memory where the factor is 1."""
    if gradient is None or is_batched(factor):
        return None if gradient is None else gradient * factor
    if not gradient.is_contiguous():
        return gradient.mul_(factor)
    block = 1024
    with on_device(gradient):
        _scale[(max(triton.cdiv(gradient.numel(), block), 1),)](
            gradient, factor.float(), gradient.numel(), BLOCK=block
        )
    return gradient
