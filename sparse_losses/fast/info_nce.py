"""In-batch InfoNCE with its gradient: all scores at once, or some rows of them at a time.

The gradient of a row's loss with respect to its scores is the softmax over all candidates; at the
positive it is minus the sum of the others, as ``softmax - 1`` would cancel. A block of scores is
computed, overwritten by its gradient, multiplied back and freed: three matrix products in total.
"""

import functools
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.candidates import Call, Direction, directions
from sparse_losses._core.entries import gather_matrix, scatter_matrix
from sparse_losses._core.implementations import Arguments, Implementation
from sparse_losses._core.softmax import false_negative_limit, one_positive_rows_and_gradient
from sparse_losses.distributed import sum_over_ranks
from sparse_losses.fast.scores import Scores


def info_nce_and_gradients(
    needs: Set[str], *, in_blocks: bool = False, **arguments: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return value and gradients of InfoNCE; all scores are held, or those of a block of rows.

    With ``gather`` this rank's rows are the queries and all ranks' rows the keys. DDP divides
    gradients by the number of ranks W, so they are returned W times as large.
    """
    call = Call(**arguments)
    batch, both, ranks = len(call.anchor), directions(call), call.ranks()
    step = rows_of_a_block(call) if in_blocks else batch
    blocks = [slice(i, min(i + step, batch)) for i in range(0, batch, step)]
    valid = None if call.candidate_mask is None else both[0].own(call.candidate_mask)
    num_rows: float | Tensor = batch * ranks
    if valid is not None:
        count = valid.sum(dtype=torch.promote_types(call.anchor.dtype, torch.float32))
        num_rows = (sum_over_ranks(count) if call.gather else count).clamp(min=1)
    weight = (1 / num_rows if call.reduction == "mean" else 1.0) / len(both)
    slope = weight * ranks / call.temperature
    # Both directions of a square matrix of scores share one product.
    is_shared = call.symmetric and call.in_batch and call.negative is None
    is_shared = is_shared and ranks == 1 and len(blocks) == 1
    options: Any = {"temperature": call.temperature, "cosine": call.similarity == "cosine"}
    hides_nan = valid is not None or both[0].ids is not None
    options |= {"hides_nan": hides_nan, "own_key": not call.in_batch}
    total: dict[str, Tensor] = {}
    values: list[Tensor] = []
    for direction in both[:1] if is_shared else both:
        query, key, negative = direction.query, direction.key, call.negative
        inputs = {query: getattr(call, query)}
        inputs[key] = gather_matrix(getattr(call, key), call.gather and call.in_batch)
        if negative is not None:
            inputs["negative"] = gather_matrix(negative, call.gather and negative.ndim == 2)
        scores = Scores(needs, inputs, **options)
        for rows in blocks:
            block = scores.block(rows)
            backward: list[Tensor] = []
            for dim in (0, 1) if is_shared else (1,):
                candidates = _candidates_of(direction, block, valid, rows, dim)
                own_of = functools.partial(direction.own, start=rows.start)
                losses, gradient = one_positive_rows_and_gradient(candidates, own_of, dim)
                values.append(losses)
                backward.append(gradient)
            if needs:
                gradient = backward[0] if len(backward) == 1 else backward[0].add_(backward[1])
                scores.backward(rows, gradient, slope)
        for name, gradient in scores.gradients().items():
            if name in scores.candidates and len(gradient) > len(own := getattr(call, name)):
                gradient = scatter_matrix(gradient, own)  # the rows of other ranks go there
            total[name] = total[name] + gradient if name in total else gradient
    losses = values[0] if len(values) == 1 else torch.cat(values)
    if call.reduction == "mean" and valid is None and not call.gather:
        return losses.mean(), total
    value = losses.sum()
    return (sum_over_ranks(value) if call.gather else value) * weight, total


def _candidates_of(
    direction: Direction, block: Tensor, valid: Tensor | None, rows: slice, dim: int
) -> Tensor:
    """Return the scores, the lowest number where there is no candidate; may overwrite them.

    In a row that is not valid only the positive is left, so its loss is 0.
    """
    call, num_keys = direction.call, direction.call.num_keys()
    margin, ratio = call.false_negative_margin, call.false_negative_ratio
    limit = None
    if margin is not None or ratio is not None:
        scaled = None if margin is None else margin / call.temperature  # as the scores are
        limit = false_negative_limit(direction.own(block, rows.start), scaled, ratio).unsqueeze(dim)
    excluded = direction.excluded(block, limit, rows)
    if excluded is None:
        return block
    own, lowest = direction.own(block, rows.start).clone(), torch.finfo(block.dtype).min
    block = block if dim == 1 else block.clone()
    block[:, :num_keys].masked_fill_(excluded, lowest)
    if valid is not None and direction.left_out is not None:
        block[:, num_keys:].masked_fill_(direction.left_out[rows, num_keys:], lowest)
        block.masked_fill_(~valid[rows].unsqueeze(dim), lowest)
        own = torch.where(valid[rows], own, 0.0)
    direction.own(block, rows.start).copy_(own)
    return block


# ------------------------------------------------------------------------------------------------
# The choice


def most_scores(device: torch.device) -> int:
    """Return the scores per block: 8 MB in fp32 on a CPU, else 256 MB, as launches cost time."""
    return 1 << 21 if device.type == "cpu" else 1 << 26


def rows_of_a_block(call: Call) -> int:
    """Return the rows per block; each row holds its scores and vectors of the inputs' width."""
    batch, width = call.anchor.shape
    return min(max(most_scores(call.anchor.device) // (call.num_keys() + width), 1), batch)


def _exceeds_a_block(arguments: Arguments) -> bool:
    call = Call(**arguments)
    num_scores = len(call.anchor) * (call.num_keys() + call.num_negatives())
    return num_scores > most_scores(call.anchor.device)


def _unsupported_reason(arguments: Arguments) -> str | None:
    call = Call(**arguments)
    shape = list(call.anchor.shape)
    supported = {
        "no `positive_mask`": call.positive_mask is None,
        "decoupled=False": not call.decoupled,
        'negatives_from=("document",)': set(call.negatives_from) == {"document"},
        'reduction="mean" or "sum"': call.reduction != "none",
        f"B and D of at least 1, got {shape},": min(shape) > 0,
    }
    if isinstance(t := call.temperature, Tensor):
        where = f"`temperature` on {call.anchor.device}, where the data is, got {t.device}"
        supported[where] = t.device == call.anchor.device
    else:
        supported[f"`temperature` from 1e-30 to 1e30, got {t},"] = 1e-30 <= t <= 1e30
    return next((words for words, is_met in supported.items() if not is_met), None)


def _dense_reason(arguments: Arguments) -> str | None:
    return "dense tensors" if _has_csr(arguments) else _unsupported_reason(arguments)


def _nonzeros_reason(arguments: Arguments) -> str | None:
    if arguments["negative"] is not None and arguments["negative"].ndim == 3:
        return "no negatives per row"
    if arguments["anchor"].device.type == "meta":
        return "tensors with values"
    return _unsupported_reason(arguments)


def _has_csr(arguments: Arguments) -> bool:
    vectors = (arguments["anchor"], arguments["positive"], arguments["negative"])
    return any(x is not None and x.layout != torch.strided for x in vectors)


IMPLEMENTATIONS = (  # of InfoNCE and N-pair, in order of preference
    Implementation(
        "nonzeros", _nonzeros_reason, _has_csr, info_nce_and_gradients, purpose="CSR tensors"
    ),
    Implementation(
        "blocks",
        _dense_reason,
        _exceeds_a_block,
        functools.partial(info_nce_and_gradients, in_blocks=True),
        purpose="more scores than 2^21 on a CPU, 2^26 elsewhere",
    ),
    Implementation("direct", _dense_reason, lambda _: True, info_nce_and_gradients),
)
