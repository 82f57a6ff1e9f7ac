"""The head as an operator, which compilers do not trace, and its derivatives.

The operator returns the logits ``[B, V]`` and the positions of their maxima, from which the
gradient goes back to hidden states and weight (``spread``). It follows the active entries
(``head_entries``): their number is copied to the host while the forward pass runs. Where many are
active, or their number is unknown, two dense products take its place (``head_tiles``).
"""

from typing import Any, Sequence  # noqa: UP035  # PyTorch 2.6 needs it for operators

import torch
from torch import Tensor

from sparse_losses._core.host_copy import HostCopy, can_copy
from sparse_losses._core.own_gradient import can_bring_its_gradient
from sparse_losses._core.precision import autocast_off
from sparse_losses.fast.head_entries import (
    Inputs,
    entries_of,
    gradients_at,
    is_active,
    operand_type,
)
from sparse_losses.fast.head_packed import packed_entries
from sparse_losses.fast.head_tiles import dense_gradients, picked, tiles_of_maxima

# The gradient follows the entries if there are this many scores [B, S, V] for each. Measured on a
# CPU, where entries win from eight positions on; elsewhere calculated: 6 ps for a score of dense
# bf16 products, 3 ns for an entry, on an H200.
SCORES_OF_AN_ENTRY = {"cpu": 8}
SCORES_OF_AN_ENTRY_ELSEWHERE = 512


def largest_logits(
    inputs: Inputs, impl: str, return_logits: bool, sparse_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the largest logits ``[B, V]``, and where there are none ``[B, 1]``."""
    hidden, weight, _, attended, _, dtype = inputs
    keeps_places = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    flags = impl, return_logits, keeps_places, sparse_grad
    logits, _ = head_logits(*inputs, operand_type(hidden, weight, dtype), *flags)
    return logits, None if attended is None else attended.logical_not().all(1, keepdim=True)


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attended: Tensor | None,
    gate: Tensor | None,
    dtype: torch.dtype,
    operands: torch.dtype,
    impl: str,
    keep_all: bool,
    keeps_places: bool,
    sparse_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return logits before the gate and, if requested, positions; ``keep_all`` also inactive."""
    logits, places = _empty_logits(hidden, weight, dtype, keeps_places)
    length = max(hidden.shape[1], 1)
    with autocast_off(hidden.device):
        if impl == "packed":
            inputs = Inputs(hidden, weight, bias, attended, gate, dtype)
            column, token, value = packed_entries(inputs, keep_all)
            logits.fill_(-torch.inf)[token // length, column] = value
            if keeps_places:
                places.zero_()[token // length, column] = (token % length).to(places.dtype)
            return logits, places
        tiles = tiles_of_maxima(hidden, weight, attended, operands, keeps_places)
        for part, highest, place in tiles:
            logits[:, part] = highest
            if keeps_places:
                places[:, part] = place
    return logits if bias is None else logits.add_(bias), places


def _spread(
    upstream: Tensor,
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    attended: Tensor | None,
    operands: torch.dtype,
    needs: Sequence[bool],
    size: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients, empty where not needed; ``size`` bounds the entries, -1: unknown."""
    length, kind, most = hidden.shape[1], hidden.device.type, size
    scores = SCORES_OF_AN_ENTRY.get(kind, SCORES_OF_AN_ENTRY_ELSEWHERE)
    if kind in SCORES_OF_AN_ENTRY:
        most, size = int(upstream.count_nonzero()), -1
    with autocast_off(hidden.device):
        if 0 <= most * scores <= upstream.numel() * length:
            entries = entries_of(upstream.to(operands), place, length, size)
            return gradients_at(entries, hidden, weight, needs)
        return dense_gradients(upstream, place, hidden, weight, attended, operands, needs)


# ------------------------------------------------------------------------------------------------
# Custom operators: shapes of their results, and derivatives


def _empty_logits(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, keeps_places: bool
) -> tuple[Tensor, Tensor]:
    shape, length = (hidden.shape[0], weight.shape[0]), hidden.shape[1]
    integer = torch.int16 if length <= 1 << 15 else torch.int32
    integer = torch.uint8 if length <= 1 << 8 else integer
    places = hidden.new_empty(shape if keeps_places else 0, dtype=integer)
    return hidden.new_empty(shape, dtype=dtype), places


head_logits = torch.library.custom_op("sparse_losses::head_logits", _logits, mutates_args=())
spread = torch.library.custom_op("sparse_losses::head_spread", _spread, mutates_args=())


@head_logits.register_fake
def _(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _empty_logits(hidden, weight, others[3], others[-2])


@spread.register_fake
def _(
    upstream: Tensor, place: Tensor, hidden: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    pairs = zip((hidden, weight), others[-2], strict=True)
    grad_hidden, grad_weight = (x.new_empty(x.shape if need else 0) for x, need in pairs)
    return grad_hidden, grad_weight


def _keep_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, gate, _, operands, _, keep_all, keeps_places, sparse_grad = inputs
    logits, place = output
    ctx.save_for_backward(place, *tensors)
    ctx.operands, ctx.sparse_grad, ctx.size = operands, sparse_grad, None
    ctx.set_materialize_grads(False)  # avoids zeros as the gradient of positions
    counts = keeps_places and not keep_all and logits.device.type not in SCORES_OF_AN_ENTRY
    if counts and can_bring_its_gradient(logits) and can_copy(logits):
        ctx.size = HostCopy(is_active(logits, gate).sum())


def _backward_of_logits(ctx: Any, upstream: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if upstream is None:
        return (None,) * 11
    place, hidden, weight, bias, attended = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    is_plain = can_bring_its_gradient(upstream) and not torch.is_grad_enabled()
    gradients: Sequence[Tensor | None] = (None, None)
    if ctx.sparse_grad and is_plain and any(needs[:2]):
        entries = entries_of(upstream, place, hidden.shape[1], -1)
        gradients = gradients_at(entries, hidden, weight, needs, sparse_grad=True)
    elif any(needs[:2]):
        size = -1 if ctx.size is None else int(ctx.size.read())
        states = hidden, weight, attended
        gradients = spread(upstream, place, *states, ctx.operands, needs[:2], size)
    grad_bias = None if bias is None else upstream.sum(0).to(bias.dtype)
    each = zip((*gradients, grad_bias), needs, strict=True)
    return *[gradient if need else None for gradient, need in each], *[None] * 8


def _keep_spread(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.operands, ctx.needs, ctx.size = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_spread(ctx: Any, *upstreams: Tensor) -> tuple[Any, ...]:
    """Differentiate ``spread``, which is linear in ``upstream``, hidden states and weight each."""
    upstream, place, hidden, weight, attended = ctx.saved_tensors
    common = attended, ctx.operands
    grad_upstream, both = torch.zeros_like(upstream), [None, None]
    for k, pair in enumerate([(upstreams[0], weight), (hidden, upstreams[1])]):
        if not ctx.needs[k]:
            continue
        grad_upstream = grad_upstream + picked(place, *pair, *common, upstream.dtype)
        if ctx.needs_input_grad[3 - k]:
            needs = [k == 1, k == 0]
            both[1 - k] = spread(upstream, place, *pair, *common, needs, ctx.size)[1 - k]
    return grad_upstream, None, *both, *[None] * 4


head_logits.register_autograd(_backward_of_logits, setup_context=_keep_logits)
spread.register_autograd(_backward_of_spread, setup_context=_keep_spread)
