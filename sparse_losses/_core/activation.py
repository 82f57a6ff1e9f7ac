"""From the largest logit of every text and token to the token's weight."""

from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.checks import check_number, check_shapes

Activation = Literal["relu", "log1p_relu"]


def splade_activation(
    logits: Tensor,
    absent: Tensor | None,
    gate: Tensor | None = None,
    *,
    activation: Activation,
    softcap: float | None,
    threshold: float | Tensor | None,
    return_logits: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the activations and, if requested, the pooled logits after the gate, ``[B, V]``.

    ``logits``, the maxima, may be overwritten. Both results are 0 without a gradient where absent.
    """
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if absent is not None:
        logits = logits.masked_fill_(absent, 0.0)
    if gate is not None:
        # A NaN gate of an absent entry must not reach the gradient: 0 * NaN is NaN.
        gate = gate if absent is None else torch.where(absent, 0.0, gate)
        # A logit of -inf stays -inf at gate 0, where a product is NaN.
        is_forbidden = logits == -torch.inf
        gated = gate * torch.where(is_forbidden, torch.finfo(logits.dtype).min, logits)
        logits = torch.where(is_forbidden & ~gate.isnan(), -torch.inf, gated)
    activations = weights_of(logits, activation, threshold)
    return (activations, logits) if return_logits else activations


def weights_of(logits: Tensor, activation: str, threshold: float | Tensor | None = None) -> Tensor:
    """Return the weights of pooled logits, 0 where these are not above ``threshold``."""
    if threshold is not None:
        if isinstance(threshold, Tensor):
            threshold = threshold.to(logits.dtype)
        logits = torch.where(logits <= threshold, 0.0, logits)  # a NaN stays
    weights = nnf.relu(logits)
    if activation == "identity":
        return weights
    weights = weights.log1p()
    return weights.log1p() if activation == "log1p_relu" else weights


def logits_at(weights: Tensor, activation: str) -> Tensor:
    """Return the pooled logits of weights, 0 for weights of 0."""
    if activation == "identity":
        return weights
    logits = weights.expm1()
    return logits.expm1() if activation == "log1p_relu" else logits


def largest_entries(x: Tensor, count: int) -> Tensor:
    """Return where each row has its ``count`` largest entries, with all that equal the last."""
    return x >= x.topk(min(count, x.shape[-1]), dim=-1).values[..., -1:]


def pruned_weights(
    weights: Tensor,
    threshold: float,
    keep_at_least: int,
    *,
    activation: str,
    counted: Tensor | None = None,
) -> Tensor:
    """Return the weights whose pooled logit is above ``threshold``, 0 in place of the others.

    The ``keep_at_least`` largest of a row, among the dimensions that are ``counted`` (a mask
    ``[V]``), always stay, so that no text becomes empty.
    """
    limit = torch.tensor(threshold, dtype=torch.float64, device="cpu")
    is_kept = ~(weights <= weights_of(limit, activation))  # a NaN stays
    if keep_at_least:
        rivals = weights if counted is None else torch.where(counted, weights, 0.0)
        is_kept = is_kept | largest_entries(rivals, keep_at_least)
    return torch.where(is_kept, weights, 0.0)


def check_threshold(threshold: float | Tensor | None, vocab_size: int) -> None:
    """Raise unless ``threshold`` is ``None``, a finite number or a tensor ``[V]``."""
    if isinstance(threshold, Tensor):
        check_shapes(threshold=(threshold, "V"))
        if len(threshold) != vocab_size:
            raise ValueError(
                f"expected `threshold` of shape [V] with V = {vocab_size}, got "
                f"{list(threshold.shape)}"
            )
    elif threshold is not None:
        check_number("threshold", threshold)
