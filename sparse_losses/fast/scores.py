"""Scores by matrix products, and their gradients; halves are multiplied as halves."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_losses._core.own_gradient import can_bring_its_gradient
from sparse_losses._core.precision import autocast_off, compute_dtype
from sparse_losses._core.private_torch import is_batched
from sparse_losses._core.products import HALVES, product, returns_fp32
from sparse_losses._core.similarity import half_rows, normalize, through_unit_rows_, unit_rows

__all__ = ["DenseScores", "Side", "candidate_scores", "sides"]


class Side(NamedTuple):
    """Rows of an input ``[..., D]`` as they are multiplied."""

    values: Tensor
    norm: Tensor | None  # divisor of the products, for halves with cosine
    inverse: Tensor | None  # inverse norms of the input rows, or for halves the power of two

    def gradient(self, by_values: Tensor, rows: slice | None = None) -> Tensor:
        """Convert, in place, the gradient of ``values`` to that of the input rows."""
        if self.inverse is None:
            return by_values
        rows = rows or slice(None)
        unit = self.values[rows]
        if self.norm is not None:
            unit = unit / self.norm[rows]
        return through_unit_rows_(by_values, unit, self.inverse[rows])

    def single(self) -> "Side":
        """Return the side in fp32 for the gradient, as small slopes underflow in fp16."""
        if self.norm is None or self.inverse is None:
            return Side(self.values.float(), None, None)
        return Side(self.values / self.norm, None, self.inverse / self.norm)


def sides(cosine: bool, *inputs: Tensor) -> list[Side]:
    """Return unit rows if ``cosine``; for halves the scaled rows and their norms."""
    if not cosine:
        return [Side(x, None, None) for x in inputs]
    if inputs[0].dtype in HALVES:
        return [Side(*rows) for rows in half_rows(*inputs)]
    return [Side(unit, None, inverse) for unit, inverse in map(unit_rows, inputs)]


class DenseScores:
    """Scores by matrix products, and their gradients."""

    def __init__(
        self,
        needs: Sequence[bool],
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor | None,
        temperature: float | Tensor,
        cosine: bool,
        hides: bool,
    ) -> None:
        self.needs, self.temperature = needs, temperature
        self.num_positives = positive.shape[0]
        self.is_shared = negative is None or negative.ndim == 2
        self.is_nan = None
        if hides:  # a NaN of an excluded key must not reach a product
            self.is_nan = positive.isnan().any(1)
            positive = torch.where(self.is_nan[:, None], 0.0, positive)
        self.each: Side | None = None  # the negatives of each anchor
        if negative is not None and not self.is_shared:
            (self.each,) = sides(cosine, negative)
        elif negative is not None:
            positive = torch.cat([positive, negative])
        self.query, self.key = sides(cosine, anchor, positive)
        self.back_query, self.back_key, self.back_each = self.query, self.key, self.each
        if any(needs) and anchor.dtype == torch.float16:
            self.back_query, self.back_key = self.query.single(), self.key.single()
            self.back_each = None if self.each is None else self.each.single()
        self.begin()

    def begin(self) -> None:
        """Reset the gradients."""
        self.grad_query: list[Tensor] = []  # one part per block
        self.grad_each: list[Tensor] = []
        self.grad_key: Tensor | None = None
        self.grad_temperature: Tensor | None = None

    def block(self, rows: slice) -> Tensor:
        """Return the scores of some anchors, divided by the temperature ``[c, B + N]``."""
        query, keys, t = _part(self.query.values, rows), self.key.values, self.temperature
        if self.each is None and isinstance(t, float) and t != 1.0 and query.dtype not in HALVES:
            scores = query.new_empty(query.shape[0], keys.shape[0])
            scores.addmm_(query, keys.T, beta=0, alpha=1 / t)  # divides in the same pass
            t = 1.0
        else:
            scores = product(query, keys.T)
        if self.key.norm is not None:
            scores.div_(self.key.norm.T)
        if self.is_nan is not None:
            scores[:, : self.num_positives].masked_fill_(self.is_nan, torch.nan)
        if self.each is not None:
            more = product(self.each.values[rows], query.unsqueeze(2)).squeeze(2)
            if self.each.norm is not None:
                more.div_(self.each.norm[rows].squeeze(2))
            scores = torch.cat([scores, more], dim=1)
        elif isinstance(t, float) and t == 1.0 and self.query.norm is None:
            return scores
        return scores.div_(t if self.query.norm is None else self.query.norm[rows] * t)

    def back(self, rows: slice, gradient: Tensor) -> None:
        """Add the scores' gradient times the temperature; overwrites ``gradient``."""
        query, keys = _part(self.back_query.values, rows), self.back_key.values
        if self.back_query.norm is not None:
            gradient.div_(self.back_query.norm[rows])
        num_keys = keys.shape[0]
        by_keys = gradient if self.back_each is None else gradient[:, :num_keys]
        by_keys = _as_operand(by_keys, self.back_key.norm, keys)
        if self.needs[1] or (self.needs[2] and self.is_shared):
            is_whole = self.needs[2] or num_keys == self.num_positives
            asked = by_keys if is_whole else by_keys[:, : self.num_positives]
            self.grad_key = _add_product(self.grad_key, asked.T, query)
        if self.back_each is not None:
            each, by_each = self.back_each.values[rows], gradient[:, num_keys:]
            if self.back_each.norm is not None:
                by_each = by_each / self.back_each.norm[rows].squeeze(2)
            if self.needs[2]:
                self.grad_each.append(by_each[:, :, None] * query[:, None])
        if not (self.needs[0] or self.needs[3]):
            return
        by_query = product(by_keys, keys)
        if self.back_each is not None:
            by_query += product(by_each.to(each.dtype).unsqueeze(1), each).squeeze(1)
        if self.needs[3]:  # sum of gradient times score, without the scores
            along = (by_query * query).sum() / self.temperature
            before = self.grad_temperature
            self.grad_temperature = -along if before is None else before - along
        if self.needs[0]:
            self.grad_query.append(self.back_query.gradient(by_query, rows))

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of anchor, positive, negative and temperature."""
        grad_negative = None
        grad_key = self.grad_key
        if grad_key is not None:
            grad_key = self.back_key.gradient(grad_key, slice(grad_key.shape[0]))
        if grad_key is not None and grad_key.shape[0] > self.num_positives:
            grad_key, grad_negative = grad_key.tensor_split([self.num_positives])
        elif self.back_each is not None:
            grad_negative = _joined(self.grad_each)
            if grad_negative is not None:
                grad_negative = self.back_each.gradient(grad_negative)
        return [_joined(self.grad_query), grad_key, grad_negative, self.grad_temperature]


def _part(values: Tensor, rows: slice) -> Tensor:
    """Return ``values[rows]``; without a view for all rows, as a view costs more than the test."""
    return values if rows.stop - rows.start == values.shape[0] else values[rows]


def _as_operand(gradient: Tensor, norm: Tensor | None, keys: Tensor) -> Tensor:
    """Return the gradient ``[c, B]`` divided by the keys' norms, in the dtype of the product."""
    if norm is None:
        return gradient.to(keys.dtype)
    return torch.div(gradient, norm.T, out=torch.empty_like(gradient, dtype=keys.dtype))


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return ``total + a @ b``, in place."""
    if total is None:
        return product(a, b)
    return total.addmm_(a, b) if b.dtype == total.dtype else total.add_(product(a, b))


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)


def candidate_scores(
    query: Tensor, key: Tensor, negative: Tensor | None, *, cosine: bool
) -> Tensor:
    """Return scores ``[B, C]`` of each query with all keys, then the negatives; differentiable.

    Negatives are ``[N, D]``, shared by all queries, or ``[B, N, D]``, ``N`` for each query.
    """
    inputs = [x for x in (query, key, negative) if x is not None]
    dtype = query.dtype
    if (
        all(x.dtype == dtype for x in inputs)
        and can_bring_its_gradient(*inputs)
        and returns_fp32(query.device, dtype)
    ):
        # `Function.apply` is untyped in PyTorch.
        scores: Tensor = _Scores.apply(query, key, negative, cosine)  # type: ignore[no-untyped-call]
        return scores
    return _definition(query, key, negative, cosine)


def _definition(query: Tensor, key: Tensor, negative: Tensor | None, cosine: bool) -> Tensor:
    given = {"query": query, "key": key, "negative": negative}
    dtype = compute_dtype(**given)
    single = [x.to(dtype) for x in given.values() if x is not None]
    if cosine:
        unit = normalize(single[0])
        single = [unit, *(unit if x is single[0] else normalize(x) for x in single[1:])]
    query, key, *others = single
    scores = [query @ key.T]
    for other in others:
        is_shared = other.ndim == 2
        scores.append(query @ other.T if is_shared else torch.einsum("bd,bnd->bn", query, other))
    return torch.cat(scores, dim=1) if others else scores[0]


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, negative: Tensor | None, cosine: bool
    ) -> Tensor:
        ctx.save_for_backward(query, key, negative)
        ctx.cosine, needs = cosine, (*ctx.needs_input_grad[:3], False)
        ctx.way = DenseScores(needs, query, key, negative, 1.0, cosine, False)
        scores: Tensor = ctx.way.block(slice(0, len(query)))
        return scores

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        inputs: tuple[Any, ...] = ctx.saved_tensors
        with autocast_off(upstream.device):
            if torch.is_grad_enabled() or is_batched(upstream):
                with torch.enable_grad():
                    aliases: list[Any] = [None if x is None else x.view_as(x) for x in inputs]
                    query, key, negative = aliases
                    value = _definition(query, key, negative, ctx.cosine)
                wanted = [x for x in aliases if x is not None and x.requires_grad]
                found = iter(torch.autograd.grad(value, wanted, upstream, create_graph=True))
                needs = ctx.needs_input_grad[:3]
                return *(next(found) if need else None for need in needs), None
            ctx.way.begin()
            ctx.way.back(slice(0, len(inputs[0])), upstream.clone())
            gradients = ctx.way.gradients()[:3]
            return *(None if g is None else g.to(inputs[0].dtype) for g in gradients), None
