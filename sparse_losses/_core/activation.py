"""What is left of SPLADE once the largest score of every text and token is known."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

__all__ = ["splade_activation"]


def splade_activation(
    highest: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    is_there: Tensor | None,
    return_logits: bool,
) -> tuple[Tensor, Tensor | None]:
    """``log(1 + relu(gate * (highest + bias)))`` of ``highest [B, V]``, and if asked its argument.

    Both are 0, without a gradient, where ``is_there`` (a mask that broadcasts) is false.
    """
    logits = highest if bias is None else highest + bias
    if is_there is not None:
        logits = torch.where(is_there, logits, 0.0)
    if gate is None:
        return nnf.relu(logits).log1p(), logits
    if is_there is not None:
        # A gate that nothing passes must not send its NaN into the gradient: 0 * NaN is NaN.
        gate = torch.where(is_there, gate, 0.0)
    # So is 0 times the -inf of a forbidden token.
    finite = logits.clamp(min=torch.finfo(logits.dtype).min)
    activations = nnf.relu(gate * finite).log1p()
    return activations, gate * logits if return_logits else None
