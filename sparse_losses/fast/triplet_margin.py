"""Triplet margin loss with its gradients, for cosines and dot products."""

from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.similarity import unit_rows

__all__ = ["direct_triplet_margin"]


def direct_triplet_margin(
    needs: Sequence[bool],
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    margin: float,
    similarity: str,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss of every row ``[B]`` and the gradients of the inputs."""
    inputs: Sequence[Tensor] = (anchor, positive, negative)
    inverses: Sequence[Tensor] | None = None
    if similarity == "cosine":
        inputs, inverses = zip(*map(unit_rows, inputs), strict=True)
    a, p, n = inputs
    is_one = n.ndim == 2
    near = (a * p).sum(-1, keepdim=True)
    far = (a * n).sum(-1, keepdim=True) if is_one else torch.einsum("bd,bnd->bn", a, n)
    hinge = nnf.relu(far - near + margin)
    values = hinge[:, 0] if is_one else hinge.mean(-1)
    if not any(needs):
        return values, [None, None, None]
    # 1 where the hinge is above 0 or NaN, as the slope of `relu`; `sign` of a NaN would be 0.
    slope = torch.ne(hinge, 0.0, out=torch.empty_like(hinge))
    if not is_one:
        slope /= n.shape[1]
    total = slope if is_one else slope.sum(-1, keepdim=True)
    by_anchor = (n - p).mul_(slope) if is_one else torch.einsum("bn,bnd->bd", slope, n) - p * total
    by_positive = a * -total
    by_negative = a * slope if is_one else a[:, None] * slope[:, :, None]
    if inverses is not None:  # subtract the part along the row, from the dot products
        along = (slope * far).sum(-1, keepdim=True)
        by_anchor.addcmul_(a, along - total * near, value=-1.0).mul_(inverses[0])
        by_positive.addcmul_(p, total * near).mul_(inverses[1])
        along = slope * far if is_one else (slope * far)[:, :, None]
        by_negative.addcmul_(n, along, value=-1.0).mul_(inverses[2])
    found = (by_anchor, by_positive, by_negative)
    return values, [g if need else None for g, need in zip(found, needs, strict=True)]
