"""Scores by matrix products, and their gradients; halves are multiplied as halves."""

from collections.abc import Set
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_losses._core.products import HALVES, add_product_, product
from sparse_losses._core.similarity import finite_rows, half_rows, through_unit_rows_, unit_rows


class _Rows(NamedTuple):
    """Rows of an input ``[..., D]`` as they are multiplied."""

    values: Tensor
    norm: Tensor | None = None  # divisor of the products, for halves with cosine
    inverse: Tensor | None = None  # inverse norms of the input, or for halves the power of two

    def gradient(self, grad_values: Tensor) -> Tensor:
        """Convert, in place, the gradient of ``values`` to that of the input."""
        if self.inverse is None:
            return grad_values
        rows = slice(len(grad_values))  # without the negatives where these need no gradient
        unit = self.values[rows] if self.norm is None else self.values[rows] / self.norm[rows]
        return through_unit_rows_(grad_values, unit, self.inverse[rows])

    def single(self) -> "_Rows":
        """Return the rows in fp32 for the gradient, as small slopes underflow in fp16."""
        if self.norm is None or self.inverse is None:
            return _Rows(self.values.float())
        return _Rows(self.values / self.norm, None, self.inverse / self.norm)


class DenseScores:
    """Scores of queries with keys, then negatives, over the temperature, and their gradients.

    Args:
        needs: which gradients to compute.
        query: ``[B, D]``.
        key: ``[K, D]``.
        negative: ``[N, D]``, shared by all queries, or ``[B, N, D]``.
        temperature: divisor of the scores.
        cosine: whether to normalise the rows.
        hides_nan: inputs whose rows that are not finite are kept out of the products; only their
            scores are NaN. (The caller may overwrite those; 0 * NaN would reach a gradient.)
        own_key: whether a query has one key, that of its row.
    """

    def __init__(
        self,
        needs: Set[str],
        query: Tensor,
        key: Tensor,
        negative: Tensor | None = None,
        *,
        temperature: float | Tensor,
        cosine: bool,
        hides_nan: Set[str] = frozenset(),
        own_key: bool = False,
    ) -> None:
        self.needs, self.temperature, self.own_key = needs, temperature, own_key
        inputs = {"query": query, "key": key[:, None] if own_key else key}
        if negative is not None:
            inputs["negative"] = negative
        self.is_nan: dict[str, Tensor] = {}
        for name in hides_nan & inputs.keys():
            inputs[name], self.is_nan[name] = finite_rows(inputs[name])
        # What is multiplied at once: candidates that all queries share, and those of each query.
        groups = [
            [n for n in ("key", "negative") if n in inputs and inputs[n].ndim == d] for d in (2, 3)
        ]
        self.groups = [group for group in groups if group]
        self.groups.sort(key=lambda group: "key" not in group)
        self.sizes = {name: inputs[name].shape[-2] for name in inputs.keys() - {"query"}}
        merged = [
            torch.cat([inputs[n] for n in g], -2) if g[1:] else inputs[g[0]] for g in self.groups
        ]
        self.query, *self.candidates = _as_rows(cosine, inputs["query"], *merged)
        self.back_query, self.back = self.query, self.candidates
        if needs and query.dtype == torch.float16:
            self.back_query, self.back = self.query.single(), [x.single() for x in self.candidates]
        self.grad_query: list[Tensor] = []  # one part per block
        self.grad_shared: Tensor | None = None
        self.grad_each: list[Tensor] = []
        self.grad_temperature: Tensor | None = None

    def block(self, rows: slice) -> Tensor:
        """Return the scores of some queries ``[c, K + N]``; the caller may overwrite them."""
        parts = [self._products(self.query.values[rows], x, rows) for x in self.candidates]
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self.query.norm is not None:
            scores.div_(self.query.norm[rows] * self.temperature)
        elif not (isinstance(self.temperature, float) and self.temperature == 1.0):
            scores.div_(self.temperature)
        for name, is_nan in self.is_nan.items():
            if name == "query":
                scores.masked_fill_(is_nan[rows, None], torch.nan)
            else:
                of_rows = is_nan if is_nan.ndim == 1 else is_nan[rows]
                columns = (
                    slice(self.sizes["key"]) if name == "key" else slice(self.sizes["key"], None)
                )
                scores[:, columns].masked_fill_(of_rows, torch.nan)
        return scores

    @staticmethod
    def _products(query: Tensor, candidates: _Rows, rows: slice) -> Tensor:
        values, norm, _ = candidates
        if values.ndim == 2:
            scores = product(query, values.T)
            return scores if norm is None else scores.div_(norm.T)
        scores = product(values[rows], query.unsqueeze(2)).squeeze(2)
        return scores if norm is None else scores.div_(norm[rows].squeeze(2))

    def scaled_(self, gradient: Tensor, rows: slice) -> Tensor:
        """Divide a gradient of scores, or a factor of it ``[c, 1]``, by the queries' norms."""
        norm = self.back_query.norm
        return gradient if norm is None else gradient.div_(norm[rows])

    def backward(self, rows: slice, gradient: Tensor) -> None:
        """Add the gradient, scaled, of some scores before the temperature; may overwrite it."""
        query = self.back_query.values[rows]
        needs_query = not self.needs.isdisjoint(("query", "temperature"))
        terms, start = [], 0
        for group, (values, norm, _) in zip(self.groups, self.back, strict=True):
            stop = start + sum(self.sizes[name] for name in group)
            part = gradient if len(self.groups) == 1 else gradient[:, start:stop]
            start = stop
            is_needed = not self.needs.isdisjoint(group)
            if values.ndim == 2:
                part = _as_operand(part, None if norm is None else norm.T, values.dtype)
                if is_needed:  # the negatives come last
                    width = part.shape[1] if group[-1] in self.needs else self.sizes["key"]
                    self.grad_shared = add_product_(self.grad_shared, part[:, :width].T, query)
                terms += [product(part, values)] if needs_query else []
            else:
                part = part if norm is None else part / norm[rows].squeeze(2)
                if is_needed:
                    self.grad_each.append(part[:, :, None] * query[:, None])
                part = part.to(values.dtype).unsqueeze(1)
                terms += [product(part, values[rows]).squeeze(1)] if needs_query else []
        if not needs_query:
            return
        grad_query = terms[0] if len(terms) == 1 else terms[0].add_(terms[1])
        if "temperature" in self.needs:  # sum of gradient times score, without the scores
            along = (grad_query * query).sum() / self.temperature
            before = self.grad_temperature
            self.grad_temperature = -along if before is None else before - along
        if "query" in self.needs:
            self.grad_query.append(grad_query)

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients of the inputs and of the temperature, by name."""
        found: dict[str, Tensor | None] = {"temperature": self.grad_temperature}
        if (total := _joined(self.grad_query)) is not None:
            found["query"] = self.back_query.gradient(total)
        for group, rows in zip(self.groups, self.back, strict=True):
            total = self.grad_shared if rows.values.ndim == 2 else _joined(self.grad_each)
            if total is not None:
                gradient, start = rows.gradient(total), 0
                for name in group if total.shape[-2] > self.sizes[group[0]] else group[:1]:
                    found[name] = gradient.narrow(-2, start, self.sizes[name])
                    start += self.sizes[name]
        if self.own_key and (of_keys := found.get("key")) is not None:
            found["key"] = of_keys.squeeze(1)
        return {name: gradient for name, gradient in found.items() if name in self.needs}


def _as_rows(cosine: bool, *inputs: Tensor) -> list[_Rows]:
    """Return unit rows if ``cosine``; for halves the scaled rows and their norms."""
    if not cosine:
        return [_Rows(x) for x in inputs]
    if inputs[0].dtype in HALVES:
        return [_Rows(*rows) for rows in half_rows(*inputs)]
    return [_Rows(unit, None, inverse) for unit, inverse in map(unit_rows, inputs)]


def _as_operand(gradient: Tensor, norm: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the gradient ``[c, K]`` divided by the keys' norms, in the dtype of the product."""
    if norm is None:
        return gradient.to(dtype)
    return torch.div(gradient, norm, out=torch.empty_like(gradient, dtype=dtype))


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)
