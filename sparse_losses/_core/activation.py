"""What is left of SPLADE once the largest score of every text and token is known."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

__all__ = ["splade_activation"]


def splade_activation(
    highest: Tensor, bias: Tensor | None, gate: Tensor | None, is_there: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``log(1 + relu(gate * (highest + bias)))`` of ``highest [B, V]``, and its argument.

    Both are 0, without a gradient, where ``is_there`` (a mask that broadcasts) is false.
    """
    logits = highest if bias is None else highest + bias
    if is_there is not None:
        logits = torch.where(is_there, logits, 0.0)
        # A gate that nothing passes must not send its NaN into the gradient: 0 * NaN is NaN.
        gate = None if gate is None else torch.where(is_there, gate, 0.0)
    if gate is None:
        return nnf.relu(logits).log1p(), logits
    # The gate is not negative, and so may come after relu: 0 times a forbidden -inf is NaN.
    return (gate * nnf.relu(logits)).log1p(), gate * logits
