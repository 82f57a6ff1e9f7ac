"""Row normalisation that survives zero, tiny and huge rows."""

import torch
from torch import Tensor

__all__ = ["normalize"]


def normalize(x: Tensor) -> Tensor:
    """L2-normalises the last dimension; a zero row stays zero and has zero gradient.

    ``F.normalize`` divides a zero row by 1e-12, which sends a gradient of 1e12 into it.
    """
    # The direction does not depend on this scale, so it is a constant to the gradient;
    # with it, squares neither underflow nor overflow.
    scale = x.detach().abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(1)
    is_zero = scale == 0
    scaled = x / torch.where(is_zero, 1.0, scale)
    squared_norm = scaled.square().sum(-1, keepdim=True)
    norm = torch.where(is_zero, 1.0, squared_norm).sqrt()
    return torch.where(is_zero, 0.0, scaled / norm)
