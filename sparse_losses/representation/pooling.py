"""SPLADE pooling: from vocabulary logits at every position to one sparse vector a text."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.checks import check_flag, check_shapes
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses._core.token_ids import as_mask

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

    Example:
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
    if logits.shape[1] == 0:
        pooled = logits.sum(1).to(dtype)
    else:
        # The maximum is exact in half precision; only the [B, V] result is cast.
        masked = torch.where(attended[:, :, None], logits, -torch.inf)
        pooled = masked.max(1).values.to(dtype)
        pooled = torch.where(attended.any(1)[:, None], pooled, 0.0)
    activations = nnf.relu(pooled).log1p()
    return (activations, pooled) if return_logits else activations


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

    Example:
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
