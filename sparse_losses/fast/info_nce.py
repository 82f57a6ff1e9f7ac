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

from sparse_losses._core.candidates import Call, Direction, directions, number_of
from sparse_losses._core.entries import gather_matrix, scatter_matrix
from sparse_losses._core.implementations import Arguments, Implementation, always
from sparse_losses._core.products import as_single
from sparse_losses._core.softmax import false_negative_limit, one_positive_rows_and_gradient
from sparse_losses.distributed import sum_over_ranks
from sparse_losses.fast.scores import Scores

Gradients = dict[str, Tensor]


def direct_info_nce(needs: Set[str], **arguments: Any) -> tuple[Tensor, Gradients]:
    """Return value and gradients of InfoNCE; all scores are held at once."""
    return value_and_gradients(needs, Call(**arguments), len(arguments["anchor"]))


def blockwise_info_nce(needs: Set[str], **arguments: Any) -> tuple[Tensor, Gradients]:
    """Return value and gradients of InfoNCE; the scores of some rows are held at a time."""
    call = Call(**arguments)
    return value_and_gradients(needs, call, rows_of_a_block(call))


def nonzeros_info_nce(needs: Set[str], **arguments: Any) -> tuple[Tensor, Gradients]:
    """As ``direct_info_nce``, in fp32 at least; the gradient of a CSR tensor is at its entries."""
    single = {n: as_single(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}
    return direct_info_nce(needs, **single)


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
    return "dense tensors" if has_csr(arguments) else own_gradient_unsupported_reason(arguments)


def nonzeros_unsupported_reason(arguments: Arguments) -> str | None:
    """Return why sparse products do not support the call, or ``None``."""
    if arguments["negative"] is not None and arguments["negative"].ndim == 3:
        return "no negatives per row"
    if arguments["anchor"].device.type == "meta":
        return "tensors with values"
    return own_gradient_unsupported_reason(arguments)


def has_csr(arguments: Arguments) -> bool:
    """Whether anchors, positives or negatives are CSR."""
    vectors = (arguments["anchor"], arguments["positive"], arguments["negative"])
    return any(x is not None and x.layout != torch.strided for x in vectors)


# ------------------------------------------------------------------------------------------------
# Value and gradient


def value_and_gradients(
    needs: Set[str], call: Call, rows_per_block: int
) -> tuple[Tensor, Gradients]:
    """Return value and gradients, so many rows of scores at a time.

    With ``gather`` this rank's rows are the queries and all ranks' rows the keys. DDP divides
    gradients by the number of ranks W, so they are returned W times as large.
    """
    batch, both, ranks = len(call.anchor), directions(call), call.ranks()
    blocks = [slice(i, min(i + rows_per_block, batch)) for i in range(0, batch, rows_per_block)]
    mask = call.candidate_mask
    valid = None if mask is None else both[0].own(mask)
    hides_nan = valid is not None or both[0].ids is not None
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
        scores = _scores(direction, needs, hides_nan)
        for rows in blocks:
            block = scores.block(rows)
            backward: list[Tensor] = []
            for dim in (0, 1) if is_shared else (1,):
                present = _candidates_of(direction, block, valid, rows, dim)
                own_of = functools.partial(direction.own, start=rows.start)
                losses, gradient = one_positive_rows_and_gradient(present, own_of, dim)
                values.append(losses)
                backward.append(gradient)
            if needs:
                gradient = backward[0] if len(backward) == 1 else backward[0].add_(backward[1])
                scores.backward(rows, scores.scaled_(gradient.mul_(slope), rows))
        for name, gradient in _gradients(direction, scores).items():
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
    if call.bounds() == (None, None) and direction.ids is None and valid is None:
        return block
    block = block if dim == 1 else block.clone()
    lowest, keys = torch.finfo(block.dtype).min, block[:, :num_keys]
    own = direction.own(block, rows.start).clone()
    if call.bounds() != (None, None):
        margin, ratio = call.bounds()
        scaled = None if margin is None else margin / call.temperature  # as the scores are
        limit = false_negative_limit(own, scaled, ratio)
        keys.masked_fill_(keys > limit.unsqueeze(dim), lowest)
    if (excluded := direction.excluded_keys(rows)) is not None:
        keys.masked_fill_(excluded, lowest)
    if (left_out := direction.left_out_negatives(rows)) is not None:
        block[:, num_keys:].masked_fill_(left_out, lowest)
    if valid is not None:
        block.masked_fill_(~valid[rows].unsqueeze(dim), lowest)
        own = torch.where(valid[rows], own, 0.0)
    direction.own(block, rows.start).copy_(own)
    return block


def _scores(direction: Direction, needs: Set[str], hides_nan: bool) -> Scores:
    """Return what makes the scores of a direction's queries with all keys, then the negatives."""
    call, negative = direction.call, direction.call.negative
    if negative is not None:
        negative = gather_matrix(negative, call.gather and negative.ndim == 2)
    names = {direction.query: "query", direction.key: "key"}
    return Scores(
        {names.get(name, name) for name in needs},
        getattr(call, direction.query),
        gather_matrix(getattr(call, direction.key), call.gather and call.in_batch),
        negative,
        temperature=call.temperature,
        cosine=call.similarity == "cosine",
        hides_nan=hides_nan,
        own_key=not call.in_batch,
    )


def _gradients(direction: Direction, scores: Scores) -> Gradients:
    """Return the gradients of the inputs; the rows of other ranks go there."""
    gradients = Gradients()
    for name, gradient in scores.gradients().items():
        argument = {"query": direction.query, "key": direction.key}.get(name, name)
        own = getattr(direction.call, argument)
        if name in ("key", "negative") and len(gradient) > len(own):
            gradient = scatter_matrix(gradient, own)
        gradients[argument] = gradient
    return gradients


IMPLEMENTATIONS = (  # of InfoNCE and N-pair, in order of preference
    Implementation(
        "nonzeros", nonzeros_unsupported_reason, has_csr, nonzeros_info_nce, purpose="CSR tensors"
    ),
    Implementation(
        "blocks",
        dense_unsupported_reason,
        exceeds_a_block,
        blockwise_info_nce,
        purpose="more scores than 2^21 on a CPU, 2^26 elsewhere",
    ),
    Implementation("direct", dense_unsupported_reason, always, direct_info_nce),
)
