"""The SPLADE head in Triton: products, maxima and activation in one kernel.

Forward pass: the attended tokens are packed, text after text. A program owns some tokens of the
vocabulary and some texts. It multiplies tile by tile and keeps each text's largest score and its
position. Backward pass, at the maxima only: a program owns rows of a gradient and collects their
contributions, so that no atomic additions are needed and results are deterministic. The host never
reads the lengths or the number of active entries.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as nnf
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparse_losses._core.activation import splade_activation
from sparse_losses.fast.head_tiles import picked, smallest_integer, sources

__all__ = ["backward", "forward", "triton_head"]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Forward pass: tile sizes in vocabulary, tokens and hidden dimension; warps; stages. The scores of
# a tile stay in registers. The vocabulary is the first dimension, as a maximum over the second one
# stays within a thread except for two steps.
LARGE = 256, 128, 64, 8, 4  # needs 197 KB of shared memory, available from Hopper on
SMALL = 128, 128, 64, 8, 3
FULL_PRECISION = 64, 64, 32, 8, 3  # fp32 operands are multiplied outside the tensor cores
PROGRAMS = 1024  # enough to keep all multiprocessors busy to the end
# Backward pass.
CHUNK = 2048  # columns of a row that one program lists
ENTRIES, WIDTH, POSITIONS = 64, 128, 128  # tile of the one-hot product: entries, hidden, rows
FULL_PRECISION_WIDTH, WARPS = 64, 8
OWN_ROWS, OWN_WIDTH, TEXTS = 16, 256, 32  # tile of the weight's gradient, and texts per step
MOST_SPLITS = 8


def triton_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attended: Tensor | None,
    gate: Tensor | None,
    *,
    dtype: torch.dtype,
    return_logits: bool = False,
    sparse_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return activations and, if requested, pooled logits; options are those of ``splade_head``.

    Hidden states and weight are multiplied in the wider of their dtypes and summed in fp32.
    """
    if attended is None:
        attended = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    operands = torch.promote_types(hidden.dtype, weight.dtype)
    inputs = hidden.to(operands), weight.to(operands), bias, gate, attended, return_logits
    if torch.compiler.is_compiling():
        activations, pooled, *_ = forward(*inputs)
        return activations, pooled
    found: tuple[Tensor, Tensor | None] = _Head.apply(*inputs)
    return found


class _Head(torch.autograd.Function):
    """Autograd function for eager mode, with second derivatives; compilers use the operators."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, attended, return_logits = inputs
        activations, pooled, logits, position = forward(*inputs)
        ctx.save_for_backward(*tensors, activations, logits, position, attended)
        ctx.every = return_logits
        ctx.set_materialize_grads(False)
        return activations, pooled if return_logits else None

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        *inputs, activations, _, position, attended = saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            has_entry = ~(activations <= 0)  # includes NaN
            if ctx.every:
                has_entry = attended.any(1, keepdim=True).expand_as(has_entry)
            found = _second_derivatives(
                inputs, needs, upstream, position, has_entry, attended, torch.float32
            )
            return *found, None, None
        if all(g is None for g in upstream):
            return (None,) * 6
        gradients = backward(list(needs), *upstream, *saved)
        return *(g if need else None for need, g in zip(needs, gradients, strict=True)), None, None


def _second_derivatives(
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    upstream: Sequence[Tensor | None],
    place: Tensor,
    has_entry: Tensor,
    attended: Tensor,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Return differentiable gradients of hidden states, weight, bias and gate.

    ``place`` gives the positions of the maxima, ``has_entry`` the entries that have one.
    """
    # Aliases cut the graph between inputs: where one depends on another, autograd adds that path.
    aliases: list[Any] = [None if t is None else t.view_as(t) for t in inputs]
    hidden, weight, bias, gate = aliases
    scores = picked(place, hidden, weight, *sources(attended), dtype, dtype, None)
    outputs = splade_activation(scores, bias, gate, has_entry.logical_not(), return_logits=True)
    given = [(o, g) for o, g in zip(outputs, upstream, strict=True) if g is not None]
    wanted = [t for t, need in zip(aliases, needs, strict=False) if need]
    gradients = iter(
        torch.autograd.grad(
            [o for o, _ in given if o is not None],
            wanted,
            [g for _, g in given],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(gradients) if need else None for need in needs[:4]]


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context for kernel launches: Triton uses the current device, not the tensors'."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory per block of threads; Hopper's value without CUDA."""
    if device.type != "cuda":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@triton.jit
def dot(a, b, acc):
    """Return ``acc + a @ b`` summed in fp32; fp32 operands are not rounded to TF32."""
    if INTERPRETED:  # the interpreter's bf16 product is wrong
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def larger(a, b):
    """Return the larger number; unlike ``tl.max`` it propagates a NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log1p(x):
    """Return ``log(1 + x)`` for ``x >= 0``, accurate for small ``x``."""
    u = 1.0 + x
    is_lost = (u == 1.0) | (x == float("inf"))
    # The error of an ordinary division is up to two units in the last place.
    return tl.where(is_lost, x, tl.log(u) * tl.div_rn(x, tl.where(is_lost, 1.0, u - 1.0)))


@triton.jit
def _maxima(
    packed,
    weight,
    bias,
    gate,
    text_of,
    offset,
    position_of,
    activations,
    pooled,
    logits,
    position,
    num_texts,
    texts_each,
    vocab_size,
    width: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    EVERY: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TOKENS: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    first_text = tl.program_id(0) * texts_each
    begin = tl.load(offset + first_text)
    end = tl.load(offset + tl.minimum(first_text + texts_each, num_texts))
    first_column = tl.program_id(1) * VOCABULARY
    column = first_column + tl.arange(0, VOCABULARY).to(tl.int64)
    exists = column < vocab_size
    best = tl.full([VOCABULARY], float("-inf"), tl.float32)
    at = tl.zeros([VOCABULARY], tl.int32)
    text = first_text
    for start in range(begin, end, TOKENS):
        stop = tl.minimum(start + TOKENS, end)
        token = start + tl.arange(0, TOKENS)
        scores = tl.zeros([VOCABULARY, TOKENS], tl.float32)
        for first in range(0, width, HIDDEN):
            # Loads beyond the edges give zeros; tokens of the next group are masked below.
            w = weight.load([first_column, first])
            scores = dot(w, packed.load([start, first]).T, scores)
        last = tl.load(text_of + stop - 1)
        for each in range(text, last + 1):
            low, high = tl.load(offset + each), tl.load(offset + each + 1)
            here = ((token >= low) & (token < high))[None, :]
            largest = tl.reduce(tl.where(here, scores, float("-inf")), 1, larger)
            hit = here & ((scores == largest[:, None]) | (scores != scores))
            where = tl.min(tl.where(hit, token[None, :], 2147483647), 1)
            better = (largest > best) | ((largest != largest) & (best == best))
            at = tl.where(better, where, at)
            best = tl.where(better, largest, best)
            if (high <= stop) & (high > low):  # the text is complete
                logit = best
                if HAS_BIAS:
                    logit += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)
                here_in_rows = (tl.zeros_like(column) + each) * vocab_size + column
                value = logit
                if HAS_GATE:
                    tl.store(logits + here_in_rows, logit, mask=exists)
                    value *= tl.load(gate + here_in_rows, mask=exists, other=0.0).to(tl.float32)
                if EVERY:
                    tl.store(pooled + here_in_rows, value, mask=exists)
                # This form of relu keeps a NaN.
                value = tl.where(value <= 0, 0.0, value)
                tl.store(activations + here_in_rows, log1p(value), mask=exists)
                s = tl.load(position_of + tl.maximum(at, low), mask=exists, other=0)
                tl.store(position + here_in_rows, s.to(position.dtype.element_ty), mask=exists)
                best = tl.full([VOCABULARY], float("-inf"), tl.float32)
                at = tl.zeros([VOCABULARY], tl.int32)
        text = tl.where(tl.load(offset + last + 1) <= stop, last + 1, last)


@triton.jit
def _coefficient(
    text,
    column,
    mask,
    activations,
    of_activations,
    activations_row,
    activations_column,
    of_logits,
    logits_row,
    logits_column,
    gate,
    length_of,
    vocab_size,
    HAS_ACTIVATIONS: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """Return the gradient of the maxima of entries ``(text, column)``; 0 for an empty text."""
    row = text.to(tl.int64)
    g = tl.zeros_like(column).to(tl.float32)
    if HAS_ACTIVATIONS:
        value = tl.load(activations + row * vocab_size + column, mask=mask, other=0.0)
        upstream = tl.load(
            of_activations + row * activations_row + column.to(tl.int64) * activations_column,
            mask=mask,
            other=0.0,
        )
        # 1 / (1 + logit) is exp(-value); a NaN counts as active.
        g += tl.where(value <= 0, 0.0, upstream.to(tl.float32) * tl.exp(-value))
    if HAS_LOGITS or HAS_GATE:
        is_there = tl.load(length_of + row, mask=mask, other=0) > 0
    if HAS_LOGITS:
        upstream = tl.load(
            of_logits + row * logits_row + column.to(tl.int64) * logits_column, mask=mask, other=0.0
        )
        g += tl.where(is_there, upstream.to(tl.float32), 0.0)
    if HAS_GATE:  # not loaded for an empty text: 0 * NaN is NaN
        at = gate + row * vocab_size + column
        g *= tl.load(at, mask=mask & is_there, other=0.0).to(tl.float32)
    return g


@triton.jit
def _list(
    activations,
    of_activations,
    activations_row,
    activations_column,
    of_logits,
    logits_row,
    logits_column,
    gate,
    length_of,
    counts,
    starts,
    columns,
    vocab_size,
    HAS_ACTIVATIONS: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count or write, in order, the columns of a text that have a gradient."""
    text, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = column < vocab_size
    g = _coefficient(
        tl.full([CHUNK], 0, tl.int32) + text,
        column,
        exists,
        activations,
        of_activations,
        activations_row,
        activations_column,
        of_logits,
        logits_row,
        logits_column,
        gate,
        length_of,
        vocab_size,
        HAS_ACTIVATIONS,
        HAS_LOGITS,
        HAS_GATE,
    )
    counted = exists & (g != 0)
    here = text * tl.num_programs(1) + chunk
    if COUNT:
        tl.store(counts + here, tl.sum(counted.to(tl.int32)))
    else:
        slot = tl.load(starts + here) + tl.cumsum(counted.to(tl.int32)) - 1
        tl.store(columns + text.to(tl.int64) * vocab_size + slot, column, mask=counted)


@triton.jit
def _of_hidden(
    weight,
    position,
    activations,
    of_activations,
    activations_row,
    activations_column,
    of_logits,
    logits_row,
    logits_column,
    gate,
    length_of,
    columns,
    totals,
    of_hidden,
    length,
    vocab_size,
    split_size,
    width: tl.constexpr,
    HAS_ACTIVATIONS: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    SPLITS: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Add each entry's gradient times its row of the weight at the position of its maximum."""
    blocks = tl.cdiv(length, POSITIONS)
    text, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    s = block * POSITIONS + tl.arange(0, POSITIONS)
    h = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = text.to(tl.int64) * vocab_size
    total = tl.load(totals + text)
    each = tl.cdiv(tl.cdiv(total, ENTRIES), SPLITS) * ENTRIES
    begin = tl.program_id(2) * each
    end = tl.minimum(begin + each, total)
    result = tl.zeros([POSITIONS, WIDTH], tl.float32)
    for first in range(begin, end, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        is_one = entry < end
        column = tl.load(columns + row + entry, mask=is_one, other=0)
        at = tl.load(position + row + column, mask=is_one, other=0).to(tl.int32)
        g = _coefficient(
            tl.zeros_like(column) + text,
            column,
            is_one,
            activations,
            of_activations,
            activations_row,
            activations_column,
            of_logits,
            logits_row,
            logits_column,
            gate,
            length_of,
            vocab_size,
            HAS_ACTIVATIONS,
            HAS_LOGITS,
            HAS_GATE,
        )
        w = tl.load(
            weight + column.to(tl.int64)[:, None] * width + h[None, :],
            mask=is_one[:, None] & (h < width)[None, :],
            other=0.0,
        )
        one_hot = tl.where((at[None, :] == s[:, None]) & is_one[None, :], g[None, :], 0.0)
        if w.dtype == tl.bfloat16:  # two parts, or gradients would be rounded to 8 bits
            high = one_hot.to(tl.bfloat16)
            low = (one_hot - high.to(tl.float32)).to(tl.bfloat16)
            result = dot(high, w, result)
            result = dot(low, w, result)
        elif w.dtype == tl.float16:  # TF32 holds fp16 numbers and small gradients
            result = tl.dot(one_hot, w.to(tl.float32), result, input_precision="tf32")
        else:
            result = dot(one_hot, w, result)
    out = of_hidden + tl.program_id(2) * split_size  # [splits, B, S, H]
    out += (text.to(tl.int64) * length + s[:, None]) * width + h[None, :]
    is_there = (s < length)[:, None] & (h < width)[None, :]
    tl.store(out, result.to(of_hidden.dtype.element_ty), mask=is_there)


@triton.jit
def _of_weight(
    hidden,
    position,
    activations,
    of_activations,
    activations_row,
    activations_column,
    of_logits,
    logits_row,
    logits_column,
    gate,
    length_of,
    of_weight,
    of_bias,
    num_texts,
    length,
    vocab_size,
    width: tl.constexpr,
    HAS_ACTIVATIONS: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TEXTS: tl.constexpr,
):
    """Compute rows of the weight's gradient from the states at the positions of the maxima."""
    blocks = tl.cdiv(width, WIDTH)
    block = tl.program_id(0) % blocks
    column = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    h = block * WIDTH + tl.arange(0, WIDTH)
    exists = column < vocab_size
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, num_texts, TEXTS):
        text = first + tl.arange(0, TEXTS)
        mask = (text < num_texts)[:, None] & exists[None, :]
        g = _coefficient(
            tl.broadcast_to(text[:, None], [TEXTS, ROWS]),
            tl.broadcast_to(column[None, :], [TEXTS, ROWS]),
            mask,
            activations,
            of_activations,
            activations_row,
            activations_column,
            of_logits,
            logits_row,
            logits_column,
            gate,
            length_of,
            vocab_size,
            HAS_ACTIVATIONS,
            HAS_LOGITS,
            HAS_GATE,
        )
        g = tl.where(mask, g, 0.0)
        total += tl.sum(g, 0)
        if NEEDS_WEIGHT:
            counted = (g != 0).to(tl.int32)
            rank = tl.cumsum(counted, 0)
            most = tl.max(tl.sum(counted, 0))
            if most > 0:
                here = text[:, None].to(tl.int64) * vocab_size + column[None, :]
                at = tl.load(position + here, mask=mask, other=0).to(tl.int32)
                at += text[:, None] * length
                for number in range(1, most + 1):  # the first text of every row, ...
                    chosen = (counted > 0) & (rank == number)
                    is_one = tl.max(chosen.to(tl.int32), 0) > 0
                    state = tl.sum(tl.where(chosen, at, 0), 0).to(tl.int64)
                    of_one = tl.sum(tl.where(chosen, g, 0.0), 0)
                    x = tl.load(
                        hidden + state[:, None] * width + h[None, :],
                        mask=is_one[:, None] & (h < width)[None, :],
                        other=0.0,
                    )
                    result += tl.where(is_one, of_one, 0.0)[:, None] * x.to(tl.float32)
    if NEEDS_WEIGHT:
        out = of_weight + column.to(tl.int64)[:, None] * width + h[None, :]
        is_there = exists[:, None] & (h < width)[None, :]
        tl.store(out, result.to(of_weight.dtype.element_ty), mask=is_there)
    if NEEDS_BIAS and block == 0:
        tl.store(of_bias + column, total.to(of_bias.dtype.element_ty), mask=exists)


@torch.library.custom_op("sparse_losses::triton_head", mutates_args=())
def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    attended: Tensor,
    every: bool,
) -> list[Tensor]:
    """Return activations, pooled logits, logits before the gate, and positions of the maxima.

    The pooled logits are empty unless ``every``; the logits before the gate need a gate.
    """
    batch, length, width = hidden.shape
    vocab_size, device = weight.shape[0], hidden.device
    result = _empty_results(hidden, weight, gate, every)
    for tensor in result:  # the result for texts without tokens
        tensor.zero_()
    # Attended tokens come first, in order; their number is not read, which would need a sync.
    token = attended.flatten().logical_not().to(torch.uint8).argsort(stable=True)
    packed = hidden.flatten(0, 1).to(weight.dtype).index_select(0, token)
    offset = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    torch.cumsum(attended.sum(1), 0, dtype=torch.int32, out=offset[1:])
    is_large = shared_memory(hidden.device) >= 200 << 10
    rows, tokens, inner, warps, stages = (
        FULL_PRECISION if weight.dtype == torch.float32 else LARGE if is_large else SMALL
    )
    tiles = triton.cdiv(vocab_size, rows)
    texts_each = triton.cdiv(batch, min(batch, triton.cdiv(PROGRAMS, tiles)))
    with on_device(hidden):
        _maxima[(triton.cdiv(batch, texts_each), tiles)](
            _described(packed, tokens, inner),
            _described(weight, rows, inner),
            token if bias is None else bias.contiguous(),
            token if gate is None else gate.contiguous(),
            (token // length).to(torch.int32),
            offset,
            (token % length).to(torch.int32),
            *result,
            batch,
            texts_each,
            vocab_size,
            width,
            HAS_BIAS=bias is not None,
            HAS_GATE=gate is not None,
            EVERY=every,
            VOCABULARY=rows,
            TOKENS=tokens,
            HIDDEN=inner,
            num_warps=warps,
            num_stages=stages,
        )
    return result


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a tensor descriptor; it needs rows aligned to 16 bytes."""
    x = nnf.pad(x, (0, -x.shape[1] % 8)) if x.shape[1] % 8 else x.contiguous()
    x = x.clone() if x.data_ptr() % 16 else x
    return TensorDescriptor.from_tensor(x, [rows, columns])


def _empty_results(
    hidden: Tensor, weight: Tensor, gate: Tensor | None, every: bool
) -> list[Tensor]:
    shape = hidden.shape[0], weight.shape[0]
    kept = [shape, shape if every else (0,), (0,) if gate is None else shape]
    result = [hidden.new_empty(size, dtype=torch.float32) for size in kept]
    return [*result, hidden.new_empty(shape, dtype=smallest_integer(hidden.shape[1]))]


@forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    attended: Tensor,
    every: bool,
) -> list[Tensor]:
    return _empty_results(hidden, weight, gate, every)


@torch.library.custom_op("sparse_losses::triton_head_backward", mutates_args=())
def backward(
    needs: list[bool],
    of_activations: Tensor | None,
    of_logits: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    activations: Tensor,
    logits: Tensor,
    position: Tensor,
    attended: Tensor,
) -> list[Tensor]:
    """Return gradients of hidden states, weight, bias and gate; empty where not needed."""
    batch, length, width = hidden.shape
    vocab_size, device = weight.shape[0], hidden.device
    found = _empty_gradients(needs, hidden, weight, bias, gate)
    weight, hidden = weight.contiguous(), hidden.contiguous()
    gate = None if gate is None else gate.contiguous()
    lengths = attended.sum(1, dtype=torch.int32)
    upstream = [x for pair in map(_strided, (of_activations, of_logits)) for x in pair]
    coefficient = (
        activations,
        *(activations if x is None else x for x in upstream),
        activations if gate is None else gate,
        lengths,
    )
    flags = {
        "HAS_ACTIVATIONS": of_activations is not None,
        "HAS_LOGITS": of_logits is not None,
        "HAS_GATE": gate is not None,
    }
    with on_device(hidden):
        if needs[0]:
            chunks = triton.cdiv(vocab_size, CHUNK)
            counts = torch.empty(batch, chunks, dtype=torch.int32, device=device)
            columns = torch.empty(batch, vocab_size, dtype=torch.int32, device=device)
            arguments = *coefficient, counts
            _list[(batch, chunks)](
                *arguments, counts, columns, vocab_size, **flags, COUNT=True, CHUNK=CHUNK
            )
            ends = counts.cumsum(1, dtype=torch.int32)
            _list[(batch, chunks)](
                *arguments, ends - counts, columns, vocab_size, **flags, COUNT=False, CHUNK=CHUNK
            )
            positions = min(POSITIONS, max(triton.next_power_of_2(length), 16))
            columns_each = FULL_PRECISION_WIDTH if weight.dtype == torch.float32 else WIDTH
            grid = batch * triton.cdiv(length, positions), triton.cdiv(width, columns_each)
            splits = min(MOST_SPLITS, triton.cdiv(PROGRAMS, grid[0] * grid[1]))
            parts = found[0]
            if splits > 1:
                parts = hidden.new_empty(splits, *hidden.shape, dtype=torch.float32)
            _of_hidden[(*grid, splits)](
                weight,
                position,
                *coefficient,
                columns,
                ends[:, -1].contiguous(),
                parts,
                length,
                vocab_size,
                hidden.numel(),
                width,
                **flags,
                SPLITS=splits,
                ENTRIES=ENTRIES,
                WIDTH=columns_each,
                POSITIONS=positions,
                num_warps=WARPS,
            )
            if splits > 1:
                found[0].copy_(parts.sum(0))
        if needs[1] or needs[2]:
            blocks = triton.cdiv(width, OWN_WIDTH) if needs[1] else 1
            _of_weight[(triton.cdiv(vocab_size, OWN_ROWS) * blocks,)](
                hidden,
                position,
                *coefficient,
                found[1],
                found[2],
                batch,
                length,
                vocab_size,
                width if needs[1] else 1,
                **flags,
                NEEDS_WEIGHT=needs[1],
                NEEDS_BIAS=needs[2],
                ROWS=OWN_ROWS,
                WIDTH=OWN_WIDTH,
                TEXTS=TEXTS,
            )
    if needs[3] and gate is not None:
        by_value = torch.zeros_like(activations)
        has_gradient = ~(activations <= 0)
        if of_activations is not None:
            by_value = torch.where(has_gradient, of_activations * (-activations).exp(), 0.0)
        if of_logits is not None:
            has_gradient = (lengths > 0)[:, None]
            by_value = by_value + of_logits
        # Select after the product: 0 times -inf, the logit of a forbidden token, is NaN.
        found[3].copy_(torch.where(has_gradient, by_value * logits, 0.0))
    return found


def _strided(x: Tensor | None) -> tuple[Any, ...]:
    """Return a matrix and its strides, so that expanded gradients need no copy."""
    return (None, 0, 0) if x is None else (x, *x.stride())


def _empty_gradients(needs: list[bool], *inputs: Tensor | None) -> list[Tensor]:
    given = [x for x in inputs if x is not None]
    return [
        given[0].new_empty(0)
        if not need or x is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for need, x in zip(needs, inputs, strict=True)
    ]


@backward.register_fake
def _(
    needs: list[bool],
    of_activations: Tensor | None,
    of_logits: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    activations: Tensor,
    logits: Tensor,
    position: Tensor,
    attended: Tensor,
) -> list[Tensor]:
    return _empty_gradients(needs, hidden, weight, bias, gate)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    hidden, weight, bias, gate, attended, every = inputs
    activations, _, logits, position = output
    ctx.save_for_backward(hidden, weight, bias, gate, activations, logits, position, attended)
    ctx.every = every


def _back(ctx: Any, upstream: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, gate, activations, logits, position, attended = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    of_logits = upstream[1] if ctx.every else None
    found = backward(
        needs,
        upstream[0],
        of_logits,
        hidden,
        weight,
        bias,
        gate,
        activations,
        logits,
        position,
        attended,
    )
    return *(g if need else None for need, g in zip(needs, found, strict=True)), None, None


forward.register_autograd(_back, setup_context=_keep)
