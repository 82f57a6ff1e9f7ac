"""In-batch InfoNCE with its gradient: all scores at once, or some rows of them at a time.

The gradient of a row's loss with respect to its scores is ``sigmoid(gap) * softmax`` over the
negatives and ``-sigmoid(gap)`` at the positive, with ``gap = logsumexp(negatives) - positive``; no
``softmax - 1`` cancels. The positive's score is subtracted from the row before the log-sum-exp, so
that large scores that differ little keep their digits. A block of scores is computed, overwritten
by its gradient, multiplied back and freed: three matrix products in total.

Candidates that are not negatives get the lowest finite score, so that the softmax of a row without
negatives is finite.
"""

from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_losses._core.implementations import Arguments
from sparse_losses._core.softmax import false_negative_limit, softplus
from sparse_losses.distributed import gather_rows, num_ranks, rank, scatter_sum, sum_over_ranks
from sparse_losses.fast.scores import DenseScores, Scores

Gradients = dict[str, Tensor]


class Call(NamedTuple):
    """The arguments of ``info_nce_loss``, checked and cast."""

    anchor: Tensor
    positive: Tensor
    negative: Tensor | None
    temperature: float | Tensor
    similarity: str
    symmetric: bool
    in_batch: bool
    negatives_from: tuple[str, ...]
    positive_ids: Tensor | None
    positive_mask: Tensor | None
    candidate_mask: Tensor | None
    false_negative_margin: float | None
    false_negative_ratio: float | None
    decoupled: bool
    gather: bool
    reduction: str

    @property
    def ranks(self) -> int:
        """The number of ranks whose rows are candidates."""
        return num_ranks() if self.gather else 1

    @property
    def first(self) -> int:
        """The key that is the positive of this rank's first row."""
        return rank() * len(self.anchor) if self.gather else 0

    @property
    def queries(self) -> tuple[str, ...]:
        """The names of the queries of all directions."""
        return ("anchor", "positive") if self.symmetric else ("anchor",)

    @property
    def may_lack_negatives(self) -> bool:
        """Whether a row of a decoupled loss may be without a negative and thus not valid."""
        if not self.decoupled or self.candidate_mask is not None:
            return self.decoupled
        options = (self.positive_ids, self.false_negative_margin, self.false_negative_ratio)
        is_full = all(option is None for option in options) and len(self.anchor) * self.ranks > 1
        return not (is_full or number_of(self.negative) > 0)


# ------------------------------------------------------------------------------------------------
# The choice

# Products over non-zeros are used below this density with at least this number of rows; for fewer
# rows, the limit is proportionally smaller: on one thread of an Intel Xeon both take the same time
# at 1% with 64 rows of a vocabulary of 30,522, at 3% with 128 and at 8% with 256. Dense products
# gain more from a second thread: 128 rows of 2% take 51 ms dense and 38 sparse on one thread, 29
# and 34 on two.
DENSEST, ROWS_FOR_DENSEST = 0.12, 512
FEWEST_COLUMNS = 4096
SAMPLED_ROWS = 16


def most_scores(device: torch.device) -> int:
    """Return the scores per block: 8 MB in fp32 on a CPU, else 256 MB, as launches cost time."""
    return 1 << 21 if device.type == "cpu" else 1 << 26


def rows_of_a_block(call: Call) -> int:
    """Return the rows per block; each row holds its scores and vectors of the inputs' width."""
    batch, width = call.anchor.shape
    most = most_scores(call.anchor.device)
    return min(max(most // (batch * call.ranks + width), 1), batch)


def number_of(negative: Tensor | None) -> int:
    """Return the number of negatives of a row."""
    return 0 if negative is None else negative.shape[-2]


def exceeds_a_block(arguments: Arguments) -> bool:
    """Whether the full score matrix is larger than a block."""
    anchor = arguments["anchor"]
    keys = len(anchor) * (num_ranks() if arguments["gather"] else 1)
    num_scores: int = len(anchor) * (keys + number_of(arguments["negative"]))
    return num_scores > most_scores(anchor.device)


def unsupported_reason(arguments: Arguments) -> str | None:
    """Return why implementations with their own gradient do not support the call, or ``None``."""
    anchor, temperature = arguments["anchor"], arguments["temperature"]
    if not arguments["in_batch"]:
        return "in_batch=True"
    if arguments["positive_mask"] is not None:
        return "no `positive_mask`"
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
    if any(x.layout != torch.strided for x in dense_or_csr(arguments)):
        return "dense tensors"
    return unsupported_reason(arguments)


def nonzeros_unsupported_reason(arguments: Arguments) -> str | None:
    """Return why sparse products do not support the call, or ``None``."""
    negative = arguments["negative"]
    if negative is not None and negative.ndim == 3:
        return "no negatives per row"
    if arguments["anchor"].device.type == "meta":
        return "tensors with values"
    return unsupported_reason(arguments)


def prefers_nonzeros(arguments: Arguments) -> bool:
    """Whether inputs are CSR, or wide and, by a sample, with few non-zeros; reads values."""
    inputs = dense_or_csr(arguments)
    if any(x.layout != torch.strided for x in inputs):
        return True
    is_wide = inputs[0].is_cpu and inputs[0].shape[1] >= FEWEST_COLUMNS
    return is_wide and _has_few_nonzeros(*inputs)


def _has_few_nonzeros(*inputs: Tensor) -> bool:
    rows = len(inputs[0])
    sample = [x[:: max(x.shape[0] // SAMPLED_ROWS, 1)] for x in inputs]
    num_nonzeros = sum(int(x.count_nonzero()) for x in sample)
    densest = DENSEST * min(1.0, rows / ROWS_FOR_DENSEST)
    densest /= 1 if torch.get_num_threads() == 1 else 2
    return num_nonzeros < densest * sum(x.numel() for x in sample)


def dense_or_csr(arguments: Arguments) -> list[Tensor]:
    """Return the vectors of the call."""
    inputs = (arguments["anchor"], arguments["positive"], arguments["negative"])
    return [x for x in inputs if x is not None]


# ------------------------------------------------------------------------------------------------
# Value and gradient


def direct_info_nce(needs: Set[str], **arguments: Any) -> tuple[Tensor, Gradients]:
    """Return value and gradients of InfoNCE; all scores are held at once."""
    return compute_info_nce(needs, Call(**arguments), DenseScores, in_blocks=False)


def blockwise_info_nce(needs: Set[str], **arguments: Any) -> tuple[Tensor, Gradients]:
    """Return value and gradients of InfoNCE; some rows of the scores are held at a time."""
    return compute_info_nce(needs, Call(**arguments), DenseScores, in_blocks=True)


def compute_info_nce(
    needs: Set[str], call: Call, make_scores: Callable[..., Scores], *, in_blocks: bool
) -> tuple[Tensor, Gradients]:
    """Return value and gradients, by the scores that ``make_scores`` makes.

    With ``gather`` this rank's rows are the queries and all ranks' rows the keys. DDP divides
    gradients by the number of ranks W, so they are returned W times as large.
    """
    batch, at_once = len(call.anchor), rows_of_a_block(call) if in_blocks else len(call.anchor)
    blocks = [slice(i, min(i + at_once, batch)) for i in range(0, batch, at_once)]
    valid = _valid_rows(call, make_scores, blocks)
    num_rows: float | Tensor = batch * call.ranks
    if valid is not None:
        count = valid.sum(dtype=torch.promote_types(call.anchor.dtype, torch.float32))
        num_rows = (sum_over_ranks(count) if call.gather else count).clamp(min=1)
    weight = (1 / num_rows if call.reduction == "mean" else 1.0) / len(call.queries)
    slope = weight * call.ranks / call.temperature
    if call.symmetric and call.negative is None and call.ranks == 1 and not in_blocks:
        direction = _Direction.of(call, "anchor", valid)
        scores = _scores(call, "anchor", make_scores, needs, valid)
        value = _both_directions(scores, direction, slope, bool(needs))
        return value * weight, _gradients(call, "anchor", scores)
    total, values = Gradients(), []
    for query in call.queries:
        direction = _Direction.of(call, query, valid)
        scores = _scores(call, query, make_scores, needs, valid)
        values += [_one_direction(scores, direction, x, slope, bool(needs)) for x in blocks]
        for name, gradient in _gradients(call, query, scores).items():
            total[name] = total[name] + gradient if name in total else gradient
    value = values[0] if len(values) == 1 else torch.stack(values).sum()
    return (sum_over_ranks(value) if call.gather else value) * weight, total


def _scores(
    call: Call,
    query: str,
    make_scores: Callable[..., Scores],
    needs: Set[str],
    valid: Tensor | None,
) -> Scores:
    """Return the scores of the queries of a direction with all keys, then the negatives."""
    key = _other(query)
    keys, negative = getattr(call, key), call.negative
    if call.gather:
        keys = gather_rows(keys)
        negative = gather_rows(negative, negative.ndim == 2) if negative is not None else None
    hides_nan = {"key"} if call.positive_ids is not None else set[str]()
    if valid is not None:
        hides_nan = {"query", "key", "negative"}
    return make_scores(
        {{query: "query", key: "key"}.get(name, name) for name in needs},
        getattr(call, query),
        keys,
        negative,
        temperature=call.temperature,
        cosine=call.similarity == "cosine",
        hides_nan=hides_nan,
    )


def _gradients(call: Call, query: str, scores: Scores) -> Gradients:
    """Return the gradients of the inputs; the rows of other ranks go there."""
    gradients = Gradients()
    for name, gradient in scores.gradients().items():
        if gradient is None:
            continue
        is_shared = name == "negative" and gradient.ndim == 2
        if call.gather and (name == "key" or is_shared):
            gradient = scatter_sum(gradient)
        gradients[{"query": query, "key": _other(query)}.get(name, name)] = gradient
    return gradients


def _other(query: str) -> str:
    return "anchor" if query == "positive" else "positive"


def _valid_rows(
    call: Call, make_scores: Callable[..., Scores], blocks: list[slice]
) -> Tensor | None:
    """Return which rows are valid in every direction; ``None`` if all are."""
    valid = None
    if call.candidate_mask is not None:  # also of the positive
        valid = call.candidate_mask.diagonal(call.first)
    if call.may_lack_negatives:
        for query in call.queries:
            direction = _Direction.of(call, query, valid)
            scores = _scores(call, query, make_scores, frozenset(), valid)
            valid = torch.cat([direction.has_negative(scores.block(x), x) for x in blocks])
    return valid


class _Direction(NamedTuple):
    """What are no negatives of the queries of one direction, and how a row is computed."""

    first: int  # the key that is the positive of the first query
    num_keys: int
    ids: Tensor | None  # of the keys
    left_out: Tensor | None  # [B, C]
    margin: float | Tensor | None  # of false negatives, over the temperature
    ratio: float | None
    valid: Tensor | None  # [B]
    decoupled: bool

    @classmethod
    def of(cls, call: Call, query: str, valid: Tensor | None) -> "_Direction":
        """Return the direction of these queries."""
        num_keys, ids, mask = len(call.anchor) * call.ranks, call.positive_ids, call.candidate_mask
        margin = call.false_negative_margin
        if mask is not None and query != "anchor":
            pairs, rest = mask.tensor_split([num_keys], dim=1)
            mask = torch.cat([reverse(pairs, call.gather), rest], dim=1)
        return cls(
            first=call.first,
            num_keys=num_keys,
            ids=None if ids is None else gather_rows(ids, call.gather),
            left_out=None if mask is None else ~mask,
            margin=None if margin is None else margin / call.temperature,
            ratio=call.false_negative_ratio,
            valid=valid,
            decoupled=call.decoupled,
        )

    def own(self, block: Tensor, rows: slice) -> Tensor:
        """Return the scores of the positives; 0 in rows that are not valid."""
        own = block.diagonal(rows.start + self.first).clone()
        return own if self.valid is None else torch.where(self.valid[rows], own, 0.0)

    def differences(self, block: Tensor, own: Tensor, rows: slice, dim: int = 1) -> Tensor:
        """Return the scores minus those of the positives, the lowest number for no negatives.

        It overwrites the scores if the candidates are in dimension 1.
        """
        place, above = rows.start + self.first, None
        if self.margin is not None or self.ratio is not None:
            limit = false_negative_limit(own, self.margin, self.ratio)
            above = block[:, : self.num_keys] > limit.unsqueeze(dim)
        result = torch.sub(block, own.unsqueeze(dim), out=block if dim == 1 else None)
        lowest = torch.finfo(result.dtype).min
        of_keys = result[:, : self.num_keys]
        result.diagonal(place).fill_(lowest)
        if self.ids is not None:
            own_ids = self.ids[place : place + len(result)]
            of_keys.masked_fill_(own_ids[:, None] == self.ids, lowest)
        if self.left_out is not None:
            result.masked_fill_(self.left_out[rows], lowest)
        if above is not None:
            of_keys.masked_fill_(above, lowest)
        if self.valid is not None:
            result.masked_fill_(~self.valid[rows].unsqueeze(dim), lowest)
        return result

    def has_negative(self, block: Tensor, rows: slice) -> Tensor:
        """Return which rows have a negative; a NaN is one."""
        differences = self.differences(block, self.own(block, rows), rows)
        return (differences != torch.finfo(block.dtype).min).any(1)

    def terms(
        self, block: Tensor, own: Tensor, rows: slice, dim: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses, softmax over the negatives, and minus the slope at the positives."""
        probabilities, gap = softmax(self.differences(block, own, rows, dim), dim)
        gap.add_(own - own)  # the NaN of a positive without a negative
        if not self.decoupled:  # both are 0 where all differences are the lowest number
            return softplus(gap), probabilities, gap.sigmoid()
        slope = torch.ones_like(gap)
        if self.valid is not None:
            gap, slope = (torch.where(self.valid[rows], x, 0.0) for x in (gap, slope))
        return gap, probabilities, slope


def _one_direction(
    scores: Scores, direction: _Direction, rows: slice, weight: float | Tensor, needs_gradient: bool
) -> Tensor:
    """Return the sum of the losses of some rows; ``scores`` keeps the gradients.

    ``weight`` is that of a row's gradient, over the temperature.
    """
    block = scores.block(rows)
    own = direction.own(block, rows)
    losses, gradient, slope = direction.terms(block, own, rows)
    if needs_gradient:
        slope = slope.mul_(weight)
        gradient.mul_(slope[:, None]).diagonal(rows.start + direction.first).sub_(slope)
        scores.backward(rows, gradient)
    return losses.sum()


def _both_directions(
    scores: Scores, direction: _Direction, weight: float | Tensor, needs_gradient: bool
) -> Tensor:
    """Return the sum of all losses of both directions, which share one product."""
    block = scores.block(slice(None))
    rows = slice(0, len(block))
    own = direction.own(block, rows)
    more, gradient_by_column, slope_by_column = direction.terms(block, own, rows, dim=0)
    losses, gradient, slope = direction.terms(block, own, rows)
    if needs_gradient:
        slope, slope_by_column = slope.mul_(weight), slope_by_column.mul_(weight)
        gradient.mul_(slope[:, None]).add_(gradient_by_column.mul_(slope_by_column))
        gradient.diagonal().sub_(slope.add_(slope_by_column))
        scores.backward(rows, gradient)
    return losses.add_(more).sum()


def reverse(mask: Tensor, gather: bool) -> Tensor:
    """Return the mask of pairs ``[B, K]`` of the other direction: transposed."""
    first = rank() * len(mask) if gather else 0
    return gather_rows(mask, gather)[:, first : first + len(mask)].T


def softmax(scores: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return softmax and log-sum-exp in six launches; ``logsumexp`` alone takes nine."""
    probabilities = scores.softmax(dim)
    # The largest probability is exp(0) over the sum of the exponentials. An infinite score makes it
    # NaN; the log-sum-exp is then infinite.
    log_largest = probabilities.amax(dim).log_().nan_to_num_(nan=0.0)
    return probabilities, scores.amax(dim) - log_largest
