"""SPLADE pooling: from vocabulary logits at every position to one sparse vector a text."""

from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.checks import check_flag, check_shapes
from sparse_losses._core.fused import can_fuse, is_batched
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses._core.token_ids import as_mask
from sparse_losses.representation._maxima import activate, gradient_of_pooled

__all__ = ["splade_pool", "token_weights"]


@full_precision
def splade_pool(
    logits: Tensor, attention_mask: Tensor, *, return_logits: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    r"""SPLADE max pooling.

    $$x_{ij} = \max_{s \,:\, \mathrm{mask}_{is} = 1} \log\bigl(1 + \mathrm{ReLU}(h_{isj})\bigr)$$

    $h$ are the masked-language-model logits. Activation is monotone, so the maximum comes first and
    logarithms are taken of ``[B, V]`` numbers, not of ``[B, S, V]``.

    Args:
        logits: ``[B, S, V]`` floating.
        attention_mask: ``[B, S]`` bool, int or float 0/1; a masked position is not looked at.
        return_logits: also return the maximum itself, signed, for losses that must reach silent
            tokens.

    Returns:
        Activations ``[B, V]`` >= 0, fp32 (fp64 for fp64 logits); with ``return_logits`` the pair of
        them and the signed pooled logits. A row without any attended position is 0 in both and has
        no gradient.

    Raises:
        ValueError: for wrong shapes or devices.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import splade_pool
        >>> logits = torch.tensor([[[0.0, 1.0], [2.0, -1.0], [9.0, 9.0]]])
        >>> splade_pool(logits, torch.tensor([[1, 1, 0]]))  # log(3), log(2)
        tensor([[1.0986, 0.6931]])

    References:
        SPLADE v2: Sparse Lexical and Expansion Model for Information Retrieval, eq. 6.
    """
    check_shapes(logits=(logits, "B S V"), attention_mask=(attention_mask, "B S"))
    check_flag(return_logits=return_logits)
    dtype = compute_dtype(logits=logits)
    attended = as_mask("attention_mask", attention_mask)
    if can_fuse(logits) and logits.device.type == "cpu":
        activations, pooled = _Pool.apply(logits, attended, dtype, return_logits)  # type: ignore[no-untyped-call]
        return (activations, pooled) if return_logits else activations
    if logits.shape[1] == 0:
        pooled = logits.sum(1).to(dtype)
    else:
        # The maximum is exact in half precision; only the [B, V] result is cast.
        masked = torch.where(attended[:, :, None], logits, -torch.inf)
        pooled = masked.max(1).values.to(dtype)
        pooled = torch.where(attended.any(1)[:, None], pooled, 0.0)
    activations = nnf.relu(pooled).log1p()
    return (activations, pooled) if return_logits else activations


class _Pool(torch.autograd.Function):
    """One read of the attended logits; then only active entries need the place of their maximum."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, attended: Tensor, dtype: torch.dtype, return_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch, _, vocab_size = logits.shape
        rows, tokens, columns, maxima = [], [], [], []
        for row in range(batch):
            position = attended[row].nonzero()[:, 0]
            if position.numel() == 0:
                continue
            first, last = int(position[0]), int(position[-1]) + 1
            block = logits[row, first:last]
            if last - first > position.numel():  # a mask with holes
                block = block.index_select(0, position - first)
            highest = block.amax(0)
            wanted = torch.ones_like(highest, dtype=torch.bool)
            if not return_logits:
                wanted = ~(highest <= 0)  # so that a NaN is, and shows
            column = wanted.nonzero()[:, 0]
            if column.numel() * 3 > vocab_size:
                place = block.max(0).indices[column]
            else:
                place = block.index_select(1, column).argmax(0)
            tokens.append(position[place])  # both take the first of equals
            rows.append(torch.full_like(column, row))
            columns.append(column)
            maxima.append(highest[column])
        nothing = attended.nonzero()[:0, 0]
        row_index = torch.cat([nothing, *rows])
        column_index = torch.cat([nothing, *columns])
        token_index = torch.cat([nothing, *tokens])
        pooled = torch.cat([logits.new_zeros(0), *maxima]).to(dtype)
        activations, signed, slope = activate(
            pooled, row_index, column_index, (batch, vocab_size), return_logits
        )
        index = row_index.int(), token_index.int(), column_index.int()
        ctx.save_for_backward(logits, slope, *index)
        ctx.dtype = dtype
        ctx.set_materialize_grads(False)
        return activations, signed

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        logits, slope, *index = ctx.saved_tensors
        row, token, column = (i.long() for i in index)
        if torch.is_grad_enabled():  # a graph of the gradient is wanted: by plain operations
            pooled = logits[row, token, column].to(ctx.dtype)
            slope = torch.where(pooled <= 0, 0.0, 1 / (1 + nnf.relu(pooled)))
        of_pooled = gradient_of_pooled(upstream, row, column, slope)
        where, of_pooled = (row, token, column), of_pooled.to(logits.dtype)
        if is_batched(of_pooled):
            return torch.zeros_like(logits).index_put(where, of_pooled), None, None, None
        return torch.zeros_like(logits).index_put_(where, of_pooled), None, None, None


@full_precision
def token_weights(logits: Tensor, attention_mask: Tensor) -> Tensor:
    r"""How strongly each position of a text activates its strongest token.

    $$w_{is} = \mathrm{mask}_{is} \, \max_j \log\bigl(1 + \mathrm{ReLU}(h_{isj})\bigr)$$

    Args:
        logits: ``[B, S, V]`` floating, ``h``.
        attention_mask: ``[B, S]`` bool, int or float 0/1.

    Returns:
        ``[B, S]`` >= 0, fp32 (fp64 for fp64 logits), 0 at masked positions.

    Raises:
        ValueError: for wrong shapes or devices.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import token_weights
        >>> logits = torch.tensor([[[0.0, 1.0], [2.0, -1.0], [9.0, 9.0]]])
        >>> token_weights(logits, torch.tensor([[1, 1, 0]]))
        tensor([[0.6931, 1.0986, 0.0000]])

    References:
        SPLADE v2: Sparse Lexical and Expansion Model for Information Retrieval.
    """
    check_shapes(logits=(logits, "B S V"), attention_mask=(attention_mask, "B S"))
    attended = as_mask("attention_mask", attention_mask)
    strongest = logits.max(-1).values.to(compute_dtype(logits=logits))
    return nnf.relu(torch.where(attended, strongest, 0.0)).log1p()
