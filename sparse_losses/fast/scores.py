"""Scores by matrix products, and their gradients; halves are multiplied as halves."""

from collections.abc import Set
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sparse_losses._core.products import HALVES, product
from sparse_losses._core.similarity import finite_rows, half_rows, through_unit_rows_, unit_rows


class Scores(Protocol):
    """Scores of queries with keys, then negatives, over the temperature, and their gradients."""

    def block(self, rows: slice) -> Tensor:
        """Return the scores of some queries ``[c, K + N]``; the caller may overwrite them."""
        ...

    def backward(self, rows: slice, gradient: Tensor) -> None:
        """Add the gradient of those scores, before the temperature; may overwrite it."""
        ...

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients of ``query``, ``key``, ``negative`` and ``temperature``."""
        ...


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


def _as_rows(cosine: bool, *inputs: Tensor) -> list[_Rows]:
    """Return unit rows if ``cosine``; for halves the scaled rows and their norms."""
    if not cosine:
        return [_Rows(x) for x in inputs]
    if inputs[0].dtype in HALVES:
        return [_Rows(*rows) for rows in half_rows(*inputs)]
    return [_Rows(unit, None, inverse) for unit, inverse in map(unit_rows, inputs)]


class DenseScores:
    """``Scores`` by matrix products.

    Args:
        needs: which gradients to compute.
        query: ``[B, D]``.
        key: ``[K, D]``.
        negative: ``[N, D]``, shared by all queries, or ``[B, N, D]``.
        temperature: divisor of the scores.
        cosine: whether to normalise the rows.
        hides_nan: inputs whose rows that are not finite are kept out of the products; only their
            scores are NaN. (The caller may overwrite those; 0 * NaN would reach a gradient.)
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
    ) -> None:
        self.needs, self.temperature, self.num_keys = needs, temperature, len(key)
        self.grad_query: list[Tensor] = []  # one part per block
        self.grad_each: list[Tensor] = []
        self.grad_key: Tensor | None = None
        self.grad_temperature: Tensor | None = None
        self.is_nan: dict[str, Tensor] = {}
        if "query" in hides_nan:
            query, self.is_nan["query"] = finite_rows(query)
        if "key" in hides_nan:
            key, self.is_nan["key"] = finite_rows(key)
        if negative is not None and "negative" in hides_nan:
            negative, self.is_nan["negative"] = finite_rows(negative)
        self.is_shared = negative is None or negative.ndim == 2
        self.each: _Rows | None = None  # the negatives of each query
        if negative is not None and not self.is_shared:
            (self.each,) = _as_rows(cosine, negative)
        elif negative is not None:
            key = torch.cat([key, negative])
        self.query, self.key = _as_rows(cosine, query, key)
        self.back_query, self.back_key, self.back_each = self.query, self.key, self.each
        if needs and query.dtype == torch.float16:
            self.back_query, self.back_key = self.query.single(), self.key.single()
            self.back_each = None if self.each is None else self.each.single()

    def block(self, rows: slice) -> Tensor:
        """Return the scores of some queries."""
        scores, is_nan = self._products(rows), self.is_nan
        if "query" in is_nan:
            scores.masked_fill_(is_nan["query"][rows, None], torch.nan)
        if "key" in is_nan:
            scores[:, : self.num_keys].masked_fill_(is_nan["key"], torch.nan)
        if "negative" in is_nan:
            of_rows = is_nan["negative"] if self.is_shared else is_nan["negative"][rows]
            scores[:, self.num_keys :].masked_fill_(of_rows, torch.nan)
        return scores

    def _products(self, rows: slice) -> Tensor:
        query, keys, t = self.query.values[rows], self.key.values, self.temperature
        scores = _product(query, keys.T)
        if self.key.norm is not None:
            scores.div_(self.key.norm.T)
        if self.each is not None:
            more = product(self.each.values[rows], query.unsqueeze(2)).squeeze(2)
            if self.each.norm is not None:
                more.div_(self.each.norm[rows].squeeze(2))
            scores = torch.cat([scores, more], dim=1)
        elif isinstance(t, float) and t == 1.0 and self.query.norm is None:
            return scores
        return scores.div_(t if self.query.norm is None else self.query.norm[rows] * t)

    def backward(self, rows: slice, gradient: Tensor) -> None:
        """Add the gradients of the rows as they are multiplied."""
        query, keys = self.back_query.values[rows], self.back_key.values
        if self.back_query.norm is not None:
            gradient.div_(self.back_query.norm[rows])
        grad_scores = gradient if self.back_each is None else gradient[:, : len(keys)]
        grad_scores = _as_operand(grad_scores, self.back_key.norm, keys)
        needs_negative = "negative" in self.needs
        if "key" in self.needs or (needs_negative and self.is_shared):
            columns = slice(None) if needs_negative else slice(self.num_keys)
            self.grad_key = _add_product(self.grad_key, grad_scores[:, columns].T, query)
        if self.back_each is not None:
            each, grad_each = self.back_each.values[rows], gradient[:, len(keys) :]
            if self.back_each.norm is not None:
                grad_each = grad_each / self.back_each.norm[rows].squeeze(2)
            if needs_negative:
                self.grad_each.append(grad_each[:, :, None] * query[:, None])
        if self.needs.isdisjoint(("query", "temperature")):
            return
        grad_query = _product(grad_scores, keys)
        if self.back_each is not None:
            grad_query += product(grad_each.to(each.dtype).unsqueeze(1), each).squeeze(1)
        if "temperature" in self.needs:  # sum of gradient times score, without the scores
            along = (grad_query * query).sum() / self.temperature
            before = self.grad_temperature
            self.grad_temperature = -along if before is None else before - along
        if "query" in self.needs:
            self.grad_query.append(grad_query)

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients of the inputs."""
        grad_query, grad_each = _joined(self.grad_query), _joined(self.grad_each)
        grad_key, grad_negative = self.grad_key, None
        if grad_query is not None:
            grad_query = self.back_query.gradient(grad_query)
        if grad_key is not None:
            grad_key = self.back_key.gradient(grad_key)
            grad_key, grad_negative = grad_key.tensor_split([self.num_keys])
        if grad_each is not None and self.back_each is not None:
            grad_negative = self.back_each.gradient(grad_each)
        return {
            "query": grad_query,
            "key": grad_key if "key" in self.needs else None,
            "negative": grad_negative if "negative" in self.needs else None,
            "temperature": self.grad_temperature,
        }


def _as_operand(gradient: Tensor, norm: Tensor | None, keys: Tensor) -> Tensor:
    """Return the gradient ``[c, B]`` divided by the keys' norms, in the dtype of the product."""
    if norm is None:
        return gradient.to(keys.dtype)
    return torch.div(gradient, norm.T, out=torch.empty_like(gradient, dtype=keys.dtype))


def _product(a: Tensor, b: Tensor) -> Tensor:
    return product(a, b) if a.dtype in HALVES else a @ b


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return ``total + a @ b``, in place."""
    if total is None:
        return _product(a, b)
    return total.addmm_(a, b) if b.dtype == total.dtype else total.add_(product(a, b))


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)
