"""The head in tiles of the vocabulary: a few launches per tile and no sync with the device.

The forward pass computes the scores of a tile and the maximum of every text, with its position. A
masked position gets a copy of an attended state of the same text, which cannot change the maximum.
The dense gradient scatters what comes in to these positions, in a tile of zeros; two products give
the gradients of hidden states and weight.

Halves are multiplied as halves. If the device can return such a product in fp32, scores and the sum
of the hidden states' gradient are fp32. Otherwise scores are rounded, as in a linear layer.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sparse_losses._core.precision import autocast_off
from sparse_losses._core.products import product, returns_fp32
from sparse_losses.fast.head_entries import Entries, Inputs, is_active, operand_type, places_of

BYTES = 1 << 28  # maximal size of a tile's scores, and of a tile's rows of the weight


def tiles_of_maxima(
    hidden: Tensor,
    weight: Tensor,
    attended: Tensor | None,
    operands: torch.dtype,
    keeps_places: bool,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield columns, their largest scores ``[B, T]`` and positions, which may be empty."""
    source, states = _states(hidden, attended, operands)
    for part, rows in _tiles(weight, states, _score_bytes(states)):
        scores = _tile_scores(rows, states, len(hidden))
        if not keeps_places:
            yield part, scores.amax(2).T, scores.new_empty(0)
            continue
        highest, place = scores.max(2)
        del scores  # free it before the next tile is allocated
        yield part, highest.T, place.T if source is None else source.gather(1, place.T)


def tiled_entries(inputs: Inputs) -> Entries:
    """Return the active entries; the host waits for their number, tile by tile."""
    hidden, weight, bias, attended, gate, dtype = inputs
    absent = None if attended is None else attended.logical_not().all(1, keepdim=True)
    operands = operand_type(hidden, weight, dtype)
    found = []
    for part, highest, place in tiles_of_maxima(hidden, weight, attended, operands, True):
        logit = highest.to(dtype) if bias is None else highest.to(dtype) + bias[part]
        active = is_active(logit, None if gate is None else gate[:, part])
        flat = places_of((active if absent is None else active & ~absent).flatten(), -1)
        row, column = flat // logit.shape[1], flat % logit.shape[1]
        token = row * hidden.shape[1] + place[row, column]
        found.append(Entries(column + part.start, token, logit[row, column]))
    return Entries(*map(torch.cat, zip(*found, strict=True)))


def picked(
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    attended: Tensor | None,
    operands: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """Return the scores ``[B, V]`` at the positions ``place``."""
    scores = hidden.new_zeros(place.shape, dtype=dtype)
    if 0 in hidden.shape[:2]:
        return scores
    with autocast_off(hidden.device):
        _, states = _states(hidden, attended, operands)
        for part, rows in _tiles(weight, states, _score_bytes(states)):
            index = place[:, part].T.long()[..., None]
            scores[:, part] = _tile_scores(rows, states, len(hidden)).gather(2, index)[..., 0].T
    return scores


def dense_gradients(
    upstream: Tensor,
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    attended: Tensor | None,
    operands: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden states and weight; empty where not needed."""
    _, states = _states(hidden, attended, operands)
    factors = upstream.to(operands)
    grad_hidden = hidden.new_zeros(states.shape if needs[0] else 0, dtype=upstream.dtype)
    grad_weight = weight.new_empty(weight.shape if needs[1] else 0)
    for part, rows in _tiles(weight, states, states.element_size()):
        index = place[:, part].T.long()[..., None]
        at_places = states.new_zeros(len(rows), *hidden.shape[:2])
        at_places = at_places.scatter_(2, index, factors[:, part].T[..., None]).flatten(1)
        if needs[0]:
            grad_hidden += _product(at_places.T, rows)
        if needs[1]:
            grad_weight[part] = at_places @ states
        del at_places  # free it before the next tile is allocated
    return grad_hidden.view(hidden.shape if needs[0] else 0).to(hidden.dtype), grad_weight


def _states(
    hidden: Tensor, attended: Tensor | None, operands: torch.dtype
) -> tuple[Tensor | None, Tensor]:
    """Return whose state each position gets, itself where attended, and states ``[B * S, H]``."""
    if attended is None or attended.numel() == 0:
        return None, hidden.flatten(0, 1).to(operands)
    position = torch.arange(attended.shape[1], device=attended.device)
    has_any, some = attended.view(torch.uint8).max(1, keepdim=True)
    source = torch.where(attended, position, some)
    hidden = hidden.gather(1, source[..., None].expand(hidden.shape))
    hidden = hidden.masked_fill(has_any.logical_not()[..., None], 0.0)
    return source, hidden.flatten(0, 1).to(operands)


def _tile_scores(rows: Tensor, states: Tensor, batch: int) -> Tensor:
    return _product(rows, states.T).view(len(rows), batch, -1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, in fp32 if that needs no cast: a cast would bypass the tensor cores."""
    return product(a, b) if returns_fp32(a.device, a.dtype) else a @ b


def _score_bytes(states: Tensor) -> int:
    return 4 if returns_fp32(states.device, states.dtype) else states.element_size()


def _tiles(weight: Tensor, states: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the weight's rows whose scores stay within the memory budget."""
    height = _tile_height(states, size)
    for start in range(0, len(weight), height):
        part = slice(start, start + height)
        yield part, weight[part].to(states.dtype)


def _tile_height(states: Tensor, size: int) -> int:
    return max(BYTES // (max(states.shape) * size), 1)
