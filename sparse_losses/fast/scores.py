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
        unit = self.values if self.norm is None else self.values / self.norm
        return through_unit_rows_(grad_values, unit, self.inverse)

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
        self.rows = dict(zip(inputs, _as_rows(cosine, *inputs.values()), strict=True))
        self.candidates = [name for name in inputs if name != "query"]
        self.sizes = [inputs[name].shape[-2] for name in self.candidates]
        self.back = self.rows
        if needs and query.dtype == torch.float16:
            self.back = {name: rows.single() for name, rows in self.rows.items()}
        self.totals: dict[str, Tensor] = {}  # gradients that all blocks add to
        self.parts: dict[str, list[Tensor]] = {name: [] for name in inputs}  # one for each block

    def block(self, rows: slice) -> Tensor:
        """Return the scores of some queries ``[c, K + N]``; the caller may overwrite them."""
        query = self.rows["query"]
        parts = [self._products(query.values[rows], name, rows) for name in self.candidates]
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if query.norm is not None:
            scores.div_(query.norm[rows] * self.temperature)
        elif not (isinstance(self.temperature, float) and self.temperature == 1.0):
            scores.div_(self.temperature)
        if "query" in self.is_nan:
            scores.masked_fill_(self.is_nan["query"][rows, None], torch.nan)
        return scores

    def _products(self, query: Tensor, name: str, rows: slice) -> Tensor:
        (values, norm, _), is_nan = self.rows[name], self.is_nan.get(name)
        if values.ndim == 2:
            scores = product(query, values.T)
            norm = None if norm is None else norm.T
        else:
            scores = product(values[rows], query.unsqueeze(2)).squeeze(2)
            norm = None if norm is None else norm[rows].squeeze(2)
            is_nan = None if is_nan is None else is_nan[rows]
        scores = scores if norm is None else scores.div_(norm)
        return scores if is_nan is None else scores.masked_fill_(is_nan, torch.nan)

    def scaled_(self, gradient: Tensor, rows: slice) -> Tensor:
        """Divide a gradient of scores by the queries' norms."""
        norm = self.back["query"].norm
        return gradient if norm is None else gradient.div_(norm[rows])

    def backward(self, rows: slice, gradient: Tensor) -> None:
        """Add the gradient, scaled, of some scores before the temperature; may overwrite it."""
        query, grad_query = self.back["query"].values[rows], None
        needs_query = not self.needs.isdisjoint(("query", "temperature"))
        parts = gradient.split(self.sizes, dim=1) if len(self.sizes) > 1 else [gradient]
        for name, part in zip(self.candidates, parts, strict=True):
            values, norm, _ = self.back[name]
            if values.ndim == 2:
                part = _as_operand(part, None if norm is None else norm.T, values.dtype)
                if name in self.needs:
                    self.totals[name] = add_product_(self.totals.get(name), part.T, query)
                if needs_query:
                    grad_query = add_product_(grad_query, part, values)
                continue
            part = part if norm is None else part / norm[rows].squeeze(2)
            if name in self.needs:
                self.parts[name].append(part[:, :, None] * query[:, None])
            if needs_query:
                of_query = product(part.to(values.dtype).unsqueeze(1), values[rows]).squeeze(1)
                grad_query = of_query if grad_query is None else grad_query.add_(of_query)
        if grad_query is None:
            return
        if "temperature" in self.needs:  # sum of gradient times score, without the scores
            along = (grad_query * query).sum() / self.temperature
            before = self.totals.get("temperature")
            self.totals["temperature"] = -along if before is None else before - along
        if "query" in self.needs:
            self.parts["query"].append(grad_query)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the inputs and of the temperature, by name."""
        found = self.totals
        for name, parts in self.parts.items():
            if parts:
                found[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        for name in found.keys() - {"temperature"}:
            found[name] = self.back[name].gradient(found[name])
        if self.own_key and "key" in found:
            found["key"] = found["key"].squeeze(1)
        return found


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
