"""The packed head as operators of PyTorch, so that compilers take it as it is.

How many entries are active is not known to a compiler. So the operator gives all logits ``[B, V]``,
those of silent entries as -inf, and where their maxima stand; its gradient sums over the entries
whose incoming gradient is not 0.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.activation import splade_activation
from sparse_losses._core.precision import autocast_off
from sparse_losses.fast.head import gradients, maxima
from sparse_losses.fast.head_tiles import smallest_integer, sources, spread

__all__ = ["packed_operator"]


def packed_operator(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attended: Tensor | None,
    gate: Tensor | None,
    *,
    dtype: torch.dtype,
    return_logits: bool = False,
    sparse_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What ``packed_head`` gives; the gradient is dense all the same."""
    if attended is None:
        attended = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    logits, _ = _logits(hidden, weight, bias, gate, attended, dtype, return_logits)
    absent = attended.logical_not().all(1, keepdim=True)
    return splade_activation(logits, None, gate, absent, return_logits)


@torch.library.custom_op("sparse_losses::head_packed", mutates_args=())
def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    attended: Tensor,
    dtype: torch.dtype,
    every: bool,
) -> tuple[Tensor, Tensor]:
    logits, place = _empty_logits(hidden, weight, bias, gate, attended, dtype, every)
    with autocast_off(hidden.device):
        entries = maxima(hidden, weight, bias, attended, gate, dtype, every)
    length = max(hidden.shape[1], 1)
    index = entries.token.long() // length, entries.column.long()
    logits.fill_(-torch.inf)[index] = entries.logit
    place.zero_()[index] = (entries.token % length).to(place.dtype)
    return logits, place


@_logits.register_fake
def _empty_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    attended: Tensor,
    dtype: torch.dtype,
    every: bool,
) -> tuple[Tensor, Tensor]:
    shape = hidden.shape[0], weight.shape[0]
    integer = smallest_integer(hidden.shape[1])
    return hidden.new_empty(shape, dtype=dtype), hidden.new_empty(shape, dtype=integer)


@torch.library.custom_op("sparse_losses::head_packed_backward", mutates_args=())
def _sums(
    upstream: Tensor,
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    column, row = (upstream.T != 0).nonzero(as_tuple=True)  # sorted by column; a NaN is not 0
    token = row * hidden.shape[1] + place[row, column]
    with autocast_off(hidden.device):
        found = gradients(
            hidden, weight, bias, column.int(), token.int(), upstream[row, column], needs, False
        )
    a, b, c = (upstream.new_empty(0) if gradient is None else gradient for gradient in found)
    return a, b, c


@_sums.register_fake
def _(
    upstream: Tensor,
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = upstream.new_empty(0)
    return (
        torch.empty_like(hidden) if needs[0] else nothing,
        torch.empty_like(weight) if needs[1] else nothing.clone(),
        torch.empty_like(bias) if needs[2] and bias is not None else nothing.clone(),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, _, attended, dtype, _ = inputs
    ctx.save_for_backward(output[1], hidden, weight, bias, attended)
    ctx.dtype = dtype
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if upstream is None:
        return (None,) * 7
    place, hidden, weight, bias, attended = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    found: Sequence[Tensor]
    if torch.is_grad_enabled():  # a graph of the gradient is wanted
        around = sources(attended)
        found = (
            *spread(upstream, place, hidden, weight, *around, ctx.dtype, needs[:2], None),
            (upstream.sum(0) if bias is None else upstream.sum(0).to(bias.dtype)),
        )
    else:
        found = _sums(upstream, place, hidden, weight, bias, needs)
    given = [gradient if need else None for gradient, need in zip(found, needs, strict=True)]
    return *given, *[None] * 4


_logits.register_autograd(_backward, setup_context=_keep)
