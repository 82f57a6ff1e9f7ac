"""Computation of value and gradient together in the forward pass, for eager mode."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparse_losses._core.precision import autocast_off
from sparse_losses._core.private_torch import forward_level, transforms_are_active
from sparse_losses._core.products import scaled_

Gradients = Mapping[str, Tensor | None]


def can_bring_its_gradient(*arguments: Any) -> bool:
    """Whether the gradient can be computed in the forward pass: eager mode, no transform."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in (Tensor, nn.Parameter) for x in arguments if isinstance(x, Tensor))
        and not is_transformed()
    )


def is_transformed() -> bool:
    """Whether ``torch.func`` or forward-mode derivatives are active; they need plain operations."""
    if torch.compiler.is_compiling():
        return False
    return bool(transforms_are_active() or forward_level() >= 0)


def with_own_gradient(
    definition: Callable[..., Tensor],
    compute: Callable[..., tuple[Tensor, Gradients]],
    arguments: Mapping[str, Any],
) -> Tensor:
    """Return ``definition(**arguments)``, computed by ``compute``.

    ``compute(needs, **arguments)`` returns the value, one number, and the gradients by name of the
    tensors in ``needs``, without a graph. They are scaled in place, so it must own them; those of
    halves may be fp32, rounded after scaling. Second derivatives use ``definition``.
    """
    # Autograd takes and returns tensors by position; nothing outside of this function does.
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors.values()):
        return compute(frozenset(), **arguments)[0]
    value: Tensor = _OwnGradient.apply(definition, compute, arguments, *tensors.values())  # type: ignore[no-untyped-call]
    return value


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        definition: Callable[..., Tensor],
        compute: Callable[..., tuple[Tensor, Gradients]],
        arguments: Mapping[str, Any],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.definition, ctx.compute = definition, compute
        names = [name for name, x in arguments.items() if isinstance(x, Tensor)]
        # PyTorch cannot save inference tensors, such as keys made in inference mode.
        saved = {n: x for n, x in zip(names, tensors, strict=True) if not x.is_inference()}
        ctx.save_for_backward(*saved.values())
        ctx.saved, ctx.dtypes = list(saved), {n: arguments[n].dtype for n in names}
        ctx.needs = frozenset(
            n for n, need in zip(names, ctx.needs_input_grad[3:], strict=True) if need
        )
        ctx.others = {n: None if n in saved else x for n, x in arguments.items()}
        value, ctx.gradients = compute(ctx.needs, **arguments)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _through_definition(ctx, upstream)
            return None, None, None, *(gradients.get(name) for name in ctx.dtypes)
        # The gradients are handed over, so that a leaf keeps the buffer itself. A second backward
        # computes them again, bit for bit; only it needs the arguments unchanged.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            with autocast_off(upstream.device):
                _, gradients = ctx.compute(ctx.needs, **_arguments(ctx))
        scaled = {name: gradients[name] for name in ctx.needs if gradients.get(name) is not None}
        if not _is_one(upstream):  # else autograd casts what is not of the input's dtype
            scaled = {name: scaled_(x, upstream, ctx.dtypes[name]) for name, x in scaled.items()}
        return None, None, None, *(scaled.get(name) for name in ctx.dtypes)


def _through_definition(ctx: Any, upstream: Tensor) -> Gradients:
    # Aliases cut the graph between inputs: where one depends on another, autograd adds that path.
    with autocast_off(upstream.device):
        arguments = _arguments(ctx)
        aliases = {name: _alias(arguments[name]) for name in ctx.dtypes}
        value = ctx.definition(**{**arguments, **aliases})
        needed = [name for name in ctx.dtypes if name in ctx.needs]
        gradients = torch.autograd.grad(
            value,
            [aliases[name] for name in needed],
            upstream,
            create_graph=True,
            allow_unused=True,
        )
    return dict(zip(needed, gradients, strict=True))


def _arguments(ctx: Any) -> dict[str, Any]:
    return {**ctx.others, **dict(zip(ctx.saved, ctx.saved_tensors, strict=True))}


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.layout == torch.strided else tensor.clone()


def _is_one(factor: Tensor) -> bool:
    """Whether ``factor`` is the 1 of ``loss.backward()``; read only on the CPU (free)."""
    if not factor.is_cpu:
        return False
    try:
        return factor.item() == 1
    except RuntimeError:  # batched, as in a vectorised Jacobian
        return False
