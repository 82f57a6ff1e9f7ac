"""The head in tiles of the vocabulary: a few launches per tile and no sync with the device.

The forward pass computes the scores of a tile and the maximum of every text, with its position.
The backward pass follows the active entries (``head_entries``), whose number is copied to the host
meanwhile. Where many are active, or their number is unknown, it scatters the incoming gradient to
the positions in a tile of zeros; two products give the gradients of hidden states and weight.

``maxima``, ``picked`` and ``spread`` are each other's derivatives, so that they can be
differentiated any number of times. With positions ``p``, states ``x`` and rows ``w``,
``picked(x, w)[i, j]`` is ``x[i, p[i, j]] . w[j]``, and ``spread`` is its gradient with respect to
both. They are custom operators, which compilers do not trace. ``source`` gives the position whose
state is used at each position: a masked position gets a copy of an attended state of the same text,
which cannot change the maximum. A text without attended positions is ``absent``: its states are
zeros.

Halves are multiplied as halves. If the device can return such a product in fp32, the maximum is
over fp32 scores and the gradient of the hidden states is summed in fp32. Otherwise the scores are
rounded to halves, as in a linear layer.
"""

import itertools
from collections.abc import Iterator
from typing import Any, Sequence  # noqa: UP035  # PyTorch 2.6 needs it for operators

import torch
from torch import Tensor

from sparse_losses._core.host_copy import HostCopy, can_copy
from sparse_losses._core.own_gradient import can_bring_its_gradient
from sparse_losses._core.precision import autocast_off
from sparse_losses._core.products import product, returns_fp32
from sparse_losses.fast.head_entries import Entries, entries_of, gradients_at, places_of

BYTES = 1 << 28  # maximal size of a tile's scores, and of a tile's rows of the weight
# The backward pass follows the entries if they are at most one in this many of the scores [B, S, V].
# Measured on a CPU, where entries win from eight positions on; elsewhere calculated, from 6 ps a
# score of dense bf16 products and 3 ns an entry on an H200.
SCORES_OF_AN_ENTRY = {"cpu": 8}
SCORES_OF_AN_ENTRY_ELSEWHERE = 512


def tiled_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attended: Tensor | None,
    gate: Tensor | None,
    *,
    dtype: torch.dtype,
    return_logits: bool,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the largest logits ``[B, V]``, and where there are none ``[B, 1]``."""
    around = sources(attended)
    keeps = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    operands = product_dtype(hidden, weight, dtype)
    inputs = hidden, weight, bias, gate, *around
    logits, *_ = maxima(*inputs, operands, dtype, keeps, keeps and not return_logits)
    return logits, around[1]


def tiled_entries(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attended: Tensor | None,
    gate: Tensor | None,
    dtype: torch.dtype,
) -> Entries:
    """Return the active entries; the device computes a tile while the host waits for the last."""
    source, absent = sources(attended)
    operands = product_dtype(hidden, weight, dtype)
    found: list[Entries] = []
    before: Any = None
    with autocast_off(hidden.device):
        tiles = _maxima_of_tiles(hidden, weight, source, absent, operands, dtype, True)
        for part, highest, place in itertools.chain(tiles, [(slice(0), None, None)]):
            now = None
            if highest is not None:
                logit = highest if bias is None else highest + bias[part]
                is_active = _is_active(logit, None if gate is None else gate[:, part])
                if absent is not None:
                    is_active &= ~absent
                now = part.start, logit, place, is_active, HostCopy(is_active.sum(), int)
            if before is not None:
                found.append(_entries_of_tile(*before, hidden.shape[1]))
            before = now
    return Entries(*map(torch.cat, zip(*found, strict=True)))


def _entries_of_tile(
    start: int, logit: Tensor, place: Tensor, is_active: Tensor, size: HostCopy[int], length: int
) -> Entries:
    flat = places_of(is_active.flatten(), size.read())
    row, column = flat // logit.shape[1], flat % logit.shape[1]
    return Entries(column + start, row * length + place[row, column], logit[row, column])


def _is_active(logit: Tensor, gate: Tensor | None) -> Tensor:
    """Return which logits are active after the gate; a NaN is, so that it is visible."""
    return ~((logit if gate is None else logit * gate) <= 0)


def product_dtype(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the product's operands: ``dtype`` on the CPU, else that of the inputs."""
    if hidden.device.type == "cpu" or dtype == torch.float64:
        return dtype
    return torch.promote_types(hidden.dtype, weight.dtype)


def sources(attended: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return ``source [B, S]`` and ``absent [B, 1]`` (see the top of the module)."""
    if attended is None or attended.shape[1] == 0:
        return None, None
    position = torch.arange(attended.shape[1], device=attended.device)
    # Inductor finds wrong positions in a maximum over bool (PyTorch's issues 174069 and 184893).
    has_any, some = attended.view(torch.uint8).max(1, keepdim=True)
    return torch.where(attended, position, some), has_any.logical_not()


def smallest_integer(length: int) -> torch.dtype:
    """Return the smallest integer dtype that holds the positions of a text."""
    if length <= 1 << 8:
        return torch.uint8
    return torch.int16 if length <= 1 << 15 else torch.int32


def _maxima(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    source: Tensor | None,
    absent: Tensor | None,
    operands: torch.dtype,
    dtype: torch.dtype,
    keeps_places: bool,
    counts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits ``[B, V]`` and, if requested, positions and the number of active ones."""
    logits, places, count = _empty_maxima(hidden, weight, dtype, keeps_places, counts)
    with autocast_off(hidden.device):
        arguments = hidden, weight, source, absent, operands, dtype, keeps_places
        for part, highest, place in _maxima_of_tiles(*arguments):
            logits[:, part] = highest
            if place is not None:
                places[:, part] = place
    if bias is not None:
        logits += bias
    if counts:
        count = _is_active(logits, gate).sum()
    return logits, places, count


def _maxima_of_tiles(
    hidden: Tensor,
    weight: Tensor,
    source: Tensor | None,
    absent: Tensor | None,
    operands: torch.dtype,
    dtype: torch.dtype,
    keeps_places: bool,
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield columns, their largest scores ``[B, T]`` and, if requested, positions."""
    states = _states(hidden, source, absent, operands)
    for part, rows in _tiles(weight, states, _bytes_of_a_score(states)):
        scores = _scores(rows, states, len(hidden))
        if not keeps_places:
            yield part, scores.amax(2).T.to(dtype), None
            continue
        highest, place = scores.max(2)
        del scores
        place = place.T if source is None else source.gather(1, place.T)
        yield part, highest.T.to(dtype), place


def _picked(
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    source: Tensor | None,
    absent: Tensor | None,
    operands: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """Return the scores ``[B, V]`` at the positions ``place``."""
    scores = hidden.new_zeros(place.shape, dtype=dtype)
    if 0 in hidden.shape[:2]:
        return scores
    with autocast_off(hidden.device):
        states = _states(hidden, source, absent, operands)
        for part, rows in _tiles(weight, states, _bytes_of_a_score(states)):
            index = place[:, part].T.long()[..., None]
            scores[:, part] = _scores(rows, states, len(hidden)).gather(2, index)[..., 0].T
    return scores


def _spread(
    upstream: Tensor,
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    source: Tensor | None,
    absent: Tensor | None,
    operands: torch.dtype,
    needs: Sequence[bool],
    size: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden states and weight; empty where not needed.

    At most ``size`` numbers of ``upstream`` are not 0; on an accelerator -1 is any number.
    """
    kind, length = hidden.device.type, hidden.shape[1]
    if size < 0 and kind == "cpu":
        size = int(upstream.count_nonzero())
    scores = SCORES_OF_AN_ENTRY.get(kind, SCORES_OF_AN_ENTRY_ELSEWHERE)
    if 0 <= size * scores <= upstream.numel() * length or length == 0:
        with autocast_off(hidden.device):
            entries = entries_of(upstream.to(operands), place, length, size)
            return gradients_at(entries, hidden, weight, needs, sparse_grad=False)
    grad_hidden, grad_weight = _empty_gradients(hidden, weight, needs)
    with autocast_off(hidden.device):
        states = _states(hidden, source, absent, operands)
        factors = upstream.to(operands)
        total = hidden.new_zeros(states.shape if needs[0] else 0, dtype=upstream.dtype)
        for part, rows in _tiles(weight, states, states.element_size()):
            index = place[:, part].T.long()[..., None]
            at_places = states.new_zeros(len(rows), *hidden.shape[:2])
            at_places = at_places.scatter_(2, index, factors[:, part].T[..., None]).flatten(1)
            if needs[0]:
                total += _product(at_places.T, rows)
            if needs[1] and weight.dtype == operands:
                torch.mm(at_places, states, out=grad_weight[part])
            elif needs[1]:
                grad_weight[part] = at_places @ states
            del at_places  # free it before the next tile is allocated
        if needs[0]:
            grad_hidden = total.view(hidden.shape).to(hidden.dtype)
    return grad_hidden, grad_weight


def _states(
    hidden: Tensor, source: Tensor | None, absent: Tensor | None, operands: torch.dtype
) -> Tensor:
    """Return the states ``[B * S, H]`` to multiply."""
    if source is not None and absent is not None:
        hidden = hidden.gather(1, source[..., None].expand(hidden.shape))
        hidden.masked_fill_(absent[..., None], 0.0)
    return hidden.flatten(0, 1).to(operands)


def _scores(rows: Tensor, states: Tensor, batch: int) -> Tensor:
    return _product(rows, states.T).view(len(rows), batch, -1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, in fp32 if that needs no cast: a cast would bypass the tensor cores."""
    return product(a, b) if returns_fp32(a.device, a.dtype) else a @ b


def _bytes_of_a_score(states: Tensor) -> int:
    return 4 if returns_fp32(states.device, states.dtype) else states.element_size()


def _tiles(weight: Tensor, states: Tensor, bytes_of_a_score: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the weight's rows whose scores stay within the memory budget."""
    height = _tile_height(states, bytes_of_a_score)
    for start in range(0, len(weight), height):
        part = slice(start, start + height)
        yield part, weight[part].to(states.dtype)


def _tile_height(states: Tensor, bytes_of_a_score: int) -> int:
    return max(BYTES // (max(states.shape) * bytes_of_a_score), 1)


# ------------------------------------------------------------------------------------------------
# Custom operators: shapes of their results, and derivatives


def _empty_maxima(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, keeps_places: bool, counts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = hidden.shape[0], weight.shape[0]
    return (
        hidden.new_empty(shape, dtype=dtype),
        hidden.new_empty(shape if keeps_places else 0, dtype=smallest_integer(hidden.shape[1])),
        hidden.new_empty(() if counts else 0, dtype=torch.int64),
    )


def _empty_gradients(
    hidden: Tensor, weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0),
    )


maxima = torch.library.custom_op("sparse_losses::head_maxima", _maxima, mutates_args=())
picked = torch.library.custom_op("sparse_losses::head_picked", _picked, mutates_args=())
spread = torch.library.custom_op("sparse_losses::head_spread", _spread, mutates_args=())


@maxima.register_fake
def _(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_maxima(hidden, weight, *others[-3:])


@picked.register_fake
def _(place: Tensor, hidden: Tensor, weight: Tensor, *others: Any) -> Tensor:
    *_, dtype = others
    return hidden.new_empty(place.shape, dtype=dtype)


@spread.register_fake
def _(
    upstream: Tensor, place: Tensor, hidden: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    *_, needs, _ = others
    return _empty_gradients(hidden, weight, needs)


def keep_for_backward(
    ctx: Any, place: Tensor, *tensors: Tensor | None, operands: torch.dtype, sparse_grad: bool
) -> None:
    """Keep what ``backward_of_logits`` needs: hidden, weight, bias, source and absent, too."""
    ctx.save_for_backward(place, *tensors)
    ctx.operands, ctx.sparse_grad, ctx.size = operands, sparse_grad, None
    ctx.set_materialize_grads(False)  # avoids zeros as the gradient of positions


def backward_of_logits(ctx: Any, upstream: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of hidden states, weight and bias."""
    if upstream is None:
        return (None,) * 3
    place, hidden, weight, bias, source, absent = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    size = -1 if ctx.size is None else ctx.size.read()
    is_plain = can_bring_its_gradient(upstream) and not torch.is_grad_enabled()
    both: Sequence[Tensor | None] = (None, None)
    if not any(needs[:2]):
        pass
    elif ctx.sparse_grad and is_plain:
        entries = entries_of(upstream, place, hidden.shape[1], size)
        both = gradients_at(entries, hidden, weight, needs, sparse_grad=True)
    else:
        inputs = upstream, place, hidden, weight, source, absent
        both = spread(*inputs, ctx.operands, needs[:2], size)
    grad_bias = None if bias is None else upstream.sum(0).to(bias.dtype)
    gradients = zip((*both, grad_bias), needs, strict=True)
    return tuple(each if need else None for each, need in gradients)


def _keep_maxima(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, _, source, absent, operands, *_ = inputs
    _, place, count = output
    tensors = hidden, weight, bias, source, absent
    keep_for_backward(ctx, place, *tensors, operands=operands, sparse_grad=False)
    if count.ndim == 0 and can_bring_its_gradient(count) and can_copy(count):
        ctx.size = HostCopy(count, int)


def _backward_of_maxima(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return *backward_of_logits(ctx, upstream), *[None] * 7


def _keep_picked(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, operands, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.operands = operands


def _backward_of_picked(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[1:3])
    gradients = spread(upstream, *ctx.saved_tensors, ctx.operands, needs, -1)
    return None, *gradients, *[None] * 4


def _keep_spread(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, operands, needs, size = inputs
    ctx.save_for_backward(*tensors)
    ctx.operands, ctx.needs, ctx.size = operands, needs, size


def _backward_of_spread(ctx: Any, to_hidden: Tensor, to_weight: Tensor) -> tuple[Any, ...]:
    """Differentiate ``spread``, which is linear in ``upstream``, hidden states and weight each.

    ``to_hidden`` and ``to_weight`` are the incoming gradients of its two results.
    """
    upstream, place, hidden, weight, source, absent = ctx.saved_tensors
    common = source, absent, ctx.operands
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
    return grad_upstream, None, grad_hidden, grad_weight, *[None] * 5


maxima.register_autograd(_backward_of_maxima, setup_context=_keep_maxima)
picked.register_autograd(_backward_of_picked, setup_context=_keep_picked)
spread.register_autograd(_backward_of_spread, setup_context=_keep_spread)
