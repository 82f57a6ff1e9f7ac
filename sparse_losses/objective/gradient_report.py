"""Each term's share in the gradient at the representation."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.precision import compute_dtype, widest_dtype
from sparse_losses.objective.batch import SpladeBatch, check_batch
from sparse_losses.objective.diagnostics import Report
from sparse_losses.objective.objective import SpladeObjective


def gradient_report(objective: SpladeObjective, batch: SpladeBatch) -> Report:
    """Return the norm of each active term's weighted gradient, and the cosine of each pair.

    They are ``"norm/a"`` and ``"cosine/a/b"``, of the gradients by all activations of the batch, or
    by the logits of texts that have them. Terms of different sides have the cosine 0 here, though
    not in the encoder. It takes one backward pass per term, to the activations only: the encoder
    does not run, and no ``.grad`` changes. Memory holds one gradient of the batch per term.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeBatch, SpladeObjective, Texts, gradient_report
        >>> from sparse_losses.objective import terms
        >>> flops = {side: (1.0, terms.flops(side)) for side in ("query", "document")}
        >>> batch = SpladeBatch(Texts(torch.eye(2)), Texts(torch.zeros(2, 2)))
        >>> print(gradient_report(SpladeObjective(flops), batch))
        norm/query             1
        norm/document          0
        cosine/query/document  0
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
        weighted = [objective.weights[name] * value for name, value in values.items()]
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
    norms = [math.sqrt(products[i][i]) for i in range(size)]
    report = Report({f"norm/{name}": norm for name, norm in zip(values, norms, strict=True)})
    for (i, a), (j, b) in itertools.combinations(enumerate(values), 2):
        report[f"cosine/{a}/{b}"] = products[i][j] / (norms[i] * norms[j] or math.inf)
    return report
