r"""The packed head, for the CPU: it drops padding and processes only active entries after the max.

The vocabulary is processed in tiles. A tile's scores ``[T, n]`` with the ``n`` attended tokens are
reduced to one maximum per text before the next tile. Only active entries then need the arg-max.
Their number depends on the data, which would cost a sync on an accelerator. The backward pass
visits only entries whose incoming gradient is not 0.

**Screening.** Where bf16 products are faster than fp32 ones, a tile is multiplied in bf16 first.
This bounds every score, and only entries that may be positive are computed in fp32. No active entry
is lost: let $\hat h, \hat w$ be $h, w$ rounded to bf16 and $u = 2^{-8}$ its unit roundoff. By
Cauchy-Schwarz

$$|h \cdot w - \hat h \cdot \hat w| = |(h - \hat h) \cdot w + \hat h \cdot (w - \hat w)|
\le \lVert h - \hat h \rVert \lVert w \rVert + \lVert \hat h \rVert \, u \lVert w \rVert .$$

$h - \hat h$ is exact in fp32 and its norm is computed. The error of a sum of $H$ products in fp32,
in any order, is at most $\gamma \lVert \hat h \rVert \lVert \hat w \rVert$ with
$\gamma = 2 H \, 2^{-24}$. This is twice the usual bound: $\lVert \hat w \rVert$ may be
$(1 + u) \lVert w \rVert$, and the surplus exceeds the rounding errors of the norms and of $M$. The
fp32 score has the same error bound. Hence the fp32 score differs from the bf16 product, before the
rounding of its output, by at most

$$M = \lVert w \rVert \bigl(\lVert h - \hat h \rVert + (u + 2 \gamma) \lVert \hat h \rVert\bigr),$$

and the rounding of the output $y$ adds $u |y|$. With $c = 1.01 u$ (the factor covers the rounding
of the bound itself) a score lies in $y \pm (c |y| + M)$. $y + c |y|$ grows with $y$, so a text's
largest score is at most $\max y + c |\max y| + \max M$. If this plus the bias is not positive, the
entry is inactive: rounding does not change the sign of a sum. For other entries only tokens whose
upper bound reaches the lower bound of the largest can be the arg-max; these few are computed in
fp32. Each square that underflows is covered by $2^{-126}$; where $\lVert h \rVert \lVert w \rVert$
is near overflow, every token is computed.
"""

import itertools
from typing import Any, NamedTuple, Sequence  # noqa: UP035  # PyTorch 2.6 accepts no other

import torch
from torch import Tensor

from sparse_losses._core.activation import splade_activation
from sparse_losses._core.own_gradient import can_bring_its_gradient
from sparse_losses._core.precision import autocast_off
from sparse_losses._core.private_torch import multiplies_bf16
from sparse_losses.fast.head_tiles import smallest_integer, sources, spread
from sparse_losses.fast.sparse import bounds_of, csr, sum_bags

__all__ = ["packed_gradients", "packed_head", "packed_logits"]

SCORES = 6 << 20  # maximal number of scores in a tile
# Number of rows of a half-precision matrix that are cast at once in the backward pass.
BLOCK = 4096

_BF16_ROUNDOFF = 2.0**-8


def packed_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attended: Tensor | None,
    gate: Tensor | None,
    *,
    dtype: torch.dtype,
    return_logits: bool = False,
    sparse_grad: bool = False,
    screen: bool | None = None,
    tile: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return activations and, if requested, pooled logits; options are those of ``splade_head``.

    ``screen`` overrides whether tiles are screened, ``tile`` the number of vocabulary tokens per
    tile.
    """
    if attended is None:
        attended = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    logits, _ = packed_logits(
        hidden, weight, bias, gate, attended, dtype, return_logits, sparse_grad, screen, tile
    )
    absent = attended.logical_not().all(1, keepdim=True)
    return splade_activation(logits, None, gate, absent, return_logits)


# ------------------------------------------------------------------------------------------------
# Custom operators: compilers cannot trace them, as the number of active entries is unknown


def _packed_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    attended: Tensor,
    dtype: torch.dtype,
    every: bool,
    sparse_grad: bool,
    screen: bool | None,
    tile: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the logits before the gate ``[B, V]``, -inf if inactive, and their positions."""
    logits, place = _empty_logits(hidden, weight, dtype)
    with autocast_off(hidden.device):
        entries = _maxima(hidden, weight, bias, attended, gate, dtype, every, screen, tile)
    length = max(hidden.shape[1], 1)
    index = entries.token // length, entries.column
    logits.fill_(-torch.inf)[index] = entries.logit
    place.zero_()[index] = (entries.token % length).to(place.dtype)
    return logits, place


def _empty_logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape, integer = (hidden.shape[0], weight.shape[0]), smallest_integer(hidden.shape[1])
    return hidden.new_empty(shape, dtype=dtype), hidden.new_empty(shape, dtype=integer)


packed_logits = torch.library.custom_op(
    "sparse_losses::head_packed", _packed_logits, mutates_args=()
)


@packed_logits.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    attended: Tensor,
    dtype: torch.dtype,
    *_: bool | int | None,
) -> tuple[Tensor, Tensor]:
    return _empty_logits(hidden, weight, dtype)


def _packed_gradients(
    upstream: Tensor,
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden states, weight and bias; empty where not needed."""
    found = _gradients(upstream, place, hidden, weight, bias, needs, sparse_grad=False)
    a, b, c = (upstream.new_empty(0) if gradient is None else gradient for gradient in found)
    return a, b, c


packed_gradients = torch.library.custom_op(
    "sparse_losses::head_packed_backward", _packed_gradients, mutates_args=()
)


@packed_gradients.register_fake
def _(
    upstream: Tensor,
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = zip((hidden, weight, bias), needs, strict=True)
    a, b, c = (
        upstream.new_empty(0) if x is None or not n else x.new_empty(x.shape) for x, n in tensors
    )
    return a, b, c


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, _, attended, dtype, _, sparse_grad, _, _ = inputs
    ctx.save_for_backward(output[1], hidden, weight, bias, attended)
    ctx.dtype, ctx.sparse_grad = dtype, sparse_grad
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if upstream is None:
        return (None,) * 10
    place, hidden, weight, bias, attended = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    found: Sequence[Tensor | None]
    if torch.is_grad_enabled():  # create_graph=True
        around = sources(attended)
        of_both = spread(upstream, place, hidden, weight, *around, ctx.dtype, needs[:2], None)
        found = *of_both, None if bias is None else upstream.sum(0)
    elif ctx.sparse_grad and can_bring_its_gradient(upstream):
        found = _gradients(upstream, place, hidden, weight, bias, needs, sparse_grad=True)
    else:
        found = packed_gradients(upstream, place, hidden, weight, bias, needs)
    given = [gradient if need else None for gradient, need in zip(found, needs, strict=True)]
    return *given, *[None] * 7


packed_logits.register_autograd(_backward, setup_context=_keep)


# ------------------------------------------------------------------------------------------------
# Forward pass: the maxima


class _Entries(NamedTuple):
    """Entries of ``[B, V]`` with the position and value of their maximum."""

    column: Tensor  # [m] int32
    token: Tensor  # [m] int32, index into the B * S positions
    logit: Tensor  # [m], before the gate


class _Packed(NamedTuple):
    """The attended tokens, text after text; texts of equal length are adjacent."""

    token: Tensor  # [n] index into the B * S positions
    row: Tensor  # [R] the texts with an attended token, in packed order
    groups: list[tuple[int, int, int, int]]  # first and last text, first token, tokens per text


def _pack(attended: Tensor) -> _Packed:
    """Pack the attended tokens so that one reduction covers all texts of one length.

    A text's last token is repeated up to a multiple of four or more. This gives fewer lengths and
    changes neither a maximum nor its position, as the copies come last.
    """
    batch, length = attended.shape
    lengths = attended.sum(1)
    quantum = 4 if batch <= 16 else max(4, length // 64 * 4)
    rounded = (lengths + quantum - 1) // quantum * quantum
    # Attended positions come first, in order.
    order = attended.logical_not().to(torch.uint8).argsort(stable=True)
    by_length = rounded.argsort(stable=True)
    tokens, rows, groups = [], [], []
    first_row = first_token = 0
    sizes, counts = rounded[by_length].unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    position = 0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        row = by_length[position : position + count]
        position += count
        if size == 0:
            continue
        step = torch.arange(size, device=attended.device)
        index = order[row].gather(1, torch.minimum(step, lengths[row, None] - 1))
        tokens.append((row[:, None] * length + index).reshape(-1))
        rows.append(row)
        groups.append((first_row, first_row + count, first_token, size))
        first_row, first_token = first_row + count, first_token + count * size
    if not groups:
        nothing = by_length[:0]
        return _Packed(nothing, nothing, [])
    # Matrix products are faster for widths that are multiples of 16.
    tokens.append(tokens[0][:1].expand(-first_token % 16))
    return _Packed(torch.cat(tokens), torch.cat(rows), groups)


def _maxima(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attended: Tensor,
    gate: Tensor | None,
    dtype: torch.dtype,
    every: bool,
    screen: bool | None,
    tile: int | None,
) -> _Entries:
    """Return the active entries of ``[B, V]``, or with ``every`` all entries of nonempty texts."""
    packed = _pack(attended)
    states = hidden.flatten(0, 1).index_select(0, packed.token).to(dtype)
    vocab_size = weight.shape[0]
    if not packed.groups:
        none = packed.token.int()
        return _Entries(none, none, states.new_zeros(0))
    num_tokens = states.shape[0]
    tile = tile or min(max(SCORES // num_tokens // 16 * 16, 256), 8192, vocab_size)
    screens = None
    pays = _screening_pays(states, vocab_size) if screen is None else screen
    if pays and not every and states.dtype == torch.float32:
        screens = _Screen(states, packed, weight.dtype, force=screen is True)
    scores: Tensor | None = None
    columns, tokens, logits = [], [], []
    for start in range(0, vocab_size, tile):
        rows = weight[start : start + tile].to(dtype)
        tile_bias = None if bias is None else bias[start : start + tile, None]
        tile_gate = None
        if gate is not None:
            tile_gate = gate[:, start : start + tile].T[:, packed.row]
        found = None
        if screens is not None:
            found = screens.candidates(rows, tile_bias, tile_gate)
            if found is None:  # too many candidates; the next tiles will be alike
                screens = None
        if found is None:
            if scores is None:
                scores = states.new_empty(tile, num_tokens)
            product = torch.mm(rows, states.T, out=scores[: rows.shape[0]])
            found = _maxima_of_tile(product, packed, tile_bias, tile_gate, every)
        column, token, logit = found
        columns.append((column + start).int())
        tokens.append(packed.token[token].int())
        logits.append(logit)
    return _Entries(torch.cat(columns), torch.cat(tokens), torch.cat(logits))


def _is_active(logit: Tensor, gate: Tensor | None) -> Tensor:
    if gate is not None:
        logit = logit * gate
    return ~(logit <= 0)  # NaN counts as active, so that it is visible


def _maxima_of_tile(
    scores: Tensor, packed: _Packed, bias: Tensor | None, gate: Tensor | None, every: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return columns, packed tokens and logits of a tile's entries ``[T, n]``."""
    height = scores.shape[0]
    views = [
        scores[:, first : first + (stop - start) * size].view(height, stop - start, size)
        for start, stop, first, size in packed.groups
    ]
    logit = torch.cat([view.amax(-1) for view in views], dim=1)
    if bias is not None:
        logit = logit + bias
    wanted = torch.ones_like(logit, dtype=torch.bool) if every else _is_active(logit, gate)
    columns, texts, tokens = [], [], []
    for view, (start, stop, first, size) in zip(views, packed.groups, strict=True):
        column, text = wanted[:, start:stop].nonzero(as_tuple=True)
        # argmax returns the first of equal maxima.
        tokens.append(view[column, text].argmax(-1) + (first + text * size))
        columns.append(column)
        texts.append(text + start)
    column = torch.cat(columns)
    return column, torch.cat(tokens), logit[column, torch.cat(texts)]


def _screening_pays(states: Tensor, vocab_size: int) -> bool:
    """Whether the CPU multiplies bf16 faster than fp32 and the product is large enough."""
    return (
        states.dtype == torch.float32
        and states.device.type == "cpu"
        and states.numel() * vocab_size >= 1 << 24
        and multiplies_bf16()
    )


class _Screen:
    """Find the active entries of a tile from its bf16 product; the bound is derived above."""

    def __init__(
        self, states: Tensor, packed: _Packed, weight_dtype: torch.dtype, force: bool
    ) -> None:
        width = states.shape[1]
        self.states, self.packed, self.force = states, packed, force
        self.low = states.bfloat16()
        self.weight_is_exact = weight_dtype == torch.bfloat16
        low = self.low.float()
        gamma = 2 * width * 2.0**-24
        weight_roundoff = 0.0 if self.weight_is_exact else _BF16_ROUNDOFF
        norm = _norm_bound(low)
        per_token = _norm_bound(states - low) + (weight_roundoff + 2 * gamma) * norm
        # Maximum per text, in packed order.
        largest = [
            torch.stack([per_token, norm])[:, first : first + (stop - start) * size]
            .view(2, stop - start, size)
            .amax(-1)
            for start, stop, first, size in packed.groups
        ]
        self.slack, self.norm = torch.cat(largest, dim=1)

    def candidates(
        self, rows: Tensor, bias: Tensor | None, gate: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return columns, packed tokens and logits of a tile; ``None`` if it has too many."""
        height, num_tokens = rows.shape[0], self.states.shape[0]
        low = _bf16_product(rows.bfloat16(), self.low)
        views = [
            low[:, first : first + (stop - start) * size].view(height, stop - start, size)
            for start, stop, first, size in self.packed.groups
        ]
        highest = torch.cat([view.amax(-1) for view in views], dim=1).float()
        weight_norm = _norm_bound(rows)[:, None]
        slack = torch.where(weight_norm * self.norm < 1e37, weight_norm * self.slack, torch.inf)
        c = 1.01 * _BF16_ROUNDOFF
        upper = highest + c * highest.abs() + slack
        if bias is not None:
            upper = upper + bias
        wanted = ~(upper <= 0)
        if gate is not None:
            wanted = (wanted & (~(gate <= 0) | ~upper.isfinite())) | gate.isnan()
        reach = highest - c * highest.abs() - 2 * slack
        reach = torch.where(reach > 0, reach / (1 + c), reach / (1 - c))
        # Lowered slightly for the rounding errors of these lines.
        reach = reach - 1e-6 * reach.abs()

        columns, texts, tokens = [], [], []
        count = 0
        for view, (start, stop, first, size) in zip(views, self.packed.groups, strict=True):
            column, text = wanted[:, start:stop].nonzero(as_tuple=True)
            within = ~(view[column, text] < reach[:, start:stop][column, text][:, None])
            count += int(within.count_nonzero())
            # One dot product costs as much as five entries of a matrix product.
            if count * 5 > height * num_tokens and not self.force:
                return None
            entry, step = within.nonzero(as_tuple=True)
            columns.append(column[entry])
            text = text[entry]
            texts.append(text + start)
            tokens.append(text * size + step + first)
        column, text, token = torch.cat(columns), torch.cat(texts), torch.cat(tokens)
        if len(views) > 1:
            order = column.argsort(stable=True)
            column, text, token = column[order], text[order], token[order]
        score = torch.sparse.sampled_addmm(
            csr(column, token, rows.new_zeros(column.shape[0]), (height, num_tokens)),
            rows,
            self.states.T,
            beta=0.0,
        ).values()
        # Select the first maximum of each entry; tokens are in ascending order within an entry.
        entry = column * self.norm.shape[0] + text
        starts = torch.ones_like(entry, dtype=torch.bool)
        starts[1:] = entry[1:] != entry[:-1]
        number = starts.cumsum(0) - 1
        best = torch.full_like(score, -torch.inf)  # there are at most as many entries as scores
        best.scatter_reduce_(0, number, score, "amax")
        hit = ((score == best[number]) | score.isnan()).nonzero()[:, 0]
        number = number[hit]
        is_first = torch.ones_like(number, dtype=torch.bool)
        is_first[1:] = number[1:] != number[:-1]
        hit = hit[is_first]
        column, text, token = column[hit], text[hit], token[hit]
        logit = score[hit]
        if bias is not None:
            logit = logit + bias[column, 0]
        active = _is_active(logit, None if gate is None else gate[column, text])
        return column[active], token[active], logit[active]


def _norm_bound(x: Tensor) -> Tensor:
    """Return the row norms, with as much as the underflow of squares may have hidden."""
    squares: Tensor = torch.linalg.vector_norm(x, dim=1).square()
    return (squares + x.shape[1] * 2.0**-126).sqrt()


def _bf16_product(rows: Tensor, states: Tensor) -> Tensor:
    """Return ``rows @ states.T`` of bf16 matrices, summed in fp32 and rounded to bf16."""
    if rows.shape[0] * states.shape[0] * rows.shape[1] > 1 << 12:
        return rows @ states.T
    return (rows.float() @ states.float().T).bfloat16()  # PyTorch sums small ones in bf16


# ------------------------------------------------------------------------------------------------
# Backward pass: sums over the entries


def _gradients(
    upstream: Tensor,
    place: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
    sparse_grad: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return gradients of hidden states, weight and bias from that of the logits ``[B, V]``."""
    wide_column, row = (upstream.T != 0).nonzero(as_tuple=True)  # by column; a NaN is not 0
    column, token = wide_column.int(), (row * hidden.shape[1] + place[row, wide_column]).int()
    coefficient = upstream[row, wide_column]
    batch, length, width = hidden.shape
    vocab_size, dtype = weight.shape[0], coefficient.dtype
    of_hidden = of_weight = of_bias = None
    bounds = bounds_of(column, vocab_size)
    states = hidden.reshape(batch * length, width).to(dtype)
    # Blocks of the vocabulary, so that a half-precision matrix is never cast as a whole.
    step = vocab_size if weight.dtype == dtype else BLOCK
    firsts = range(0, vocab_size, step)
    ends = [*bounds[list(firsts)].tolist(), column.shape[0]]
    blocks = [(f, slice(*pair)) for f, pair in zip(firsts, itertools.pairwise(ends), strict=True)]
    if needs[0]:
        of_states = torch.zeros_like(states)
        for f, part in blocks:
            order = token[part].argsort(stable=True)
            index, factor = column[part][order] - f, coefficient[part][order]
            rows = weight[f : f + step].to(dtype)
            of_states += sum_bags(index, rows, bounds_of(token[part], batch * length), factor)
        of_hidden = of_states.view(batch, length, width).to(hidden.dtype)
    if needs[1] and sparse_grad:
        present = (bounds[1:] > bounds[:-1]).nonzero()[:, 0]
        starts = torch.cat([bounds[:-1][present], bounds[-1:]])
        values = sum_bags(token, states, starts, coefficient).to(weight.dtype)
        of_weight = torch.sparse_coo_tensor(
            present[None], values, weight.shape, is_coalesced=True, check_invariants=False
        )
    elif needs[1] and weight.dtype == dtype:
        of_weight = sum_bags(token, states, bounds, coefficient)
    elif needs[1]:
        of_weight = torch.empty_like(weight)
        for f, part in blocks:
            bags = bounds[f : f + step + 1] - bounds[f]
            of_weight[f : f + step] = sum_bags(token[part], states, bags, coefficient[part])
    if needs[2] and bias is not None:
        of_bias = sum_bags(
            torch.zeros_like(token), coefficient.new_ones(1, 1), bounds, coefficient
        )[:, 0]
    return of_hidden, of_weight, of_bias
