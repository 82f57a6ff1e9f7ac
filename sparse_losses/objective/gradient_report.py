"""Each term's share in the gradient at the representation."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_losses._core.precision import compute_dtype, widest_dtype
from sparse_losses.objective.batch import SpladeBatch, Texts, check_batch
from sparse_losses.objective.objective import SpladeObjective


class GradientReport(NamedTuple):
    """The norm of each term's weighted gradient, and the cosine of each pair of gradients.

    The gradients are by all activations of the batch, or by the logits of texts that have them.
    Terms of different sides have the cosine 0 here, though not in the encoder.

    Examples:
        >>> from sparse_losses import GradientReport
        >>> print(GradientReport({"a": 3.0, "b": 1.0}, {("a", "b"): -0.5}))
        a         3    75%
        b         1    25%  cosine with a -0.50
    """

    norms: dict[str, float]
    cosines: dict[tuple[str, str], float]

    def as_dict(self) -> dict[str, float]:
        """Return a flat dict, for a logger."""
        flat = {f"norm/{name}": value for name, value in self.norms.items()}
        return flat | {f"cosine/{a}/{b}": value for (a, b), value in self.cosines.items()}

    def __str__(self) -> str:
        """Return each term's norm, its share, and its cosines, except 0, with the terms above."""
        total, lines = sum(self.norms.values()) or 1.0, []
        width = max(map(len, self.norms), default=0)
        for name, norm in self.norms.items():
            with_above = [f"{a} {c:.2f}" for (a, b), c in self.cosines.items() if b == name and c]
            cosines = f"  cosine with {', '.join(with_above)}" if with_above else ""
            lines.append(f"{name:{width}}  {norm:8.2g}  {norm / total:5.0%}{cosines}")
        return "\n".join(lines)


def gradient_report(objective: SpladeObjective, batch: SpladeBatch) -> GradientReport:
    """Norms and cosines of the active terms' gradients, times their present weights.

    It takes one backward pass per term, to the activations only: the encoder does not run, and no
    ``.grad`` changes. Memory holds one gradient of the batch per term.

    Examples:
        >>> import torch
        >>> from sparse_losses import RECOMMENDED, SpladeBatch, Texts, gradient_report
        >>> batch = SpladeBatch(Texts(torch.rand(4, 50)), Texts(torch.rand(4, 50)))
        >>> [*gradient_report(RECOMMENDED.objective(), batch).norms]
        ['info_nce']
    """
    check_batch(batch)
    leaves: list[Tensor] = []

    def leaf(x: Tensor) -> Tensor:
        leaves.append(x.detach().to(compute_dtype(activations=x)).requires_grad_())
        return leaves[-1]

    def leaf_texts(texts: Texts) -> Texts:
        if texts.logits is None:
            return texts._replace(activations=leaf(texts.activations))
        # The batch's activations, with the gradient of log1p(relu(logits)): one leaf for both.
        logits = leaf(texts.logits)
        slope = logits.relu().log1p()
        activations = texts.activations.detach() + (slope - slope.detach())
        return texts._replace(activations=activations, logits=logits)

    with torch.enable_grad():
        sides: Any = [None if texts is None else leaf_texts(texts) for texts in batch[:3]]
        values = objective.values(SpladeBatch(*sides, *batch[3:8]))  # type: ignore[call-arg]
        weighted = [objective.weights[name] * value for name, value in values.items()]
    gradients = [
        torch.autograd.grad(term, leaves, retain_graph=True, materialize_grads=True)
        if term.requires_grad
        else [torch.zeros_like(leaf) for leaf in leaves]
        for term in weighted
    ]
    products = _products(gradients)
    norms = {name: math.sqrt(products[row][row]) for row, name in enumerate(values)}
    pairs = itertools.combinations(enumerate(values), 2)
    cosines = {
        (a, b): products[i][j] / (norms[a] * norms[b] or math.inf) for (i, a), (j, b) in pairs
    }
    return GradientReport(norms, cosines)


def _products(gradients: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    """Return the dot products of all pairs of gradients, in fp64, a piece at a time."""
    if not gradients:
        return []
    device = gradients[0][0].device
    total = torch.zeros(len(gradients), len(gradients), dtype=widest_dtype(device), device=device)
    for tensors in zip(*gradients, strict=True):
        for pieces in zip(*(x.flatten().split(1 << 18) for x in tensors), strict=True):
            rows = torch.stack(pieces).to(total.dtype)
            total += rows @ rows.T
    products: list[list[float]] = total.tolist()
    return products
