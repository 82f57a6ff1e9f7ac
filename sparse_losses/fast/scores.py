"""Scores by matrix products, and their gradients.

Halves are multiplied as halves. CSR rows are multiplied all at once, and have a gradient at their
entries alone.
"""

from collections.abc import Mapping, Set
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_losses._core import products
from sparse_losses._core.products import HALVES, scaled
from sparse_losses._core.similarity import finite_rows, half_rows, through_unit_rows_, unit_rows
from sparse_losses.fast.sparse import add_product, product


class _Rows(NamedTuple):
    """Rows of an input ``[..., D]`` as they are multiplied."""

    values: Tensor
    norm: Tensor | None = None  # divisor of the products, for halves with cosine
    inverse: Tensor | None = None  # inverse norms of the input, or for halves the power of two

    def gradient(self, grad_values: Tensor) -> Tensor:
        """Convert, in place, the gradient of ``values`` to that of the input."""
        if self.inverse is None:
            return grad_values
        unit = self.values if self.norm is None else self.values / self.norm
        return through_unit_rows_(grad_values, unit, self.inverse)

    def single(self) -> "_Rows":
        """Return the rows in fp32 for the gradient, as small slopes underflow in fp16."""
        if self.norm is None or self.inverse is None:
            return _Rows(self.values.float())
        return _Rows(self.values / self.norm, None, self.inverse / self.norm)


class Scores:
    """Scores of queries with candidates, over the temperature, and their gradients.

    Args:
        needs: which gradients to compute.
        inputs: by name the queries ``[B, D]``, then candidates: ``[K, D]``, dense or CSR as the
            queries are, or dense ``[B, N, D]``, of each query its own.
        temperature: divisor of the scores.
        cosine: whether to normalise the rows.
        hides_nan: whether only the scores of rows that are not finite are NaN: 0 * NaN would
            otherwise reach the gradient of what the caller masks.
        own_key: whether of the first candidates a query is scored with that of its own row only.
    """

    def __init__(
        self,
        needs: Set[str],
        inputs: Mapping[str, Tensor],
        *,
        temperature: float | Tensor,
        cosine: bool,
        hides_nan: bool = False,
        own_key: bool = False,
    ) -> None:
        self.needs, self.temperature, inputs = needs, temperature, dict(inputs)
        self.query, *self.candidates = inputs
        self.is_sparse = any(x.layout != torch.strided for x in inputs.values())
        # CSR rows cannot be multiplied in pairs: the diagonal of all their products counts.
        self.paired = self.candidates[0] if own_key and not self.is_sparse else None
        self.square = self.candidates[0] if own_key and self.is_sparse else None
        if self.paired is not None:
            inputs[self.paired] = inputs[self.paired][:, None]
        self.is_nan: dict[str, Tensor] = {}
        # A product skips the zeros of CSR rows, which are NaN times NaN.
        if hides_nan or self.is_sparse:
            for name, x in inputs.items():
                inputs[name], self.is_nan[name] = finite_rows(x)
        if not cosine:
            rows = [_Rows(x) for x in inputs.values()]
        elif inputs[self.query].dtype in HALVES:
            rows = [_Rows(*scaled) for scaled in half_rows(*inputs.values())]
        else:
            rows = [_Rows(unit, None, inverse) for unit, inverse in map(unit_rows, inputs.values())]
        self.rows = dict(zip(inputs, rows, strict=True))
        self.sizes = [inputs[name].shape[-2] for name in self.candidates]
        self.sizes[0] = 1 if own_key else self.sizes[0]
        self.back = self.rows
        if needs and inputs[self.query].dtype == torch.float16:
            self.back = {name: rows.single() for name, rows in self.rows.items()}
        self.totals: dict[str, Tensor] = {}  # gradients that all blocks add to
        self.parts: dict[str, list[Tensor]] = {name: [] for name in inputs}  # one for each block

    def block(self, rows: slice) -> Tensor:
        """Return the scores of some queries ``[c, K + N]``; the caller may overwrite them."""
        query = self.rows[self.query]
        parts = [self._products(self._some(query, rows), name, rows) for name in self.candidates]
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if query.norm is not None:
            scores.div_(query.norm[rows] * self.temperature)
        elif not (isinstance(self.temperature, float) and self.temperature == 1.0):
            scores.div_(self.temperature)
        if self.is_nan:
            scores.masked_fill_(self.is_nan[self.query][rows, None], torch.nan)
        return scores

    def _some(self, x: _Rows, rows: slice) -> Tensor:
        is_whole = self.is_sparse or rows == slice(0, len(x.values))
        return x.values if is_whole else x.values[rows]

    def _products(self, query: Tensor, name: str, rows: slice) -> Tensor:
        (values, norm, _), is_nan = self.rows[name], self.is_nan.get(name)
        if values.ndim == 2:
            scores = product(query, values)
            norm = None if norm is None else norm.T
        else:
            scores = products.product(values[rows], query.unsqueeze(2)).squeeze(2)
            norm = None if norm is None else norm[rows].squeeze(2)
            is_nan = None if is_nan is None else is_nan[rows]
        scores = scores if norm is None else scores.div_(norm)
        scores = scores if is_nan is None else scores.masked_fill_(is_nan, torch.nan)
        return scores.diagonal()[:, None] if name == self.square else scores

    def backward(self, rows: slice, gradient: Tensor, factor: float | Tensor = 1.0) -> None:
        """Add the gradient of some scores, times a factor; may overwrite it."""
        back, grad_query = self.back[self.query], None
        if back.norm is not None:
            factor = factor / back.norm[rows]
        # Halves without a norm are scaled as they are rounded, each part by itself.
        is_rounded = back.norm is None and back.values.dtype in HALVES
        if not (is_rounded or (isinstance(factor, float) and factor == 1.0)):
            gradient.mul_(factor)
        query, needs_query = self._some(back, rows), bool(self.needs & {self.query, "temperature"})
        parts = torch.split(gradient, self.sizes, dim=1) if len(self.sizes) > 1 else [gradient]
        for name, part in zip(self.candidates, parts, strict=True):
            values, norm, _ = self.back[name]
            if values.ndim == 2:
                part = torch.diag(part[:, 0]) if name == self.square else part
                if norm is not None:  # one launch for the quotient and its dtype
                    operand = torch.empty_like(part, dtype=values.dtype)
                    part = torch.div(part, norm.T, out=operand)
                elif is_rounded:
                    part = scaled(part, factor, values.dtype)
                if name in self.needs:
                    self.totals[name] = add_product(values, self.totals.get(name), part.T, query)
                if needs_query:
                    grad_query = add_product(query, grad_query, part, values)
                continue
            part = part * factor if is_rounded else part
            part = part if norm is None else part / norm[rows].squeeze(2)
            if name in self.needs:
                self.parts[name].append(part[:, :, None] * query[:, None])
            if needs_query:
                operand = part.to(values.dtype).unsqueeze(1)
                of_query = products.product(operand, values[rows]).squeeze(1)
                grad_query = of_query if grad_query is None else grad_query.add_(of_query)
        if grad_query is None:
            return
        if "temperature" in self.needs:  # sum of gradient times score, without the scores
            is_csr = query.layout != torch.strided
            products_at = grad_query.values() * query.values() if is_csr else grad_query * query
            along = products_at.sum() / self.temperature
            before = self.totals.get("temperature")
            self.totals["temperature"] = -along if before is None else before - along
        if self.query in self.needs:
            self.parts[self.query].append(grad_query)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the inputs and of the temperature, by name."""
        found = self.totals
        for name, parts in self.parts.items():
            if parts:
                found[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        for name in found.keys() - {"temperature"}:
            found[name] = self.back[name].gradient(found[name])
        if self.paired in found:
            found[self.paired] = found[self.paired].squeeze(1)
        return found
