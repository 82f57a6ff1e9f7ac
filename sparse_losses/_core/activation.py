"""The SPLADE activation of the maximal logit of every text and token."""

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
    """Return ``log(1 + relu(gate * (highest + bias)))`` and, if requested, the argument of relu.

    ``highest`` is ``[B, V]`` and may be overwritten. Both results are 0 and have no gradient where
    ``absent``, a mask that broadcasts to ``[B, V]``, is true.
    """
    logits = highest if bias is None else highest + bias
    if absent is not None:
        logits = logits.masked_fill_(absent, 0.0)
    if gate is None:
        return nnf.relu(logits).log1p(), logits
    if absent is not None:
        # A NaN gate of an absent entry must not reach the gradient: 0 * NaN is NaN.
        gate = torch.where(absent, 0.0, gate)
    gated = gated_logits(logits, gate)
    return nnf.relu(gated).log1p(), gated if return_logits else None


def gated_logits(logits: Tensor, gate: Tensor) -> Tensor:
    """Return ``gate * logits``, where a forbidden token (logit -inf) stays -inf at any gate.

    A plain product would be NaN at gate 0, in the value and in the gradient of the gate.
    """
    is_forbidden = logits == -torch.inf
    gated = gate * torch.where(is_forbidden, torch.finfo(logits.dtype).min, logits)
    return torch.where(is_forbidden & ~gate.isnan(), -torch.inf, gated)
