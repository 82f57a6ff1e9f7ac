"""Row normalisation that handles zero, tiny and huge rows."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.entries import entries_of, with_values
from sparse_losses._core.own_gradient import can_bring_its_gradient
from sparse_losses._core.precision import widest_dtype
from sparse_losses._core.products import HALVES, as_single, scaled, scaled_


def normalize(x: Tensor) -> Tensor:
    """L2-normalise the last dimension; a zero row stays zero and has zero gradient."""
    # `F.normalize` divides a zero row by 1e-12, so its gradient there is of size 1e12.
    if can_bring_its_gradient(x) and x.ndim > 1:
        unit: Tensor = _Normalize.apply(x)  # type: ignore[no-untyped-call]
        return unit
    return _normalize(x)


def _normalize(x: Tensor) -> Tensor:
    if x.shape[-1] == 0:
        return x
    wide = widest_dtype(x.device)
    if x.dtype == wide:
        # The scale keeps squares from underflow and overflow; elsewhere the wider dtype does, in
        # one pass less. The direction does not depend on it, so the gradient treats it as a
        # constant. Its bounds keep the reciprocal a normal number.
        tiny = torch.finfo(x.dtype).tiny
        scale = x.detach().abs().amax(-1, keepdim=True).clamp(min=tiny, max=1 / tiny)
        x = x * scale.reciprocal()
    squared_norm = x.to(wide).square().sum(-1, keepdim=True)
    is_zero = squared_norm == 0
    # The inverse norm of a tiny row is beyond the dtype; its root is not.
    root = torch.where(is_zero, 1.0, squared_norm).rsqrt().sqrt()
    root = torch.where(is_zero, 0.0, root).to(x.dtype)
    return x * root * root


def distance(x1: Tensor, x2: Tensor) -> Tensor:
    """Return the Euclidean distance of rows ``[B]``, in a dtype wide enough for its square."""
    if can_bring_its_gradient(x1, x2):
        length: Tensor = _Distance.apply(x1, x2)  # type: ignore[no-untyped-call]
        return length
    return _distance(x1, x2)


def _distance(x1: Tensor, x2: Tensor) -> Tensor:
    wide = widest_dtype(x1.device)
    squares = nnf.mse_loss(x1.to(wide), x2.to(wide), reduction="none").sum(-1)
    is_zero = squares == 0  # where the slope of the root is infinite
    return squares.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def finite_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x [..., D]``, rows that are not finite replaced by 0, and which rows these are."""
    # Infinity minus infinity is NaN, and NaN is true.
    if x.layout != torch.strided:
        entries = entries_of(x)
        is_replaced = entries.sum_rows(len(x), entries.value - entries.value).isnan()
        return with_values(x, entries.value.masked_fill(is_replaced[entries.row], 0.0)), is_replaced
    is_replaced = (x - x).detach().any(-1)
    return x.masked_fill(is_replaced[..., None], 0.0), is_replaced


def unit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return unit rows of ``x [..., D]`` and the inverse norms ``[..., 1]``, 0 for zero rows."""
    if x.layout != torch.strided:
        return _unit_entries(x)
    if x.numel() == 0:
        return as_single(x).clone(), x.new_zeros(*x.shape[:-1], 1)
    if (norm := _cpu_norm(x)) is not None:
        inverse = norm.reciprocal_()
        return x * inverse, inverse
    wide = widest_dtype(x.device)
    if x.dtype != wide:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        inverse = norm.reciprocal_().nan_to_num_(nan=torch.nan, posinf=0.0)
        return scaled(x, inverse, torch.promote_types(x.dtype, torch.float32)), inverse
    # There is no wider dtype: scale by each row's largest magnitude. `abs` would make a copy.
    scale = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    is_zero = scale == 0
    unit = x / torch.where(is_zero, 1.0, scale)
    norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    unit /= torch.where(is_zero, 1.0, norm)
    inverse = (1 / scale / norm).clamp(max=torch.finfo(x.dtype).max)
    return unit, torch.where(is_zero, 0.0, inverse)


def _unit_entries(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return unit rows of a CSR tensor and the inverse norms ``[B, 1]``."""
    entries, size = entries_of(x), len(x)
    value, row = entries.value, entries.row
    scale = value.new_zeros(size).scatter_reduce_(0, row, value.abs(), "amax")
    is_zero = scale == 0
    value = value / torch.where(is_zero, 1.0, scale)[row]
    norm = entries.sum_rows(size, value.square()).sqrt()
    value = value / torch.where(is_zero, 1.0, norm)[row]
    inverse = (1 / scale / norm).clamp(max=torch.finfo(x.dtype).max)
    return with_values(x, value), torch.where(is_zero, 0.0, inverse)[:, None]


def _cpu_norm(x: Tensor) -> Tensor | None:
    """Return norms ``[..., 1]`` where reading is free, a CPU, and no square is out of range."""
    if not x.is_cpu or x.numel() == 0 or x.dtype in HALVES:
        return None
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    low, high = torch.aminmax(norm)
    return norm if low.item() > 1e-15 and high.item() < 1e15 else None


class HalfRows(NamedTuple):
    """Half-precision rows ``[..., D]``, scaled by a power of two to a norm between 0.5 and 1."""

    values: Tensor  # exact, except for numbers that underflow beside the row's largest
    norm: Tensor  # the norm of `values` [..., 1], fp32
    scale: Tensor  # the power of two [..., 1], fp64


def half_rows(*inputs: Tensor) -> list[HalfRows]:
    """Scale rows so that half-precision products of them can be divided by the norms later."""
    shapes = [(*x.shape[:-1], 1) for x in inputs]
    sizes = [math.prod(shape) for shape in shapes]
    length = torch.empty(sum(sizes), dtype=torch.float64, device=inputs[0].device)
    for x, shape, out in zip(inputs, shapes, torch.split(length, sizes), strict=True):
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=length.dtype, out=out.view(shape))
    torch.threshold_(length, 0.0, 1e300)  # the gradient of a zero row is divided by 1e300
    norm, _ = torch.frexp(length)
    scale = norm / length
    rows = []
    parts = zip(
        inputs, shapes, torch.split(norm.float(), sizes), torch.split(scale, sizes), strict=True
    )
    for x, shape, its_norm, its_scale in parts:
        power = its_scale.view(shape)
        rows.append(HalfRows(scaled(x, power, x.dtype), its_norm.view(shape), power))
    return rows


def through_unit_rows_(gradient: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """Convert, in place, the gradient of unit rows to that of the rows before normalisation."""
    if unit.layout != torch.strided:
        (value, row, _), slope = entries_of(unit), gradient.values()
        along = entries_of(unit).sum_rows(len(unit), value * slope)
        return with_values(unit, (slope - value * along[row]) * inverse[row, 0])
    along = (unit * gradient).sum(-1, keepdim=True)
    return gradient.addcmul_(unit, along, value=-1.0).mul_(inverse)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        unit, inverse = unit_rows(x)
        ctx.save_for_backward(x, unit, inverse)
        return unit

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, unit, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            alias = x.view_as(x)  # so that hooks of `x` are not called
            unit = _normalize(as_single(alias))
            return torch.autograd.grad(unit, alias, upstream, create_graph=True)[0]
        along = (unit * upstream).sum(-1, keepdim=True)
        return scaled_(torch.addcmul(upstream, unit, along, value=-1.0), inverse, x.dtype)


class _Distance(torch.autograd.Function):
    """The distance without a copy of the rows in a wider dtype."""

    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor) -> Tensor:
        if x1.dtype in HALVES:  # in fp32, without a copy of the rows
            minus = torch.full((1, 1), -1.0, dtype=torch.float32, device=x1.device)
            difference = torch.addcmul(x1, x2, minus)
        else:
            difference = x1 - x2
        length, wide = _cpu_norm(difference), widest_dtype(x1.device)
        if length is None:
            length = torch.linalg.vector_norm(difference, dim=-1, keepdim=True, dtype=wide)
        if any(ctx.needs_input_grad):  # PyTorch cannot save inference tensors
            x1, x2 = (x.clone() if x.is_inference() else x for x in (x1, x2))
            ctx.save_for_backward(x1, x2, difference, length)
        return length[:, 0].to(wide)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x1, x2, difference, length = ctx.saved_tensors
        if torch.is_grad_enabled():
            aliases = x1.view_as(x1), x2.view_as(x2)
            return torch.autograd.grad(_distance(*aliases), aliases, upstream, create_graph=True)
        slope = upstream[:, None].to(length.dtype) / length
        slope = slope.masked_fill(length == 0, 0.0)
        gradient = scaled(difference, slope, x1.dtype)
        return gradient, -gradient if ctx.needs_input_grad[1] else None
