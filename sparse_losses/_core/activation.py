"""What is left of SPLADE once the largest score of every text and token is known."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

__all__ = ["gated_logits", "splade_activation"]


def splade_activation(
    highest: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    absent: Tensor | None,
    return_logits: bool,
) -> tuple[Tensor, Tensor | None]:
    """``log(1 + relu(gate * (highest + bias)))`` of ``highest [B, V]``, and if asked its argument.

    Both are 0, without a gradient, where ``absent`` (a mask that broadcasts) is true. ``highest``
    may be overwritten.
    """
    logits = highest if bias is None else highest + bias
    if absent is not None:
        logits = logits.masked_fill_(absent, 0.0)
    if gate is None:
        return nnf.relu(logits).log1p(), logits
    if absent is not None:
        # A gate that nothing passes must not send its NaN into the gradient: 0 * NaN is NaN.
        gate = torch.where(absent, 0.0, gate)
    gated = gated_logits(logits, gate)
    return nnf.relu(gated).log1p(), gated if return_logits else None


def gated_logits(logits: Tensor, gate: Tensor) -> Tensor:
    """``gate * logits``; a forbidden token, whose logit is -inf, stays so at any gate.

    0 times -inf is NaN, in the value and in the gradient of the gate.
    """
    is_forbidden = logits == -torch.inf
    gated = gate * torch.where(is_forbidden, torch.finfo(logits.dtype).min, logits)
    return torch.where(is_forbidden & ~gate.isnan(), -torch.inf, gated)
