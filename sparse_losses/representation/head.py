r"""The SPLADE head: from hidden states to sparse vectors, ``[B, S, V]`` never held.

The vocabulary comes in tiles. A tile's scores ``[T, n]`` against the ``n`` attended tokens are
reduced to one maximum a text before the next tile begins; behind the maximum only the active
entries need their arg-max, and the backward touches nothing else.

**Screening.** Where bf16 products are faster than fp32 ones, a tile is multiplied in bf16 first,
which bounds every score; only entries that may be positive are computed in fp32. Why none is lost:
let $\hat h, \hat w$ be $h, w$ rounded to bf16 and $u = 2^{-8}$ its unit roundoff. By Cauchy-Schwarz

$$|h \cdot w - \hat h \cdot \hat w| = |(h - \hat h) \cdot w + \hat h \cdot (w - \hat w)|
\le \lVert h - \hat h \rVert \lVert w \rVert + \lVert \hat h \rVert \, u \lVert w \rVert .$$

$h - \hat h$ is exact in fp32 and its norm is computed. A sum of $H$ products in fp32, in any order,
is off by at most $\gamma \lVert \hat h \rVert \lVert \hat w \rVert$, $\gamma = 2 H \, 2^{-24}$
(twice the textbook's, which also covers that $\lVert \hat w \rVert \le (1 + u) \lVert w \rVert$);
so is the fp32 score that decides in the end. Hence the fp32 score differs from the bf16 product,
before that is rounded to its output, by at most

$$M = \lVert w \rVert \bigl(\lVert h - \hat h \rVert + (u + 2 \gamma) \lVert \hat h \rVert\bigr),$$

and the output $y$ is off by $u |y|$ more. With $c = 1.01 u$ (the hundredth covers the rounding of
the bound itself) a score lies in $y \pm (c |y| + M)$. $y + c |y|$ grows with $y$, so a text's
largest score is at most $\max y + c |\max y| + \max M$: where that plus the bias is not positive,
the entry is inactive. In the others only tokens whose upper bound reaches the lower bound of the
largest can be the arg-max; they are few, and computed in fp32. Squares that underflow are covered
by $2^{-126}$ for each, and where $\lVert h \rVert \lVert w \rVert$ comes near overflow every token
is computed.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from sparse_losses._core.checks import check_flag, check_shapes, values_can_be_checked
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses._core.token_ids import as_mask
from sparse_losses.fast.sparse import bounds_of, csr, sum_bags
from sparse_losses.kernels import Impl, check_impl, uses_triton
from sparse_losses.representation._masked_lm import head_of
from sparse_losses.representation._maxima import activate, gradient_of_pooled

__all__ = ["SpladeHead", "splade_head"]

# "auto": on CPUs that multiply bf16 faster than fp32, for products large enough to notice.
SCREENING: bool | str = "auto"
# Rows of the vocabulary at once; None: as many as keep the scores of a tile at 6 Mi numbers.
TILE: int | None = None
# Rows of a half-precision matrix that are cast at once in the backward pass.
BLOCK = 4096

_BF16_ROUNDOFF = 2.0**-8


@full_precision
def splade_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    return_logits: bool = False,
    sparse_grad: bool = False,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Vocabulary projection, SPLADE activation and max pooling in one.

    $$x_{ij} = \log\Bigl(1 + \mathrm{ReLU}\bigl(g_{ij} \,
    \bigl(\max_{s \,:\, \mathrm{mask}_{is} = 1} h_{is} \cdot w_j + b_j\bigr)\bigr)\Bigr)$$

    $h_{is}$ are the hidden states of text $i$, $w_j$ and $b_j$ the row and bias of token $j$ in the
    vocabulary projection, $g$ the gate (1 without one). Equals
    ``splade_pool(hidden @ weight.T + bias, attention_mask)``, but ``[B, S, V]`` is never held:
    masked positions enter no product, and the backward touches only the positions of the maxima of
    active entries, so its cost falls with their number. Of equal scores the first position wins.

    Args:
        hidden: ``[B, S, H]`` floating.
        weight: ``[V, H]`` floating; often the embedding matrix.
        bias: ``[V]``.
        attention_mask: ``[B, S]`` bool, int or float 0/1; a masked position is not looked at.
            Without a mask all are attended.
        gate: ``[B, V]`` in [0, 1]; multiplies the pooled logits.
        return_logits: also return the pooled logits after the gate, signed, for losses that must
            reach silent tokens. Then every arg-max is kept.
        sparse_grad: give ``weight`` a sparse gradient of the rows with an active entry, as
            ``nn.Embedding(sparse=True)`` does. Compiled, the gradient is dense all the same.
        impl: ``"torch"``, ``"triton"`` (a kernel for NVIDIA GPUs) or ``"auto"``, the kernel where
            it was measured to be ahead. It multiplies hidden states and weight in the wider of
            their dtypes, summing in fp32: give it both in bf16. It has no ``sparse_grad``.

    Returns:
        Activations ``[B, V]`` >= 0, fp32 (fp64 if a tensor is fp64); with ``return_logits`` the
        pair of them and the pooled logits. A row without any attended position is 0 in both and has
        no gradient. Second derivatives work; ``torch.func`` transforms do not.

    Raises:
        ValueError: for wrong shapes or devices, a mask that is not 0/1, a gate outside [0, 1].
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import splade_head
        >>> hidden = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]])
        >>> weight = torch.tensor([[1.0, 1.0], [-1.0, 0.5], [-1.0, -1.0]])
        >>> splade_head(hidden, weight, attention_mask=torch.tensor([[1, 1, 0]]))  # log 3, log 2
        tensor([[1.0986, 0.6931, 0.0000]])

    References:
        SPLADE v2: Sparse Lexical and Expansion Model for Information Retrieval, eq. 6. Sparton:
        the maximum before the activation, and the arg-max as all that the backward needs.
    """
    size = check_shapes(
        hidden=(hidden, "B S H"),
        weight=(weight, "V H"),
        bias=(bias, "V, optional"),
        attention_mask=(attention_mask, "B S, optional"),
        gate=(gate, "B V, optional"),
    )
    check_flag(return_logits=return_logits, sparse_grad=sparse_grad)
    check_impl(impl)
    if size["V"] == 0:
        raise ValueError("expected `weight` of at least one token, got V = 0")
    dtype = compute_dtype(hidden=hidden, weight=weight, bias=bias, gate=gate)
    if attention_mask is None:
        attended = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    else:
        attended = as_mask("attention_mask", attention_mask)
    _check_gate(gate)

    can_run = {
        "at least one position": hidden.numel() > 0,
        "sparse_grad=False": not sparse_grad,
    }
    elements = size["B"] * size["V"]
    if uses_triton("head", impl, hidden, weight, bias, gate, elements=elements, needs=can_run):
        from sparse_losses.kernels import head as kernel

        operands = torch.promote_types(hidden.dtype, weight.dtype)
        inputs = hidden.to(operands), weight.to(operands), bias, gate
        if torch.compiler.is_compiling():
            activations, pooled, *_ = kernel.forward(*inputs, attended, return_logits)
        else:
            activations, pooled = _KernelHead.apply(  # type: ignore[no-untyped-call]  # torch gives `apply` none
                *inputs, attended, return_logits
            )
        return (activations, pooled) if return_logits else activations
    if torch.compiler.is_compiling():
        logits, _ = _dense_maxima(hidden, weight, bias, attended, dtype, return_logits)
        pooled = logits
        if gate is not None:
            pooled = torch.where(attended.any(1, keepdim=True), logits * gate.to(dtype), 0.0)
        activations = nnf.relu(pooled).log1p()
        return (activations, pooled) if return_logits else activations
    activations, pooled = _Head.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, gate, attended, dtype, return_logits, sparse_grad
    )
    return (activations, pooled) if return_logits else activations


def _check_gate(gate: Tensor | None) -> None:
    if gate is None or not values_can_be_checked(gate) or gate.numel() == 0:
        return
    low, high = gate.aminmax()
    if low < 0 or high > 1:  # a NaN is neither: it shows
        raise ValueError(
            f"expected `gate` in [0, 1], got values from {low.item():g} to {high.item():g}"
        )


class _Entries(NamedTuple):
    """Entries of ``[B, V]``, sorted by column: the position of their maximum, and the maximum."""

    column: Tensor  # [m] int32
    token: Tensor  # [m] int32, into the B * S positions
    logit: Tensor  # [m], before the gate


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gate: Tensor | None,
        attended: Tensor,
        dtype: torch.dtype,
        return_logits: bool,
        sparse_grad: bool,
    ) -> tuple[Tensor, Tensor | None]:
        entries = _maxima(hidden, weight, bias, attended, gate, dtype, every=return_logits)
        length = hidden.shape[1]
        row, column = entries.token.long() // max(length, 1), entries.column.long()
        pooled = entries.logit
        if gate is not None:
            pooled = pooled * gate[row, column].to(dtype)
        shape = hidden.shape[0], weight.shape[0]
        activations, logits, slope = activate(pooled, row, column, shape, return_logits)
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            gate,
            entries.column,
            entries.token,
            slope,
            None if gate is None else entries.logit,
        )
        ctx.sparse_grad, ctx.dtype = sparse_grad, dtype
        ctx.set_materialize_grads(False)
        return activations, logits

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, gate, column, token, slope, logit = ctx.saved_tensors
        rest = None, None, None, None
        if torch.is_grad_enabled():  # a graph of the gradient is wanted: recompute it plainly
            inputs = hidden, weight, bias, gate
            found = _gradients_with_graph(
                column, token, ctx.dtype, inputs, ctx.needs_input_grad, upstream
            )
            return *found, *rest

        row, wide_column = token.long() // max(hidden.shape[1], 1), column.long()
        of_pooled = gradient_of_pooled(upstream, row, wide_column, slope)
        of_gate = None
        if gate is not None:
            if ctx.needs_input_grad[3]:
                of_gate = torch.zeros_like(gate).index_put_(
                    (row, wide_column), (of_pooled * logit).to(gate.dtype)
                )
            of_pooled = of_pooled * gate[row, wide_column].to(ctx.dtype)
        of_hidden, of_weight, of_bias = _gradients(
            hidden, weight, bias, column, token, of_pooled, ctx.needs_input_grad, ctx.sparse_grad
        )
        return of_hidden, of_weight, of_bias, of_gate, *rest


class _KernelHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gate: Tensor | None,
        attended: Tensor,
        return_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        from sparse_losses.kernels import head as kernel

        activations, pooled, logits, position = kernel.forward(
            hidden, weight, bias, gate, attended, return_logits
        )
        ctx.save_for_backward(hidden, weight, bias, gate, activations, logits, position, attended)
        ctx.every = return_logits
        ctx.set_materialize_grads(False)
        return activations, pooled if return_logits else None

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        from sparse_losses.kernels import head as kernel

        *inputs, activations, _, position, attended = saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            has_entry = ~(activations <= 0)  # a NaN is one
            if ctx.every:
                has_entry = attended.any(1, keepdim=True).expand_as(has_entry)
            column, row = has_entry.T.nonzero(as_tuple=True)
            token = row * attended.shape[1] + position[row, column].long()
            found = _gradients_with_graph(column, token, torch.float32, inputs, needs, upstream)
            return *found, None, None
        if all(g is None for g in upstream):
            return (None,) * 6
        gradients = kernel.backward(list(needs), *upstream, *saved)
        return *(g if need else None for need, g in zip(needs, gradients, strict=True)), None, None


def _gradients_with_graph(
    column: Tensor,
    token: Tensor,
    dtype: torch.dtype,
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    upstream: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients by the four inputs that can be differentiated again, the positions given."""
    # Aliases: where one input was made from another, the way through it is not ours.
    aliases: list[Any] = [None if t is None else t.view_as(t) for t in inputs]
    outputs = _plain_at_maxima(column, token, dtype, *aliases)
    given = [(o, g) for o, g in zip(outputs, upstream, strict=True) if g is not None]
    wanted = [t for t, need in zip(aliases, needs, strict=False) if need]
    gradients = iter(
        torch.autograd.grad(
            [o for o, _ in given],
            wanted,
            [g for _, g in given],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(gradients) if need else None for need in needs[:4]]


def _plain_at_maxima(
    column: Tensor,
    token: Tensor,
    dtype: torch.dtype,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Activations and pooled logits by differentiable operations, the positions given."""
    token, column = token.long(), column.long()
    states = hidden.flatten(0, 1)[token].to(dtype)
    pooled = (states * weight[column].to(dtype)).sum(-1)
    if bias is not None:
        pooled = pooled + bias[column].to(dtype)
    row = token // max(hidden.shape[1], 1)
    if gate is not None:
        pooled = pooled * gate[row, column].to(dtype)
    nothing = pooled.new_zeros(hidden.shape[0], weight.shape[0])
    activations = nothing.index_put((row, column), nnf.relu(pooled).log1p())
    return activations, nothing.index_put((row, column), pooled)


# ------------------------------------------------------------------------------------------------
# Forward: the maxima


class _Packed(NamedTuple):
    """The attended tokens, text after text, texts of one length together."""

    token: Tensor  # [n] into the B * S positions
    row: Tensor  # [R] the texts with any attended token, in packed order
    groups: list[tuple[int, int, int, int]]  # first and last text, first token, tokens a text


def _pack(attended: Tensor) -> _Packed:
    """Lines up the attended tokens so that one reduction serves all texts of one length.

    A text's last token is repeated up to a multiple of four or more, which makes fewer lengths and
    cannot change a maximum; being last, it cannot win a tie against itself either.
    """
    batch, length = attended.shape
    lengths = attended.sum(1)
    quantum = 4 if batch <= 16 else max(4, length // 64 * 4)
    rounded = (lengths + quantum - 1) // quantum * quantum
    # Attended positions first, in their order.
    order = attended.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
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
    # Matrix products like widths of multiples of 16.
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
) -> _Entries:
    """The entries of ``[B, V]`` that are active, or ``every`` one of a text with any token."""
    packed = _pack(attended)
    states = hidden.flatten(0, 1).index_select(0, packed.token).to(dtype)
    vocab_size = weight.shape[0]
    if not packed.groups:
        none = packed.token.int()
        return _Entries(none, none, states.new_zeros(0))
    num_tokens = states.shape[0]
    tile = TILE or min(max((6 << 20) // num_tokens // 16 * 16, 256), 8192, vocab_size)
    screen = None
    if not every and _should_screen(states, vocab_size):
        screen = _Screen(states, packed, weight.dtype)
    scores: Tensor | None = None
    columns, tokens, logits = [], [], []
    for start in range(0, vocab_size, tile):
        rows = weight[start : start + tile].to(dtype)
        tile_bias = None if bias is None else bias[start : start + tile, None].to(dtype)
        tile_gate = None
        if gate is not None:
            tile_gate = gate[:, start : start + tile].T[:, packed.row].to(dtype)
        found = None
        if screen is not None:
            found = screen.candidates(rows, tile_bias, tile_gate)
            if found is None:  # too many candidates to gain, and the next tile is of their kind
                screen = None
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
    pooled = logit if gate is None else logit * gate
    return ~(pooled <= 0)  # so that a NaN is, and shows


def _maxima_of_tile(
    scores: Tensor, packed: _Packed, bias: Tensor | None, gate: Tensor | None, every: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns, packed tokens and logits of the entries of a tile ``[T, n]``, by column."""
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
        # argmax takes the first of equals.
        tokens.append(view[column, text].argmax(-1) + (first + text * size))
        columns.append(column)
        texts.append(text + start)
    column, token, text = torch.cat(columns), torch.cat(tokens), torch.cat(texts)
    if len(views) > 1:
        order = column.argsort(stable=True)
        column, token, text = column[order], token[order], text[order]
    return column, token, logit[column, text]


def _should_screen(states: Tensor, vocab_size: int) -> bool:
    if states.dtype != torch.float32 or states.device.type != "cpu" or SCREENING is False:
        return False
    return SCREENING is True or (
        states.numel() * vocab_size >= 1 << 24
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    )


class _Screen:
    """Finds the active entries of a tile through its bf16 product; the bound is derived above."""

    def __init__(self, states: Tensor, packed: _Packed, weight_dtype: torch.dtype) -> None:
        width = states.shape[1]
        self.states, self.packed = states, packed
        self.low = states.bfloat16()
        self.weight_is_exact = weight_dtype == torch.bfloat16
        low = self.low.float()
        gamma = 2 * width * 2.0**-24
        weight_roundoff = 0.0 if self.weight_is_exact else _BF16_ROUNDOFF
        norm = _norm_bound(low)
        per_token = _norm_bound(states - low) + (weight_roundoff + 2 * gamma) * norm
        # The largest of each text, one after the other in packed order.
        largest = [
            torch.stack([per_token, norm])[:, first : first + (stop - start) * size]
            .view(2, stop - start, size)
            .amax(-1)
            for start, stop, first, size in packed.groups
        ]
        self.slack, self.norm = torch.cat(largest, dim=1) * 1.01

    def candidates(
        self, rows: Tensor, bias: Tensor | None, gate: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Columns, packed tokens and logits of a tile's entries; ``None`` if that does not pay."""
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
            upper = upper + bias + 2.0**-22 * bias.abs()
        wanted = ~(upper <= 0)
        if gate is not None:
            wanted = (wanted & (~(gate <= 0) | ~upper.isfinite())) | gate.isnan()
        reach = highest - c * highest.abs() - 2 * slack
        reach = torch.where(reach > 0, reach / (1 + c), reach / (1 - c))
        # A hair lower for the rounding of these lines.
        reach = reach - 1e-6 * reach.abs()

        columns, texts, tokens = [], [], []
        count = 0
        for view, (start, stop, first, size) in zip(views, self.packed.groups, strict=True):
            column, text = wanted[:, start:stop].nonzero(as_tuple=True)
            within = ~(view[column, text] < reach[:, start:stop][column, text][:, None])
            count += int(within.count_nonzero())
            # One dot product costs what five numbers of a matrix product do.
            if count * 5 > height * num_tokens and SCREENING is not True:
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
        # The first of the largest of each entry; rows are sorted, and tokens ascend within.
        entry = column * self.norm.shape[0] + text
        starts = torch.ones_like(entry, dtype=torch.bool)
        starts[1:] = entry[1:] != entry[:-1]
        number = starts.cumsum(0) - 1
        best = score.new_full((int(number[-1]) + 1 if number.numel() else 0,), -torch.inf)
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
    """The norms of rows from above: rounding, and squares lost to underflow, included."""
    squares: Tensor = torch.linalg.vector_norm(x, dim=1).square()
    return (squares + x.shape[1] * 2.0**-126).sqrt() * (1 + x.shape[1] * 2.0**-23)


def _bf16_product(rows: Tensor, states: Tensor) -> Tensor:
    """``rows @ states.T`` of bf16 matrices, summed in fp32 and rounded to bf16."""
    if rows.shape[0] * states.shape[0] * rows.shape[1] > 1 << 12:
        return rows @ states.T
    return (rows.float() @ states.float().T).bfloat16()  # smaller ones are summed in bf16


# ------------------------------------------------------------------------------------------------
# Backward: sums over the entries


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    column: Tensor,
    token: Tensor,
    coefficient: Tensor,
    needs: tuple[bool, ...],
    sparse_grad: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states, weight and bias from those of the entries' logits."""
    batch, length, width = hidden.shape
    vocab_size, dtype = weight.shape[0], coefficient.dtype
    of_hidden = of_weight = of_bias = None
    bounds = bounds_of(column, vocab_size)
    states = hidden.reshape(batch * length, width).to(dtype)
    # By blocks of the vocabulary where a half-precision matrix must not be cast whole.
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
        )[:, 0].to(bias.dtype)
    return of_hidden, of_weight, of_bias


# ------------------------------------------------------------------------------------------------
# Compiled: operators whose outputs have shapes known beforehand


@torch.library.custom_op("sparse_losses::dense_maxima", mutates_args=())
def _dense_maxima(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attended: Tensor,
    dtype: torch.dtype,
    every: bool,
) -> tuple[Tensor, Tensor]:
    """Pooled logits ``[B, V]`` and positions, 0 and -1 at entries that are not active."""
    entries = _maxima(hidden, weight, bias, attended, None, dtype, every)
    shape = hidden.shape[0], weight.shape[0]
    where = entries.token.long() // max(hidden.shape[1], 1), entries.column.long()
    logits = entries.logit.new_zeros(shape).index_put_(where, entries.logit)
    return logits, entries.token.new_full(shape, -1).index_put_(where, entries.token)


@_dense_maxima.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attended: Tensor,
    dtype: torch.dtype,
    every: bool,
) -> tuple[Tensor, Tensor]:
    shape = hidden.shape[0], weight.shape[0]
    return hidden.new_empty(shape, dtype=dtype), hidden.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("sparse_losses::dense_maxima_backward", mutates_args=())
def _dense_maxima_backward(
    upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden states, weight and bias (empty without one)."""
    column, row = ((token >= 0) & (upstream != 0)).T.nonzero(as_tuple=True)
    of_hidden, of_weight, of_bias = _gradients(
        hidden,
        weight,
        bias,
        column.int(),
        token[row, column],
        upstream[row, column],
        (True, True, True),
        sparse_grad=False,
    )
    assert of_hidden is not None
    assert of_weight is not None
    return of_hidden, of_weight, hidden.new_empty(0) if of_bias is None else of_bias


@_dense_maxima_backward.register_fake
def _(
    upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    of_bias = hidden.new_empty(0) if bias is None else torch.empty_like(bias)
    return (
        hidden.new_empty(hidden.shape),
        weight.new_empty(weight.shape),
        of_bias,
    )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, *_ = inputs
    ctx.save_for_backward(hidden, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward_of_dense_maxima(
    ctx: Any, upstream: Tensor, _: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
    hidden, weight, bias, token = ctx.saved_tensors
    of_hidden, of_weight, of_bias = _dense_maxima_backward(upstream, hidden, weight, bias, token)
    return of_hidden, of_weight, None if bias is None else of_bias, None, None, None


_dense_maxima.register_autograd(_backward_of_dense_maxima, setup_context=_keep_for_backward)


class SpladeHead(nn.Module):
    """Module of ``splade_head``, which holds formula and arguments.

    An ``nn.Parameter`` stays that very parameter, so that a matrix tied to the embeddings stays
    tied; a plain tensor becomes a buffer, a frozen vocabulary.

    Args:
        weight: ``[V, H]``.
        bias: ``[V]``.
        transform: layers that the hidden states pass through first, ``[B, S, H]`` to
            ``[B, S, H]``: a masked language model has some before its vocabulary projection.
        sparse_grad: as in the function.
        impl: as in the function.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeHead
        >>> embedding = torch.nn.Embedding(1000, 16)
        >>> head = SpladeHead(embedding.weight)
        >>> head(torch.randn(2, 5, 16), torch.ones(2, 5)).shape
        torch.Size([2, 1000])
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        transform: nn.Module | None = None,
        sparse_grad: bool = False,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        check_shapes(weight=(weight, "V H"), bias=(bias, "V, optional"))
        check_flag(sparse_grad=sparse_grad)
        check_impl(impl)
        for name, tensor in (("weight", weight), ("bias", bias)):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, None if tensor is None else tensor.detach())
        self.transform = transform
        self.sparse_grad = sparse_grad
        self.impl: Impl = impl

    @classmethod
    def from_masked_lm(
        cls, model: nn.Module, *, sparse_grad: bool = False, impl: Impl = "auto"
    ) -> "SpladeHead":
        """The head of a masked language model of ``transformers``, parameters shared with it.

        ``head(hidden, attention_mask)``, with ``hidden`` the last hidden state of
        ``model.base_model``, equals ``splade_pool(logits, attention_mask)`` of the model's logits.
        The model reads eight tokens once to show its layers, and stays as it is. Make the head
        after ``resize_token_embeddings``, which replaces the matrix.

        Args:
            model: BERT, DistilBERT, XLM-RoBERTa, ModernBERT, or any other whose layers between
                hidden states and logits are a chain that ends in a linear map.
            sparse_grad: as in the function.
            impl: as in the function.

        Raises:
            TypeError: if the model is no masked language model, or is not built like that.
        """
        transform, projection = head_of(model)
        return cls(
            projection.weight,
            projection.bias,
            transform=transform,
            sparse_grad=sparse_grad,
            impl=impl,
        )

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        *,
        gate: Tensor | None = None,
        return_logits: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The activations; tensors as in the function."""
        return splade_head(
            hidden if self.transform is None else self.transform(hidden),
            self.weight,
            self.bias,
            attention_mask,
            gate=gate,
            return_logits=return_logits,
            sparse_grad=self.sparse_grad,
            impl=self.impl,
        )

    def extra_repr(self) -> str:
        """The sizes and the hyperparameters."""
        vocab_size, hidden_size = self.weight.shape
        return (
            f"vocab_size={vocab_size}, hidden_size={hidden_size}, bias={self.bias is not None}, "
            f"sparse_grad={self.sparse_grad}, impl={self.impl!r}"
        )
