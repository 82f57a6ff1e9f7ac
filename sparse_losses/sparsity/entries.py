"""The entries of many vectors in bounded memory, and the limit that a given number is above."""

import bisect
import functools
import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparse_losses._core.activation import largest_entries

LIMIT = 1 << 24  # entries that are held, 12 bytes each


class Entries:
    """What the texts of one side have, and their largest entries, as many as are held.

    If more are ``wanted`` than a quarter of ``LIMIT``, those of a sample of the texts are held.
    """

    active: Tensor  # texts that have each dimension
    held: int  # texts of which entries are held, with their dimensions and values
    columns: Tensor
    values: Tensor

    def __init__(self, name: str, lowest: float, keep: int, wanted: float = math.inf) -> None:
        self.name, self.lowest, self.keep, self.wanted = name, lowest, keep, wanted
        self.floor = lowest  # only entries above it are held
        self.texts, self.batches, self.stride = 0, 0, 1  # of every `stride` batches one is held
        self.maxima: list[Tensor] = []
        self.parts: list[tuple[int, Tensor, Tensor]] = []  # texts, dimensions, values

    def add(self, x: Tensor) -> None:
        """Count and hold the entries of a batch ``[B, V]``."""
        x = x.detach().nan_to_num(self.lowest, math.inf, -math.inf)
        if self.lowest == 0.0 and (x < 0).any():
            raise ValueError(f"expected activations >= 0, got {x.min().item():g}")
        active = (x > 0).sum(0).cpu()
        self.active = self.active + active if self.batches else active
        self.maxima.append(x.amax(1).double().cpu())
        self.texts, self.batches = self.texts + len(x), self.batches + 1
        if (self.batches - 1) % self.stride:
            return
        if self.keep:  # no limit is above these
            x = torch.where(largest_entries(x, self.keep) & (x > 0), math.inf, x)
        row, column = (x > self.floor).nonzero(as_tuple=True)
        self.parts.append((len(x), column.int().cpu(), x[row, column].double().cpu()))
        if sum(len(values) for _, _, values in self.parts) <= LIMIT:
            return
        if 4 * self.wanted > LIMIT:  # half of the texts, which come sorted by length
            self.parts, self.stride = self.parts[::2], 2 * self.stride
            return
        self.join()
        self.values, order = self.values.topk(LIMIT // 2)
        self.floor = self.values[-1].item()
        self.parts = [(self.held, self.columns[order], self.values)]

    def join(self) -> None:
        """Join the parts."""
        if not self.texts:
            raise ValueError(f"expected at least one {self.name}, got none")
        texts, columns, values = zip(*self.parts, strict=True)
        self.held, self.columns, self.values = sum(texts), torch.cat(columns), torch.cat(values)

    def share(self, limit: float | None) -> Tensor:
        """Return the share of texts that have each dimension above a limit, ``[V]``."""
        if limit is None:
            return self.active.double() / self.texts
        above = self.columns[self.values > limit]
        counts = torch.bincount(above, minlength=len(self.active))
        return counts.double() / self.held

    def empty(self, limit: float | None) -> int:
        """Return how many texts have nothing above a limit."""
        lowest = 0.0 if limit is None or self.keep else limit
        return sum(int((x <= lowest).sum()) for x in self.maxima)

    def limit(self, target: float) -> float:
        """Return the limit that ``target`` entries a text are above."""
        what = f"{target:g} active dimensions a {self.name}"
        return _nearest([self], target, what, lambda x: int((self.values > x).sum()) / self.held)


def _nearest(
    sides: Sequence[Entries], target: float, what: str, given: Callable[[float], float]
) -> float:
    """Return the limit at which ``given``, which falls with it, is nearest to ``target``.

    It lies between two values, so that equal ones stay or go together, and leaves at least one.
    """
    values = torch.cat([side.values for side in sides])
    values = torch.unique(values[values.isfinite()])
    is_signed = math.isinf(sides[0].lowest) and len(values) > 0
    lowest = values[:1] - 1.0 if is_signed else values.new_zeros(1)
    values = torch.cat([lowest, values])
    left = functools.cache(lambda i: given(values[i].item()))
    last = len(values) - 1
    i = bisect.bisect_left(range(last + 1), -target, key=lambda i: -left(i))
    if i == 0 and left(0) < target:
        warnings.warn(f"expected {what}, got {left(0):.4g}: all are kept", stacklevel=4)
    elif i > last:
        i = last
        if left(i) > 1.02 * target:
            warnings.warn(f"expected {what}, got {left(i):.4g} at least", stacklevel=4)
    elif i and (left(i) == 0 or left(i - 1) - target <= target - left(i)):
        i -= 1
    below = values[i].item()
    if i == 0:
        return below
    # What is kept at least has no value; a limit that equals one might round to below it.
    above = values[i + 1].item() if i < last else below + 2e-6 * abs(below)
    return below / 2 + above / 2  # the sum could overflow


def products_limit(sides: Sequence[Entries], target: float) -> float:
    """Return the limit of documents and queries at which a pair has ``target`` products."""

    def given(limit: float) -> float:
        return float(sides[0].share(limit) @ sides[1].share(limit))

    return _nearest(sides, target, f"{target:g} products of a query and a document", given)
