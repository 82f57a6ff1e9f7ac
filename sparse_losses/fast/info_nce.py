"""In-batch InfoNCE with its gradient: all scores at once, or some rows of them at a time.

The gradient of a row's loss with respect to its scores is the softmax over all candidates; at the
positive it is minus the sum of the others, as ``softmax - 1`` would cancel. A block of scores is
computed, overwritten by its gradient, multiplied back and freed: three matrix products in total.
"""

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.candidates import Call, Direction, directions, false_negatives, number_of
from sparse_losses._core.entries import gather_entries, scatter_entries
from sparse_losses._core.implementations import Arguments, Implementation, always
from sparse_losses._core.softmax import one_positive_rows_and_gradient
from sparse_losses.distributed import gather_rows, scatter_sum, sum_over_ranks
from sparse_losses.fast.scores import DenseScores

Gradients = dict[str, Tensor]


def direct_info_nce(needs: Set[str], **arguments: Any) -> tuple[Tensor, Gradients]:
    """Return value and gradients of InfoNCE; all scores are held at once."""
    call = Call(**arguments)
    return value_and_gradients(needs, call, DenseScores, len(call.anchor))


def blockwise_info_nce(needs: Set[str], **arguments: Any) -> tuple[Tensor, Gradients]:
    """Return value and gradients of InfoNCE; the scores of some rows are held at a time."""
    call = Call(**arguments)
    return value_and_gradients(needs, call, DenseScores, rows_of_a_block(call))


def most_scores(device: torch.device) -> int:
    """Return the scores per block: 8 MB in fp32 on a CPU, else 256 MB, as launches cost time."""
    return 1 << 21 if device.type == "cpu" else 1 << 26


def rows_of_a_block(call: Call) -> int:
    """Return the rows per block; each row holds its scores and vectors of the inputs' width."""
    batch, width = call.anchor.shape
    most = most_scores(call.anchor.device)
    return min(max(most // (call.num_keys() + width), 1), batch)


def exceeds_a_block(arguments: Arguments) -> bool:
    """Whether the full score matrix is larger than a block."""
    call = Call(**arguments)
    num_scores = len(call.anchor) * (call.num_keys() + number_of(call.negative))
    return num_scores > most_scores(call.anchor.device)


def own_gradient_unsupported_reason(arguments: Arguments) -> str | None:
    """Return why implementations with their own gradient do not support the call, or ``None``."""
    anchor, temperature = arguments["anchor"], arguments["temperature"]
    if arguments["positive_mask"] is not None:
        return "no `positive_mask`"
    if arguments["decoupled"]:
        return "decoupled=False"
    if set(arguments["negatives_from"]) != {"document"}:
        return 'negatives_from=("document",)'
    if arguments["reduction"] == "none":
        return 'reduction="mean" or "sum"'
    if min(anchor.shape) == 0:
        return f"B and D of at least 1, got {list(anchor.shape)},"
    limits = torch.finfo(torch.float64 if anchor.dtype == torch.float64 else torch.float32)
    if isinstance(temperature, Tensor):
        if temperature.device != anchor.device:
            return f"`temperature` on {anchor.device}, where `anchor` is, got {temperature.device}"
    elif not limits.tiny <= temperature <= limits.max:
        return f"`temperature` from {limits.tiny:.2g} to {limits.max:.2g}, got {temperature},"
    return None


def dense_unsupported_reason(arguments: Arguments) -> str | None:
    """Return why dense products do not support the call, or ``None``."""
    vectors = (arguments["anchor"], arguments["positive"], arguments["negative"])
    if any(x is not None and x.layout != torch.strided for x in vectors):
        return "dense tensors"
    return own_gradient_unsupported_reason(arguments)


# ------------------------------------------------------------------------------------------------
# Value and gradient


def value_and_gradients(
    needs: Set[str], call: Call, make_scores: Callable[..., Any], rows_per_block: int
) -> tuple[Tensor, Gradients]:
    """Return value and gradients, by the scores that ``make_scores`` makes.

    With ``gather`` this rank's rows are the queries and all ranks' rows the keys. DDP divides
    gradients by the number of ranks W, so they are returned W times as large.
    """
    batch, both, ranks = len(call.anchor), directions(call), call.ranks()
    blocks = [slice(i, min(i + rows_per_block, batch)) for i in range(0, batch, rows_per_block)]
    mask = call.candidate_mask
    valid = None if mask is None else both[0].own(mask)
    num_rows: float | Tensor = batch * ranks
    if valid is not None:
        count = valid.sum(dtype=torch.promote_types(call.anchor.dtype, torch.float32))
        num_rows = (sum_over_ranks(count) if call.gather else count).clamp(min=1)
    weight = (1 / num_rows if call.reduction == "mean" else 1.0) / len(both)
    slope = weight * ranks / call.temperature
    # Both directions of a square matrix of scores share one product.
    is_shared = call.symmetric and call.in_batch and call.negative is None
    is_shared = is_shared and ranks == 1 and len(blocks) == 1
    total, values = Gradients(), []
    for direction in both[:1] if is_shared else both:
        scores = _scores(make_scores, call, direction, needs, valid is not None)
        for rows in blocks:
            block = scores.block(rows)
            backward: list[Tensor] = []
            for dim in (0, 1) if is_shared else (1,):
                present = _candidates_of(call, direction, block, valid, rows, dim)
                losses, gradient = one_positive_rows_and_gradient(
                    present, lambda x, d=direction, r=rows: d.own(x, r.start), dim
                )
                values.append(losses)
                backward.append(gradient)
            if needs:
                gradient = backward[0] if len(backward) == 1 else backward[0].add_(backward[1])
                scores.backward(rows, scores.scaled_(gradient.mul_(slope), rows))
        for name, gradient in _gradients(call, direction, scores).items():
            total[name] = total[name] + gradient if name in total else gradient
    losses = values[0] if len(values) == 1 else torch.cat(values)
    if call.reduction == "mean" and valid is None and not call.gather:
        return losses.mean(), total
    value = losses.sum()
    return (sum_over_ranks(value) if call.gather else value) * weight, total


def _candidates_of(
    call: Call, direction: Direction, block: Tensor, valid: Tensor | None, rows: slice, dim: int
) -> Tensor:
    """Return the scores, the lowest number where there is no candidate; may overwrite them.

    In a row that is not valid only the positive is left, so its loss is 0.
    """
    margin, ratio = call.bounds()  # here scores are divided by the temperature
    bounds = None if margin is None else margin / call.temperature, ratio
    if bounds == (None, None) and direction.ids is None and valid is None:
        return block
    block = block if dim == 1 else block.clone()
    lowest, keys = torch.finfo(block.dtype).min, block[:, : direction.num_keys]
    own = direction.own(block, rows.start).clone()
    above = false_negatives(keys, own, bounds, dim)
    if (excluded := direction.excluded_keys(rows, above)) is not None:
        keys.masked_fill_(excluded, lowest)
    if (left_out := direction.left_out_negatives(rows)) is not None:
        block[:, direction.num_keys :].masked_fill_(left_out, lowest)
    if valid is not None:
        block.masked_fill_(~valid[rows].unsqueeze(dim), lowest)
        own = torch.where(valid[rows], own, 0.0)
    direction.own(block, rows.start).copy_(own)
    return block


def _scores(
    make_scores: Callable[..., Any],
    call: Call,
    direction: Direction,
    needs: Set[str],
    hides_nan: bool,
) -> Any:
    """Return what makes the scores of a direction's queries with all keys, then the negatives."""
    keys, negative = getattr(call, direction.key), call.negative
    if call.ranks() > 1 and call.in_batch:
        keys = _gathered(keys)
    if call.ranks() > 1 and negative is not None and negative.ndim == 2:
        negative = _gathered(negative)
    hidden = {"query", "key", "negative"} if hides_nan else {"key"}
    names = {direction.query: "query", direction.key: "key"}
    return make_scores(
        {names.get(name, name) for name in needs},
        getattr(call, direction.query),
        keys,
        negative,
        temperature=call.temperature,
        cosine=call.similarity == "cosine",
        own_key=not call.in_batch,
        hides_nan=hidden if hides_nan or direction.ids is not None else set[str](),
    )


def _gathered(x: Tensor) -> Tensor:
    return gather_rows(x) if x.layout == torch.strided else gather_entries(x)


def _gradients(call: Call, direction: Direction, scores: Any) -> Gradients:
    """Return the gradients of the inputs; the rows of other ranks go there."""
    gradients = Gradients()
    for name, gradient in scores.gradients().items():
        argument = {"query": direction.query, "key": direction.key}.get(name, name)
        if name in ("key", "negative") and len(gradient) > len(own := getattr(call, argument)):
            is_sparse = gradient.layout == torch.sparse_csr
            gradient = scatter_entries(gradient, own) if is_sparse else scatter_sum(gradient)
        gradients[argument] = gradient
    return gradients


DENSE = (  # in order of preference
    Implementation(
        "blocks",
        dense_unsupported_reason,
        exceeds_a_block,
        blockwise_info_nce,
        purpose="more scores than 2^21 on a CPU, 2^26 elsewhere",
    ),
    Implementation("direct", dense_unsupported_reason, always, direct_info_nce),
)
