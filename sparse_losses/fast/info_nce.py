"""In-batch InfoNCE with its gradient: all scores at once, or some rows of them at a time.

The gradient of a row's loss with respect to its scores is ``sigmoid(gap) * softmax`` over the
negatives and ``-sigmoid(gap)`` at the positive, with ``gap = logsumexp(negatives) - positive``; no
``softmax - 1`` cancels. A block of scores is computed, overwritten by its gradient, multiplied back
and freed: three matrix products in total.
"""

import functools
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.candidates import Call, Direction, directions, false_negatives, number_of
from sparse_losses._core.entries import gather_entries, scatter_entries
from sparse_losses._core.implementations import Arguments, Implementation, always
from sparse_losses._core.softmax import one_positive_rows_and_slopes
from sparse_losses.distributed import gather_rows, scatter_sum, sum_over_ranks
from sparse_losses.fast.scores import DenseScores

Gradients = dict[str, Tensor]


# ------------------------------------------------------------------------------------------------
# The choice

# Products over non-zeros are used below this density with at least this number of rows; for fewer
# rows, the limit is proportionally smaller: on one thread of an Intel Xeon both take the same time
# at 1% with 64 rows of a vocabulary of 30,522, at 3% with 128 and at 8% with 256. Dense products
# gain more from a second thread: 128 rows of 2% take 51 ms dense and 38 sparse on one thread, 29
# and 34 on two.
DENSEST, ROWS_FOR_DENSEST = 0.12, 512
FEWEST_COLUMNS, SAMPLED_ROWS = 4096, 16


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


def unsupported_reason(arguments: Arguments) -> str | None:
    """Return why implementations with their own gradient do not support the call, or ``None``."""
    anchor, temperature = arguments["anchor"], arguments["temperature"]
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
    is_sparse = any(x.layout != torch.strided for x in vectors_of(arguments))
    return "dense tensors" if is_sparse else unsupported_reason(arguments)


def nonzeros_unsupported_reason(arguments: Arguments) -> str | None:
    """Return why sparse products do not support the call, or ``None``."""
    if any(x.ndim == 3 for x in vectors_of(arguments)):
        return "no negatives per row"
    if arguments["anchor"].device.type == "meta":
        return "tensors with values"
    return unsupported_reason(arguments)


def prefers_nonzeros(arguments: Arguments) -> bool:
    """Whether inputs are CSR, or wide and, by a sample, with few non-zeros; reads values."""
    inputs = vectors_of(arguments)
    if any(x.layout != torch.strided for x in inputs):
        return True
    if not inputs[0].is_cpu or inputs[0].shape[1] < FEWEST_COLUMNS:
        return False
    sample = [x[:: max(x.shape[0] // SAMPLED_ROWS, 1)] for x in inputs]
    num_nonzeros = sum(int(x.count_nonzero()) for x in sample)
    densest = DENSEST * min(1.0, len(inputs[0]) / ROWS_FOR_DENSEST)
    densest /= 1 if torch.get_num_threads() == 1 else 2
    return num_nonzeros < densest * sum(x.numel() for x in sample)


def vectors_of(arguments: Arguments) -> list[Tensor]:
    """Return anchors, positives and negatives."""
    inputs = (arguments["anchor"], arguments["positive"], arguments["negative"])
    return [x for x in inputs if x is not None]


# ------------------------------------------------------------------------------------------------
# Value and gradient


def info_nce_by(
    make_scores: Callable[..., Any], in_blocks: bool, needs: Set[str], **arguments: Any
) -> tuple[Tensor, Gradients]:
    """Return value and gradients of InfoNCE, all scores at once or some rows at a time."""
    return _Computation(needs, Call(**arguments), make_scores, in_blocks).run()


def _gathered(x: Tensor) -> Tensor:
    return gather_rows(x) if x.layout == torch.strided else gather_entries(x)


class _Computation:
    """Value and gradients, by the scores that ``make_scores`` makes.

    With ``gather`` this rank's rows are the queries and all ranks' rows the keys. DDP divides
    gradients by the number of ranks W, so they are returned W times as large.
    """

    def __init__(
        self, needs: Set[str], call: Call, make_scores: Callable[..., Any], in_blocks: bool
    ) -> None:
        self.needs, self.call, self.make_scores = needs, call, make_scores
        batch, self.in_blocks = len(call.anchor), in_blocks
        size = rows_of_a_block(call) if in_blocks else batch
        self.blocks = [slice(i, min(i + size, batch)) for i in range(0, batch, size)]
        self.directions = directions(call)
        margin, ratio = call.bounds()  # here scores are divided by the temperature
        self.bounds = None if margin is None else margin / call.temperature, ratio
        self.valid: Tensor | None = None

    def run(self) -> tuple[Tensor, Gradients]:
        call = self.call
        self._find_valid_rows()
        num_rows: float | Tensor = len(call.anchor) * call.ranks()
        if self.valid is not None:
            count = self.valid.sum(dtype=torch.promote_types(call.anchor.dtype, torch.float32))
            num_rows = (sum_over_ranks(count) if call.gather else count).clamp(min=1)
        weight = (1 / num_rows if call.reduction == "mean" else 1.0) / len(self.directions)
        slope = weight * call.ranks() / call.temperature  # of a row's gradient
        shares_scores = call.symmetric and call.in_batch and call.negative is None
        total, values = Gradients(), []
        if shares_scores and call.ranks() == 1 and not self.in_blocks:
            scores = self._scores(self.directions[0], self.needs)
            values.append(self._both_directions(scores, slope))
            total = self._gradients(self.directions[0], scores)
        else:
            for each in self.directions:
                scores = self._scores(each, self.needs)
                values += [self._one_direction(scores, each, rows, slope) for rows in self.blocks]
                for name, gradient in self._gradients(each, scores).items():
                    total[name] = total[name] + gradient if name in total else gradient
        losses = values[0] if len(values) == 1 else torch.cat(values)
        if call.reduction == "mean" and self.valid is None and not (call.gather or shares_scores):
            return losses.mean(), total
        value = losses.sum()
        return (sum_over_ranks(value) if call.gather else value) * weight, total

    def _find_valid_rows(self) -> None:
        """Find which rows are valid in every direction; ``None`` if all are."""
        if self.call.candidate_mask is not None:
            self.valid = self.directions[0].own(self.call.candidate_mask)
        if self.call.may_lack_negatives():
            for each in self.directions:
                scores, has_negative = self._scores(each, frozenset()), []
                for rows in self.blocks:
                    block = scores.block(rows)
                    gaps = self._gaps(each, block, self._own(each, block, rows), rows)
                    # A NaN is a negative.
                    has_negative.append((gaps != torch.finfo(gaps.dtype).min).any(1))
                self.valid = torch.cat(has_negative)

    def _scores(self, direction: Direction, needs: Set[str]) -> Any:
        """Return the scores of the queries of a direction with all keys, then the negatives."""
        call, (query, key) = self.call, direction[:2]
        keys, negative = getattr(call, key), call.negative
        if call.ranks() > 1 and call.in_batch:
            keys = _gathered(keys)
        if call.ranks() > 1 and negative is not None and negative.ndim == 2:
            negative = _gathered(negative)
        hides_nan = {"key"} if direction.ids is not None else set[str]()
        return self.make_scores(
            {{query: "query", key: "key"}.get(name, name) for name in needs},
            getattr(call, query),
            keys,
            negative,
            temperature=call.temperature,
            cosine=call.similarity == "cosine",
            own_key=not call.in_batch,
            hides_nan=hides_nan if self.valid is None else {"query", "key", "negative"},
        )

    def _gradients(self, direction: Direction, scores: Any) -> Gradients:
        """Return the gradients of the inputs; the rows of other ranks go there."""
        gradients = Gradients()
        for name, gradient in scores.gradients().items():
            if gradient is None:
                continue
            argument = {"query": direction.query, "key": direction.key}.get(name, name)
            if name in ("key", "negative") and self.call.ranks() > 1:
                own = getattr(self.call, argument)
                if gradient.layout == torch.sparse_csr and len(gradient) > len(own):
                    gradient = scatter_entries(gradient, own)
                elif (
                    gradient.layout == torch.strided
                    and gradient.ndim == 2
                    and len(gradient) > len(own)
                ):
                    gradient = scatter_sum(gradient)
            gradients[argument] = gradient
        return gradients

    def _excludes_nothing(self) -> bool:
        options = self.call.positive_ids, self.call.candidate_mask, self.valid
        return self.bounds == (None, None) and all(option is None for option in options)

    def _own(self, direction: Direction, block: Tensor, rows: slice) -> Tensor:
        """Return the scores of the positives; 0 in rows that are not valid."""
        own = direction.own(block, rows.start).clone()
        return own if self.valid is None else torch.where(self.valid[rows], own, 0.0)

    def _gaps(
        self, direction: Direction, block: Tensor, own: Tensor, rows: slice, dim: int = 1
    ) -> Tensor:
        """Return the scores minus those of the positives, the lowest number for no negatives.

        It is finite, so that the softmax of a row without negatives is. The scores are overwritten
        if the candidates are in dimension 1.
        """
        above = false_negatives(block[:, : direction.num_keys], own, self.bounds, dim)
        gaps = torch.sub(block, own.unsqueeze(dim), out=block if dim == 1 else None)
        lowest, keys = torch.finfo(gaps.dtype).min, gaps[:, : direction.num_keys]
        direction.own(gaps, rows.start).fill_(lowest)
        if (excluded := direction.excluded_keys(rows, above)) is not None:
            keys.masked_fill_(excluded, lowest)
        if (left_out := direction.left_out_negatives(rows)) is not None:
            gaps[:, direction.num_keys :].masked_fill_(left_out, lowest)
        if self.valid is not None:
            gaps.masked_fill_(~self.valid[rows].unsqueeze(dim), lowest)
        return gaps

    def _rows(
        self, direction: Direction, block: Tensor, own: Tensor, rows: slice, dim: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses, softmax over the negatives, and minus the slope at the positives."""
        gaps = self._gaps(direction, block, own, rows, dim)
        has_negatives = gaps.shape[1] > 1 and self._excludes_nothing()
        values, probabilities, slopes = one_positive_rows_and_slopes(
            gaps,
            None if has_negatives else own,
            dim,
            decoupled=self.call.decoupled,
            needs_gradient=bool(self.needs),
        )
        if self.call.decoupled and self.valid is not None:
            values, slopes = (torch.where(self.valid[rows], x, 0.0) for x in (values, slopes))
        return values, probabilities, slopes

    def _one_direction(
        self, scores: Any, direction: Direction, rows: slice, weight: float | Tensor
    ) -> Tensor:
        """Return the losses of some rows; ``scores`` keeps the gradients."""
        block = scores.block(rows)
        own = self._own(direction, block, rows)
        losses, gradient, slope = self._rows(direction, block, own, rows)
        if self.needs:
            slope = scores.scaled_(slope.mul_(weight).unsqueeze(1), rows)
            out = torch.empty_like(gradient, dtype=scores.gradient_dtype)
            is_same = out.dtype == gradient.dtype
            gradient = torch.mul(gradient, slope, out=gradient if is_same else out)
            direction.own(gradient, rows.start).sub_(slope[:, 0])
            scores.backward(rows, gradient)
        return losses

    def _both_directions(self, scores: Any, weight: float | Tensor) -> Tensor:
        """Return the sums of both directions' losses, which share one product."""
        (rows,), (direction, _) = self.blocks, self.directions
        block = scores.block(rows)
        own = self._own(direction, block, rows)
        more, gradient_by_column, slope_by_column = self._rows(direction, block, own, rows, dim=0)
        losses, gradient, slope = self._rows(direction, block, own, rows)
        if self.needs:
            slope, slope_by_column = slope.mul_(weight), slope_by_column.mul_(weight)
            gradient.mul_(slope[:, None]).add_(gradient_by_column.mul_(slope_by_column))
            gradient.diagonal().sub_(slope.add_(slope_by_column))
            scores.backward(rows, scores.scaled_(gradient, rows))
        return losses.add_(more)


DENSE = (  # in order of preference
    Implementation(
        "blocks",
        dense_unsupported_reason,
        exceeds_a_block,
        functools.partial(info_nce_by, DenseScores, True),
        purpose="more scores than 2^21 on a CPU, 2^26 elsewhere",
    ),
    Implementation(
        "direct",
        dense_unsupported_reason,
        always,
        functools.partial(info_nce_by, DenseScores, False),
    ),
)
