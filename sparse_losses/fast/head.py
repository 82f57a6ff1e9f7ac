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
from sparse_losses.fast.head_entries import entries_of, gradients_at, is_active
from sparse_losses.fast.head_packed import packed_entries
from sparse_losses.fast.head_tiles import dense_gradients, picked, product_dtype, tiles_of_maxima

# The gradient follows the entries if there are this many scores [B, S, V] for each. Measured on a
# CPU, where entries win from eight positions on; elsewhere calculated: 6 ps for a score of dense
# bf16 products, 3 ns for an entry, on an H200.
SCORES_OF_AN_ENTRY = {"cpu": 8}
SCORES_OF_AN_ENTRY_ELSEWHERE = 512


def largest_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attended: Tensor | None,
    gate: Tensor | None,
    *,
    dtype: torch.dtype,
    impl: str,
    return_logits: bool = False,
    sparse_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the largest logits ``[B, V]``, and where there are none ``[B, 1]``.

    Packed, without ``return_logits``, the logits that the gate does not leave active are -inf.
    """
    keeps_places = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    flags = impl, return_logits, keeps_places, sparse_grad
    operands = product_dtype(hidden, weight, dtype)
    logits, *_ = head_logits(hidden, weight, bias, gate, attended, operands, dtype, *flags)
    if attended is None:
        absent = None if hidden.shape[1] else hidden.new_ones(len(hidden), 1, dtype=torch.bool)
    else:
        absent = attended.logical_not().all(1, keepdim=True)
    return logits, absent


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    attended: Tensor | None,
    operands: torch.dtype,
    dtype: torch.dtype,
    impl: str,
    keep_all: bool,
    keeps_places: bool,
    sparse_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits before the gate, their positions and, by tiles, the number of active ones.

    Without ``keep_all`` only active logits are of interest.
    """
    logits, places, count = _empty_logits(hidden, weight, dtype, keep_all, keeps_places)
    length = max(hidden.shape[1], 1)
    with autocast_off(hidden.device):
        if impl == "packed":
            entries = packed_entries(hidden, weight, bias, attended, gate, dtype, keep_all)
            index = entries.token // length, entries.column
            logits.fill_(-torch.inf)[index] = entries.value
            if keeps_places:
                places.zero_()[index] = (entries.token % length).to(places.dtype)
        else:
            tiles = tiles_of_maxima(hidden, weight, attended, operands, keeps_places)
            for part, highest, place in tiles:
                logits[:, part] = highest
                if keeps_places:
                    places[:, part] = place
            logits = logits if bias is None else logits.add_(bias)
    if count.ndim == 0:
        count = is_active(logits, gate).sum()
    return logits, places, count


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
    """Return the gradients of hidden states and weight; empty where not needed.

    At most ``size`` numbers of ``upstream`` are not 0; -1 stands for any number.
    """
    kind, length = hidden.device.type, hidden.shape[1]
    if size < 0 and kind == "cpu":
        size = int(upstream.count_nonzero())
    scores = SCORES_OF_AN_ENTRY.get(kind, SCORES_OF_AN_ENTRY_ELSEWHERE)
    with autocast_off(hidden.device):
        if 0 <= size * scores <= upstream.numel() * length:
            entries = entries_of(upstream.to(operands), place, length, size)
            return gradients_at(entries, hidden, weight, needs)
        return dense_gradients(upstream, place, hidden, weight, attended, operands, needs)


# ------------------------------------------------------------------------------------------------
# Custom operators: shapes of their results, and derivatives


def _empty_logits(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, keep_all: bool, keeps_places: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape, length = (hidden.shape[0], weight.shape[0]), hidden.shape[1]
    integer = torch.uint8 if length <= 1 << 8 else torch.int16
    integer = integer if length <= 1 << 15 else torch.int32
    counts = keeps_places and not keep_all and not hidden.is_cpu  # where the backward pass counts
    return (
        hidden.new_empty(shape, dtype=dtype),
        hidden.new_empty(shape if keeps_places else 0, dtype=integer),
        hidden.new_empty(() if counts else 0, dtype=torch.int64),
    )


head_logits = torch.library.custom_op("sparse_losses::head_logits", _logits, mutates_args=())
spread = torch.library.custom_op("sparse_losses::head_spread", _spread, mutates_args=())


@head_logits.register_fake
def _(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, dtype, _, keep_all, keeps_places, _ = others
    return _empty_logits(hidden, weight, dtype, keep_all, keeps_places)


@spread.register_fake
def _(
    upstream: Tensor, place: Tensor, hidden: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    *_, needs, _ = others
    return (
        hidden.new_empty(hidden.shape if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0),
    )


def _keep_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, _, attended, operands, *_, sparse_grad = inputs
    _, place, count = output
    ctx.save_for_backward(place, hidden, weight, bias, attended)
    ctx.operands, ctx.sparse_grad, ctx.size = operands, sparse_grad, None
    ctx.set_materialize_grads(False)  # avoids zeros as the gradient of positions
    if count.ndim == 0 and can_bring_its_gradient(count) and can_copy(count):
        ctx.size = HostCopy(count, int)


def _backward_of_logits(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
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
        size = -1 if ctx.size is None else ctx.size.read()
        inputs = upstream, place, hidden, weight, attended
        gradients = spread(*inputs, ctx.operands, needs[:2], size)
    grad_bias = None if bias is None else upstream.sum(0).to(bias.dtype)
    each = zip((*gradients, grad_bias), needs, strict=True)
    return *[gradient if need else None for gradient, need in each], *[None] * 8


def _keep_spread(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, operands, needs, size = inputs
    ctx.save_for_backward(*tensors)
    ctx.operands, ctx.needs, ctx.size = operands, needs, size


def _backward_of_spread(ctx: Any, to_hidden: Tensor, to_weight: Tensor) -> tuple[Any, ...]:
    """Differentiate ``spread``, which is linear in ``upstream``, hidden states and weight each.

    ``to_hidden`` and ``to_weight`` are the incoming gradients of its two results.
    """
    upstream, place, hidden, weight, attended = ctx.saved_tensors
    common = attended, ctx.operands
    grad_upstream = torch.zeros_like(upstream)
    grad_hidden = grad_weight = None
    if ctx.needs[0]:
        grad_upstream = grad_upstream + picked(place, to_hidden, weight, *common, upstream.dtype)
        if ctx.needs_input_grad[3]:
            only = [False, True], ctx.size
            _, grad_weight = spread(upstream, place, to_hidden, weight, *common, *only)
    if ctx.needs[1]:
        grad_upstream = grad_upstream + picked(place, hidden, to_weight, *common, upstream.dtype)
        if ctx.needs_input_grad[2]:
            only = [True, False], ctx.size
            grad_hidden, _ = spread(upstream, place, hidden, to_weight, *common, *only)
    return grad_upstream, None, grad_hidden, grad_weight, *[None] * 4


head_logits.register_autograd(_backward_of_logits, setup_context=_keep_logits)
spread.register_autograd(_backward_of_spread, setup_context=_keep_spread)
