"""InfoNCE with products over the non-zeros of its inputs only."""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.implementations import Implementation
from sparse_losses._core.products import as_single
from sparse_losses.fast.info_nce import (
    info_nce_by,
    nonzeros_unsupported_reason,
    prefers_nonzeros,
)
from sparse_losses.fast.sparse import NonZeros, non_zeros, product, products_by_columns, read_tile


def nonzeros_info_nce(needs: Set[str], **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return value and gradients of InfoNCE by sparse products; all scores are held at once."""
    single = {n: as_single(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}
    return info_nce_by(NonzeroScores, False, needs, **single)


class NonzeroScores:
    """As ``DenseScores``, from non-zeros; the gradient of a CSR input has its pattern."""

    def __init__(
        self,
        needs: Set[str],
        query: Tensor,
        key: Tensor,
        negative: Tensor | None = None,
        *,
        temperature: float | Tensor,
        cosine: bool,
        hides_nan: Set[str],
        own_key: bool = False,
    ) -> None:
        self.needs, self.temperature, self.own_key = needs, temperature, own_key
        self.num_keys = 1 if own_key else len(key)
        self.gradient_dtype = query.dtype
        self.inputs = {"query": query, "key": key}
        if negative is not None:
            self.inputs["negative"] = negative
        self.rows = {name: self._represent(x, cosine) for name, x in self.inputs.items()}
        # Products over non-zeros may skip a NaN, so rows that contain one are marked.
        self.is_nan = {}
        for name, (entries, length) in self.rows.items():
            value, hides = entries.value, name in hides_nan
            # Infinity minus infinity is NaN.
            self.is_nan[name] = self._rows_with_nan(entries, value - value if hides else value)
            if hides:  # a NaN of an excluded row must not reach a gradient
                kept = value.masked_fill(self.is_nan[name][entries.row], 0.0)
                length = (
                    None if length is None else length.masked_fill(self.is_nan[name], torch.inf)
                )
                self.rows[name] = entries._replace(value=kept), length
        self.grads: dict[str, Tensor | None] = dict.fromkeys(("query", "key", "negative"))

    @staticmethod
    def _represent(x: Tensor, cosine: bool) -> tuple[NonZeros, Tensor | None]:
        entries = non_zeros(x)
        if not cosine:
            return entries, None
        rows, value = entries.shape[0], entries.value
        scale = value.new_zeros(rows).scatter_reduce_(0, entries.row, value.abs(), "amax")
        scale = torch.where(scale == 0, 1.0, scale)
        unit = value / scale[entries.row]
        norm = value.new_zeros(rows).index_add_(0, entries.row, unit.square()).sqrt()
        is_zero = norm == 0
        unit = unit / torch.where(is_zero, 1.0, norm)[entries.row]
        return entries._replace(value=unit), torch.where(is_zero, torch.inf, scale * norm)

    @staticmethod
    def _rows_with_nan(entries: NonZeros, value: Tensor) -> Tensor:
        is_nan = value.new_zeros(entries.shape[0], dtype=torch.bool)
        is_nan[entries.row[value.isnan()]] = True
        return is_nan

    def _products(self, name: str) -> Tensor:
        scores = product(self.rows["query"][0], self.rows[name][0])
        is_nan = self.is_nan["query"][:, None] | self.is_nan[name]
        scores = scores.div_(self.temperature).masked_fill_(is_nan, torch.nan)
        return scores.diagonal()[:, None] if self.own_key and name == "key" else scores

    def block(self, rows: slice) -> Tensor:
        """Return all scores."""
        parts = [self._products(name) for name in self.inputs if name != "query"]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def scaled_(self, gradient: Tensor, rows: slice) -> Tensor:
        """Return it: the rows are of norm 1."""
        return gradient

    def backward(self, rows: slice, gradient: Tensor) -> None:
        """Store the gradients of the inputs."""
        of_keys, of_negatives = gradient.tensor_split([self.num_keys], dim=1)
        of_keys = torch.diag(of_keys[:, 0]) if self.own_key else of_keys
        grad_scores = {"key": of_keys, "negative": of_negatives}
        if not self.needs.isdisjoint(("query", "temperature")):
            terms = [(g, name) for name, g in grad_scores.items() if name in self.inputs]
            along = self._gradient("query", terms)
            self.grads["temperature"] = -along
        for name, g in grad_scores.items():
            if name in self.needs:
                self._gradient(name, [(g.T, "query")])

    def _gradient(self, name: str, terms: list[tuple[Tensor, str]]) -> Tensor:
        """Store the gradient of one input, ``sum_k g_k @ x_k``; return minus the temperature's."""
        tensor = self.inputs[name]
        entries, length = self.rows[name]
        dense = torch.empty_like(tensor) if tensor.layout == torch.strided else None
        at_entries = torch.empty_like(entries.value)
        products = [(g, self.rows[other][0]) for g, other in terms]
        for start, stop, tile, here in products_by_columns(products, entries):
            read_tile(at_entries, entries, tile, start, here)
            if dense is not None:
                tile = tile if length is None else tile.div_(length)
                dense[:, start:stop] = tile.T.contiguous()
        along = entries.value.new_zeros(entries.shape[0])
        along.index_add_(0, entries.row, entries.value * at_entries)
        if length is not None:  # remove the part parallel to the row
            at_entries -= entries.value * along[entries.row]
            at_entries /= length[entries.row]
            if dense is not None:
                dense.index_put_((entries.row, entries.column), at_entries)
        if dense is None:
            values = torch.empty_like(at_entries)
            values[entries.original] = at_entries
            dense = torch.sparse_csr_tensor(
                tensor.crow_indices(),
                tensor.col_indices(),
                values,
                tensor.shape,
                check_invariants=False,
            )
        self.grads[name] = dense
        return along.sum() / self.temperature

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients of the inputs."""
        return {name: g if name in self.needs else None for name, g in self.grads.items()}


NONZEROS = Implementation(
    "nonzeros",
    nonzeros_unsupported_reason,
    prefers_nonzeros,
    nonzeros_info_nce,
    purpose="CSR tensors and, on a CPU, many rows of wide inputs with few non-zeros",
)
