"""Each term's share in the gradient at the representation."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_losses._core.dtensors import refuse_dtensors
from sparse_losses._core.precision import compute_dtype, widest_dtype
from sparse_losses.objective.batch import SpladeBatch, Texts
from sparse_losses.objective.objective import SpladeObjective
from sparse_losses.objective.terms import check_texts


class GradientReport(NamedTuple):
    """The size of each term's gradient at the representation, and the angles between them.

    Attributes:
        norms: norm of the gradient of every active term, times its weight, with respect to all
            activations of the batch, or to the logits of texts that have them.
        cosines: cosine of the gradients of each pair of terms: -1 if they are opposed, 0 if they
            have nothing in common. Terms of different sides have 0 here, though not in the encoder.

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
    """Norms and cosines of the terms' gradients at the representation.

    This takes one forward pass of the losses and one backward pass per term, to the activations
    only: the encoder does not run, and no ``.grad`` changes. Memory holds one gradient of the
    batch per term.

    Args:
        objective: the objective with the active terms and their present weights.
        batch: the batch; it is detached.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeBatch, SpladeObjective, Texts, gradient_report
        >>> objective = SpladeObjective({"info_nce": 1.0, "query_flops": 0.1})
        >>> batch = SpladeBatch(Texts(torch.rand(4, 50)), Texts(torch.rand(4, 50)))
        >>> report = gradient_report(objective, batch)
        >>> sorted(report.norms)
        ['info_nce', 'query_flops']
    """
    check_texts(batch)
    refuse_dtensors(anchor=batch.anchor.activations, positive=batch.positive.activations)
    leaves: list[Tensor] = []

    def leaf(x: Tensor) -> Tensor:
        x = x.detach().to(compute_dtype(activations=x))
        leaves.append(x.requires_grad_())
        return leaves[-1]

    def leaf_texts(texts: Texts) -> Texts:
        if texts.logits is None:
            return texts._replace(activations=leaf(texts.activations))
        # The batch's activations, with the gradient of log1p(relu(logits)): one leaf for both.
        logits = leaf(texts.logits)
        with torch.enable_grad():
            slope = logits.relu().log1p()
            activations = texts.activations.detach() + (slope - slope.detach())
        return texts._replace(activations=activations, logits=logits)

    negative = None if batch.negative is None else leaf_texts(batch.negative)
    batch = batch._replace(
        anchor=leaf_texts(batch.anchor), positive=leaf_texts(batch.positive), negative=negative
    )
    with torch.enable_grad():
        terms = {
            name: objective.weights[name] * term for name, term in objective.terms(batch).items()
        }
    gradients = [
        torch.autograd.grad(term, leaves, retain_graph=True, materialize_grads=True)
        if term.requires_grad
        else [torch.zeros_like(leaf) for leaf in leaves]
        for term in terms.values()
    ]
    products, names = _products(gradients), list(terms)
    norms = {name: math.sqrt(products[row][row]) for row, name in enumerate(names)}
    cosines = {
        (a, b): products[row][column] / (norms[a] * norms[b] or math.inf)
        for row, b in enumerate(names)
        for column, a in enumerate(names[:row])
    }
    return GradientReport(norms, cosines)


def _products(gradients: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    """Return the dot products of all pairs of gradients, in fp64, a piece at a time."""
    if not gradients:
        return []
    device = gradients[0][0].device
    wide = widest_dtype(device)
    total = torch.zeros(len(gradients), len(gradients), dtype=wide, device=device)
    for tensors in zip(*gradients, strict=True):
        for pieces in zip(*(x.flatten().split(1 << 18) for x in tensors), strict=True):
            rows = torch.stack(pieces).to(wide)
            total += rows @ rows.T
    products: list[list[float]] = total.tolist()
    return products
