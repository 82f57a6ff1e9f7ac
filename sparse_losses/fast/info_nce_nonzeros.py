"""InfoNCE of CSR tensors: their gradient is computed at their entries alone."""

from collections.abc import Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_losses._core.candidates import Call
from sparse_losses._core.entries import entries_of
from sparse_losses._core.implementations import Arguments, Implementation
from sparse_losses._core.products import as_single
from sparse_losses._core.similarity import finite_rows, through_unit_rows_, unit_rows
from sparse_losses.fast.info_nce import own_gradient_unsupported_reason, value_and_gradients
from sparse_losses.fast.sparse import add_products, product, with_values


def nonzeros_unsupported_reason(arguments: Arguments) -> str | None:
    """Return why sparse products do not support the call, or ``None``."""
    if arguments["negative"] is not None and arguments["negative"].ndim == 3:
        return "no negatives per row"
    if arguments["anchor"].device.type == "meta":
        return "tensors with values"
    return own_gradient_unsupported_reason(arguments)


def prefers_nonzeros(arguments: Arguments) -> bool:
    """Whether an input is CSR."""
    inputs = (arguments["anchor"], arguments["positive"], arguments["negative"])
    return any(x is not None and x.layout != torch.strided for x in inputs)


def nonzeros_info_nce(needs: Set[str], **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return value and gradients of InfoNCE by sparse products; all scores are held at once."""
    single = {n: as_single(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}
    call = Call(**single)
    return value_and_gradients(needs, call, NonzeroScores, len(call.anchor))


class NonzeroScores:
    """As ``DenseScores``, of CSR and dense rows; the gradient of a CSR input has its pattern."""

    def __init__(
        self,
        needs: Set[str],
        query: Tensor,
        key: Tensor,
        negative: Tensor | None = None,
        *,
        temperature: float | Tensor,
        cosine: bool,
        hides_nan: Set[str],  # here all are hidden until the scores are there
        own_key: bool = False,
    ) -> None:
        self.needs, self.temperature, self.own_key = needs, temperature, own_key
        self.num_keys = 1 if own_key else len(key)
        inputs = {"query": query, "key": key, "negative": negative}
        self.rows = {n: _Rows.of(x, cosine) for n, x in inputs.items() if x is not None}
        self.grads: dict[str, Tensor] = {}

    def block(self, rows: slice) -> Tensor:
        """Return all scores."""
        parts = [self._products(name) for name in self.rows if name != "query"]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _products(self, name: str) -> Tensor:
        query, rows = self.rows["query"], self.rows[name]
        scores = product(query.matrix, rows.matrix).div_(self.temperature)
        # Products skip the zeros of CSR rows, which are NaN times NaN.
        scores.masked_fill_(query.is_nan[:, None] | rows.is_nan, torch.nan)
        return scores.diagonal()[:, None] if self.own_key and name == "key" else scores

    def scaled_(self, gradient: Tensor, rows: slice) -> Tensor:
        """Return it: the rows are of norm 1."""
        return gradient

    def backward(self, rows: slice, gradient: Tensor) -> None:
        """Store the gradients of the inputs."""
        of_keys, of_negatives = gradient.tensor_split([self.num_keys], dim=1)
        of_keys = torch.diag(of_keys[:, 0]) if self.own_key else of_keys
        terms = {"key": of_keys, "negative": of_negatives}
        query = self.rows["query"]
        if not self.needs.isdisjoint(("query", "temperature")):
            present = [
                (g, self.rows[name].matrix) for name, g in terms.items() if name in self.rows
            ]
            self.grads["query"], along = query.gradient(present)
            self.grads["temperature"] = along / -self.temperature
        for name in self.needs & self.rows.keys() - {"query"}:
            self.grads[name], _ = self.rows[name].gradient([(terms[name].T, query.matrix)])

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the inputs."""
        return {name: g for name, g in self.grads.items() if name in self.needs}


class _Rows(NamedTuple):
    """Rows as they are multiplied, dense or CSR: without NaN, and of length 1 for the cosine."""

    matrix: Tensor
    inverse: Tensor | None  # inverse lengths of the input's rows [R, 1], 0 for a row of zeros
    is_nan: Tensor

    @classmethod
    def of(cls, x: Tensor, cosine: bool) -> "_Rows":
        if x.layout == torch.strided:
            matrix, is_nan = finite_rows(x)
            unit, inverse = unit_rows(matrix) if cosine else (matrix, None)
            return cls(unit, inverse, is_nan)
        entries, inverse = entries_of(x), None
        row, (value, size) = entries.row, (entries.value, len(x))
        is_nan = entries.sum_rows(size, value - value).isnan()  # infinity - infinity is NaN, too
        value = value.masked_fill(is_nan[row], 0.0)
        if cosine:  # the scale keeps squares from underflow and overflow
            scale = value.new_zeros(size).scatter_reduce_(0, row, value.abs(), "amax")
            is_zero = scale == 0
            value = value / torch.where(is_zero, 1.0, scale)[row]
            norm = entries.sum_rows(size, value.square()).sqrt()
            value = value / torch.where(is_zero, 1.0, norm)[row]
            inverse = (1 / scale / norm).clamp(max=torch.finfo(value.dtype).max)
            inverse = torch.where(is_zero, 0.0, inverse)[:, None]
        return cls(with_values(x, value), inverse, is_nan)

    def gradient(self, terms: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return ``sum_k g_k @ b_k`` before normalisation, and its product with the rows."""
        total = add_products(self.matrix, terms)
        if self.matrix.layout == torch.strided:
            along = (self.matrix * total).sum()
            if self.inverse is not None:
                total = through_unit_rows_(total, self.matrix, self.inverse)
            return total, along
        entries, values = entries_of(self.matrix), total.values()
        along = entries.sum_rows(len(total), entries.value * values)
        if self.inverse is not None:  # remove the part parallel to the row
            values = values - entries.value * along[entries.row]
            values = values * self.inverse[entries.row, 0]
        return with_values(total, values), along.sum()


NONZEROS = Implementation(
    "nonzeros",
    nonzeros_unsupported_reason,
    prefers_nonzeros,
    nonzeros_info_nce,
    purpose="CSR tensors",
)
