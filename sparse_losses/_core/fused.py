"""Temporary: the old names, until the last loss has moved."""

from sparse_losses._core.own_gradient import can_bring_its_gradient, with_own_gradient
from sparse_losses._core.private_torch import is_batched

__all__ = ["can_fuse", "fuse", "is_batched"]


def can_fuse(*tensors, elements=None):
    return can_bring_its_gradient(*tensors)


def fuse(plain, fused, *tensors, scale_=None):
    return with_own_gradient(plain, fused, *tensors)
