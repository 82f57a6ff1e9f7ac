"""SPLADE pooling: from vocabulary logits at every position to one sparse vector per text."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.activation import Activation, check_threshold, splade_activation
from sparse_losses._core.implementations import Arguments, Implementation, choose
from sparse_losses._core.loss import loss
from sparse_losses._core.precision import compute_dtype
from sparse_losses.fast.pooling import nonzeros_pool, prefers_nonzeros


@loss(logits="B S V, uncast", attention_mask="B S, mask", softcap="> 0")
def splade_pool(
    logits: Tensor,
    attention_mask: Tensor,
    *,
    activation: Activation = "relu",
    softcap: float | None = None,
    threshold: float | Tensor | None = None,
    return_logits: bool = False,
    impl: Literal["auto", "definition", "nonzeros"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""SPLADE max pooling.

    $$x_{ij} = \max_{s \,:\, m_{is} = 1} \log\bigl(1 + \mathrm{ReLU}(h_{isj})\bigr)$$

    Here $h$ are the logits of a masked language model. The activation is monotone, so the maximum
    is taken first and the logarithm of ``[B, V]`` numbers only, not of ``[B, S, V]``.

    Args:
        logits: ``[B, S, V]`` floating.
        attention_mask: ``[B, S]`` bool, int or float 0/1; masked positions are ignored.
        activation: as in ``splade_head``, like ``softcap`` and ``threshold``.
        softcap: for logits that the model has not capped itself.
        threshold: a number or ``[V]``.
        return_logits: also return the maximum itself, signed, for losses that must reach inactive
            tokens.
        impl: ``"definition"`` is the formula. ``"nonzeros"``, on the CPU only, has its own gradient
            at active entries. ``"auto"`` takes it on the CPU, unless there are few logits, or texts
            are short and activate half of the vocabulary.

    Returns:
        Activations ``[B, V]`` >= 0, fp32 (fp64 for fp64 logits); with ``return_logits`` a pair with
        the signed pooled logits. Rows without any attended position are 0 in both and have no
        gradient.

    Raises:
        ValueError: for wrong shapes or devices, or an ``impl`` that cannot take the call.
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
    check_threshold(threshold, logits.shape[-1])
    arguments: dict[str, Any] = {"logits": logits, "attended": attention_mask}
    arguments.update({"dtype": compute_dtype(logits=logits), "return_logits": return_logits})
    chosen = choose(IMPLEMENTATIONS, impl, arguments)
    compute: Callable[..., Any] = _definition if chosen is None else chosen.compute
    options: Any = {"activation": activation, "softcap": softcap, "threshold": threshold}
    return splade_activation(*compute(**arguments), return_logits=return_logits, **options)


def _definition(
    logits: Tensor, attended: Tensor, *, dtype: torch.dtype, return_logits: bool
) -> tuple[Tensor, Tensor]:
    if logits.shape[1] == 0:
        highest = logits.sum(1)
    else:
        highest = torch.where(attended[:, :, None], logits, -torch.inf).max(1).values
    absent = attended.logical_not().all(1, keepdim=True)
    # The maximum is exact in half precision, so only the [B, V] result is cast.
    return highest.to(dtype), absent


def _nonzeros_unsupported_reason(arguments: Arguments) -> str | None:
    device = arguments["logits"].device
    return None if device.type == "cpu" else f"logits on the CPU, got {device},"


IMPLEMENTATIONS = (
    Implementation("nonzeros", _nonzeros_unsupported_reason, prefers_nonzeros, nonzeros_pool),
)


@loss(logits="B S V, uncast", attention_mask="B S, mask")
def token_weights(logits: Tensor, attention_mask: Tensor) -> Tensor:
    r"""The activation of the strongest token at each position of a text.

    $$w_{is} = m_{is} \, \max_j \log\bigl(1 + \mathrm{ReLU}(h_{isj})\bigr)$$

    Args:
        logits: ``[B, S, V]`` floating, ``h``.
        attention_mask: ``[B, S]`` bool, int or float 0/1.

    Returns:
        ``[B, S]`` >= 0, fp32 (fp64 for fp64 logits), 0 at masked positions.

    Raises:
        ValueError: for wrong shapes or devices, or V = 0.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import token_weights
        >>> logits = torch.tensor([[[0.0, 1.0], [2.0, -1.0], [9.0, 9.0]]])
        >>> token_weights(logits, torch.tensor([[1, 1, 0]]))
        tensor([[0.6931, 1.0986, 0.0000]])
    """
    if logits.shape[-1] == 0:
        raise ValueError(f"expected `logits` with V >= 1, got {list(logits.shape)}")
    strongest = logits.max(-1).values.to(compute_dtype(logits=logits))
    return nnf.relu(torch.where(attention_mask, strongest, 0.0)).log1p()
