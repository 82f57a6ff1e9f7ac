"""Value and gradient in one go, where PyTorch runs operation by operation."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["can_fuse", "fuse", "is_batched"]

Gradients = Sequence[Tensor | None]
Fused = Callable[..., tuple[Tensor, Gradients]]

# Below this many elements a dozen small operations are faster than one Function.
FEWEST_ELEMENTS = 1 << 16


def can_fuse(*tensors: Tensor | None, elements: int | None = None) -> bool:
    """Whether a hand-written gradient pays and holds: eager mode, many elements, no transform.

    A compiler fuses the plain formula itself; ``torch.func`` and forward-mode derivatives need it.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if elements is None:
        elements = sum(tensor.numel() for tensor in present)
    return (
        not torch.compiler.is_compiling()
        and elements >= max(FEWEST_ELEMENTS, 1)
        and all(type(tensor) in (Tensor, nn.Parameter) for tensor in present)
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


def fuse(
    plain: Callable[..., Tensor],
    fused: Fused,
    *tensors: Tensor | None,
    scale_: Callable[[Tensor | None, Tensor], Tensor | None] | None = None,
) -> Tensor:
    """``plain(*tensors)``, computed by ``fused``; where a graph of the gradient is wanted, plainly.

    ``fused(needs, *tensors)`` gives the value, 0-d or one a row, and the gradient for every tensor
    that ``needs`` one (those of row values belong to the tensor's own rows). It runs without a
    graph, and its gradients are scaled in place, by ``scale_``: they must be its own. Compiled, it
    runs with a graph, as an operator that brings its own derivative.
    """
    needs = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in tensors]
    if not any(needs) or torch.compiler.is_compiling():
        return fused(needs, *tensors)[0]
    value: Tensor = _Fused.apply(  # type: ignore[no-untyped-call]  # torch gives `apply` none
        plain, fused, scale_ or _scale_, *tensors
    )
    return value


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plain: Callable[..., Tensor],
        fused: Fused,
        scale_: Callable[[Tensor | None, Tensor], Tensor | None],
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.plain, ctx.fused, ctx.scale_, ctx.needs = plain, fused, scale_, ctx.needs_input_grad[3:]
        ctx.save_for_backward(*tensors)
        value, ctx.gradients = fused(ctx.needs, *tensors)
        return value

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (upstream_gradient,) = upstream
        device = upstream_gradient.device.type
        with torch.autocast(device, enabled=False):
            if torch.is_grad_enabled():
                # Aliases: where one input was made from another, the way through it is not ours.
                aliases = [None if t is None else _alias(t) for t in ctx.saved_tensors]
                wanted = [t for t, n in zip(aliases, ctx.needs, strict=True) if n and t is not None]
                value = ctx.plain(*aliases)
                found = iter(
                    torch.autograd.grad(
                        value, wanted, upstream_gradient, create_graph=True, allow_unused=True
                    )
                )
                return None, None, None, *(next(found) if need else None for need in ctx.needs)
            # Given away below, so that a leaf keeps the buffer itself; a second backward computes
            # them again, to the same bits.
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:
                _, gradients = ctx.fused(ctx.needs, *ctx.saved_tensors)
            return None, None, None, *(ctx.scale_(g, upstream_gradient) for g in gradients)


def is_batched(upstream: Tensor) -> bool:
    """Whether many gradients come at once, as for a vectorised Jacobian: nothing in place then."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(upstream) or functorch.is_legacy_batchedtensor(upstream)


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.layout == torch.strided else tensor.clone()


def _scale_(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """Scales every row in place; not at all by the one that ``loss.backward()`` starts from."""
    if gradient is None:
        return None
    if factor.ndim:
        factor = factor.reshape(factor.shape + (1,) * (gradient.ndim - factor.ndim))
    if is_batched(factor):
        return gradient * factor
    if factor.ndim == 0 and factor.device.type == "cpu" and factor == 1:
        return gradient
    return gradient.mul_(factor)
