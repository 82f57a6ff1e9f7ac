"""Computation of value and gradient together in the forward pass, for eager mode."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparse_losses._core.precision import autocast_off
from sparse_losses._core.private_torch import (
    forward_mode_is_active,
    is_batched,
    transforms_are_active,
)

__all__ = ["can_bring_its_gradient", "is_transformed", "with_own_gradient"]

Gradients = Sequence[Tensor | None]


def can_bring_its_gradient(*arguments: Any) -> bool:
    """Whether the gradient can be computed in the forward pass: eager mode, no transform.

    A compiler fuses the definition; ``torch.func`` and forward-mode derivatives need it.
    """
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in (Tensor, nn.Parameter) for x in arguments if isinstance(x, Tensor))
        and not is_transformed()
    )


def is_transformed() -> bool:
    """Whether ``torch.func`` or forward-mode derivatives are active; they need plain operations."""
    if torch.compiler.is_compiling():
        return False
    return transforms_are_active() or forward_mode_is_active()


def with_own_gradient(
    definition: Callable[..., Tensor],
    compute: Callable[..., tuple[Tensor, Gradients]],
    *arguments: Any,
) -> Tensor:
    """Return ``definition(*arguments)``, computed by ``compute``.

    ``compute(needs, *arguments)`` returns the value (0-d or one per row) and the gradients of the
    tensors that ``needs`` marks; the gradients of row values belong to the tensor's own rows. It
    runs without a graph. Its gradients are scaled in place, so it must own them; for half-precision
    tensors they may be fp32 and are rounded after scaling. Second derivatives use ``definition``.
    """
    needs = [isinstance(x, Tensor) and x.requires_grad for x in arguments]
    if not any(needs) or not torch.is_grad_enabled():
        return compute([False] * len(needs), *arguments)[0]
    value: Tensor = _OwnGradient.apply(definition, compute, *arguments)  # type: ignore[no-untyped-call]
    return value


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        definition: Callable[..., Tensor],
        compute: Callable[..., tuple[Tensor, Gradients]],
        *arguments: Any,
    ) -> Tensor:
        ctx.definition, ctx.compute, ctx.needs = definition, compute, ctx.needs_input_grad[2:]
        # PyTorch cannot save inference tensors, such as keys made in inference mode.
        saved = [x if isinstance(x, Tensor) and not x.is_inference() else None for x in arguments]
        ctx.save_for_backward(*saved)
        ctx.others = [x if s is None else None for x, s in zip(arguments, saved, strict=True)]
        ctx.dtypes = [x.dtype if isinstance(x, Tensor) else None for x in arguments]
        value, ctx.gradients = compute(ctx.needs, *arguments)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, *_through_definition(ctx, upstream)
        # The gradients are handed over, so that a leaf keeps the buffer itself. A second backward
        # computes them again, bit for bit; only it needs the arguments unchanged.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            with autocast_off(upstream.device):
                _, gradients = ctx.compute(ctx.needs, *_arguments(ctx))
        factor = None if _is_one(upstream) else upstream
        scaled = [
            None if g is None else _scaled_(g, factor, dtype)
            for g, dtype in zip(gradients, ctx.dtypes, strict=False)
        ]
        return None, None, *scaled, *[None] * len(ctx.needs)  # PyTorch takes more than it needs


def _through_definition(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    # Aliases cut the graph between inputs: where one depends on another, autograd adds that path.
    with autocast_off(upstream.device):
        aliases = [_alias(x) if isinstance(x, Tensor) else x for x in _arguments(ctx)]
        wanted = [x for x, need in zip(aliases, ctx.needs, strict=True) if need]
        value = ctx.definition(*aliases)
        found = iter(
            torch.autograd.grad(value, wanted, upstream, create_graph=True, allow_unused=True)
        )
    return [next(found) if need else None for need in ctx.needs]


def _arguments(ctx: Any) -> list[Any]:
    both = zip(ctx.saved_tensors, ctx.others, strict=True)
    return [other if saved is None else saved for saved, other in both]


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.layout == torch.strided else tensor.clone()


def _is_one(factor: Tensor) -> bool:
    """Whether ``factor`` is the 1 of ``loss.backward()``; read only on the CPU (free)."""
    return factor.ndim == 0 and factor.is_cpu and not is_batched(factor) and factor.item() == 1


def _scaled_(gradient: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Scale every row, in place unless its dtype changes; else autograd casts it."""
    if factor is None:
        return gradient
    if factor.ndim:
        factor = factor.reshape(factor.shape + (1,) * (gradient.ndim - factor.ndim))
    if is_batched(factor):  # as in a vectorised Jacobian
        return gradient * factor
    if gradient.dtype != dtype:
        return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
    return gradient.mul_(factor)
