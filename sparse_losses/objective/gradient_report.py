"""Each term's share in the gradient at the representation."""

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_losses._core.precision import compute_dtype, widest_dtype
from sparse_losses.objective.batch import SpladeBatch, check_batch
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
    sides: list[Any] = []
    leaves: list[Tensor] = []
    with torch.enable_grad():
        for texts in batch[:3]:
            if texts is None:
                sides.append(None)
                continue
            x = texts.activations if texts.logits is None else texts.logits
            leaves.append(leaf := x.detach().to(compute_dtype(x=x)).requires_grad_())
            if texts.logits is None:
                sides.append(texts._replace(activations=leaf))
            else:  # the batch's activations, with the gradient of log1p(relu(logits))
                slope = leaf.relu().log1p()
                activations = texts.activations.detach() + (slope - slope.detach())
                sides.append(texts._replace(activations=activations, logits=leaf))
        values = objective.values(SpladeBatch(*sides, *batch[3:8]))  # type: ignore[call-arg]
        weighted = [objective._weight(name) * value for name, value in values.items()]
    gradients = [
        torch.autograd.grad(term, leaves, retain_graph=True, materialize_grads=True)
        if term.requires_grad
        else [torch.zeros_like(leaf) for leaf in leaves]
        for term in weighted
    ]
    wide, size = widest_dtype(leaves[0].device), len(gradients)
    total = torch.zeros(size, size, dtype=wide, device=leaves[0].device)
    for by_leaf in zip(*gradients, strict=True):
        for piece in zip(*(x.flatten().split(1 << 18) for x in by_leaf), strict=True):
            rows = torch.stack(piece).to(wide)  # a piece, because fp64 takes twice the memory
            total += rows @ rows.T
    products: list[list[float]] = total.tolist()
    norms = {name: math.sqrt(products[row][row]) for row, name in enumerate(values)}
    pairs = itertools.combinations(enumerate(values), 2)
    cosines = {
        (a, b): products[i][j] / (norms[a] * norms[b] or math.inf) for (i, a), (j, b) in pairs
    }
    return GradientReport(norms, cosines)
