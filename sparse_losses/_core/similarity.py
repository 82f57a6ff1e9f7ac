"""Row normalisation that survives zero, tiny and huge rows."""

from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.own_gradient import can_bring_its_gradient
from sparse_losses._core.private_torch import is_batched

__all__ = ["normalize", "through_unit_rows_", "unit_rows"]


def normalize(x: Tensor) -> Tensor:
    """L2-normalises the last dimension; a zero row stays zero and has zero gradient.

    ``F.normalize`` divides a zero row by 1e-12, which sends a gradient of 1e12 into it.
    """
    if can_bring_its_gradient(x) and x.ndim > 1:
        unit: Tensor = _Normalize.apply(x)  # type: ignore[no-untyped-call]
        return unit
    return _normalize(x)


def _normalize(x: Tensor) -> Tensor:
    # The direction does not depend on this scale, so it is a constant to the gradient;
    # with it, squares neither underflow nor overflow.
    scale = x.detach().abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(1)
    is_zero = scale == 0
    scaled = x / torch.where(is_zero, 1.0, scale)
    squared_norm = scaled.square().sum(-1, keepdim=True)
    norm = torch.where(is_zero, 1.0, squared_norm).sqrt()
    return torch.where(is_zero, 0.0, scaled / norm)


def unit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of ``x [..., D]`` with unit rows, and their lengths ``[..., 1]``, without a graph.

    A zero row stays zero and has infinite length: what is divided by it is 0.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if x.shape[-1] == 0:
        return x.clone(), torch.full_like(norm, torch.inf)
    # Two passes where squares neither overflow nor vanish; looking costs a CPU nothing.
    if x.device.type == "cpu" and bool(((norm > 1e-15) & (norm < 1e15)).all()):
        return x / norm, norm
    # The largest number of each row, by two reads and no copy; `abs` would make one.
    scale = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    is_zero = scale == 0
    unit = x / torch.where(is_zero, 1.0, scale)
    norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    unit /= torch.where(is_zero, 1.0, norm)
    return unit, torch.where(is_zero, torch.inf, scale * norm)


def through_unit_rows_(
    gradient: Tensor, unit: Tensor, length: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Turns, in place, the gradient of unit rows into that of the rows they came from.

    ``unit`` may come divided by ``scale``.
    """
    step = max((1 << 18) // max(gradient[:1].numel(), 1), 1)  # what it copies stays small
    for start in range(0, gradient.shape[0], step):
        part = slice(start, start + step)
        if scale is None:
            along = (unit[part] * gradient[part]).sum(-1, keepdim=True)
        else:  # one factor on either side: their square may be no number
            along = (unit[part] * scale).mul_(gradient[part]).sum(-1, keepdim=True) * scale
        gradient[part].addcmul_(unit[part], along, value=-1.0).div_(length[part])
    return gradient


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        unit, length = unit_rows(x)
        ctx.save_for_backward(x, unit, length)
        return unit

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, unit, length = ctx.saved_tensors
        if torch.is_grad_enabled():
            alias = x.view_as(x)
            unit = _normalize(alias)
            return torch.autograd.grad(unit, alias, upstream, create_graph=True)[0]
        if is_batched(upstream):
            return (upstream - unit * (unit * upstream).sum(-1, keepdim=True)) / length
        return through_unit_rows_(upstream.clone(), unit, length)
