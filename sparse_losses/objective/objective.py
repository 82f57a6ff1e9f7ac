"""The weighted sum of many losses over one batch."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from sparse_losses._core.checks import check_number, check_shapes
from sparse_losses._core.precision import autocast_off, compute_dtype
from sparse_losses.distributed import agree_across_ranks, refuse_across_ranks
from sparse_losses.objective.batch import SpladeBatch, check_batch
from sparse_losses.objective.terms import Term


class ObjectiveOutput(NamedTuple):
    """The weighted sum to minimise, 0-d, and every active term, unweighted and without a graph.

    Examples:
        >>> import torch
        >>> from sparse_losses import ObjectiveOutput
        >>> total, terms = ObjectiveOutput(torch.tensor(1.0), {"info_nce": torch.tensor(1.0)})
    """

    total: Tensor
    terms: dict[str, Tensor]


class SpladeObjective(nn.Module):
    r"""A weighted sum of losses over one ``SpladeBatch``: $\sum_k \lambda_k \, \ell_k$.

    Args:
        terms: by name the weight $\lambda$ and the term $\ell$, a module or function of the batch
            that returns a 0-d tensor: ``sparse_losses.objective.terms`` has builders. A term of
            weight 0 is not called.
        gather: whether the package's terms use the texts of all ranks. A teacher scores this
            rank's own candidates, and ``candidate_mask`` is of all ranks': ``[B, W B + W N]``.

    ``weights`` holds $\lambda$ by name and may be changed between steps. ``terms`` are the modules:
    ``objective.terms["info_nce"].loss.temperature``.

    Examples:
        >>> import torch
        >>> from sparse_losses import InfoNCELoss, SpladeBatch, SpladeObjective, Texts
        >>> from sparse_losses.objective import terms
        >>> objective = SpladeObjective({
        ...     "info_nce": (2.0, terms.info_nce(InfoNCELoss(temperature=1.0))),
        ...     "document_flops": (0.5, terms.flops("document")),
        ...     "mine": (0.1, lambda batch: batch.scores("dot").square().mean()),
        ... })
        >>> total, values = objective(SpladeBatch(Texts(torch.eye(3)), Texts(torch.eye(3))))
        >>> {name: round(value.item(), 4) for name, value in values.items()}
        {'info_nce': 0.5514, 'document_flops': 0.3333, 'mine': 0.3333}
        >>> round(total.item(), 3)  # 2 * 0.5514 + 0.5 * 0.3333 + 0.1 * 0.3333
        1.303
    """

    def __init__(
        self,
        terms: Mapping[str, tuple[float, Callable[[SpladeBatch], Tensor]]],
        *,
        gather: bool = False,
    ) -> None:
        super().__init__()
        self.gather, self.terms = gather, nn.ModuleDict()
        self.weights: dict[str, float] = {}
        for name, term in terms.items():
            if not (isinstance(term, (tuple, list)) and len(term) == 2 and callable(term[1])):
                pair = f"{name!r}: (1.0, term)"
                raise TypeError(f"expected the pair of a weight and a term, {pair}, got {term!r}")
            self.weights[name], function = term
            self.terms[name] = function if isinstance(function, nn.Module) else Term(function)
        self.active()

    def active(self) -> list[str]:
        """Return the names of the terms that are called: their weight is not 0."""
        for name, weight in self.weights.items():
            check_number(f"weights[{name!r}]", weight)
        return [name for name, weight in self.weights.items() if weight != 0]

    def forward(self, batch: SpladeBatch) -> ObjectiveOutput:
        """Return the weighted sum and the value of every active term."""
        values = self.values(batch)
        weighted = [self.weights[name] * value for name, value in values.items()]
        if not weighted:  # the sum is 0 and must be part of the graph
            x = batch.anchor.activations
            weighted = [x[:0].sum(dtype=compute_dtype(activations=x))]
        total = sum(weighted[1:], weighted[0])
        return ObjectiveOutput(total, {name: value.detach() for name, value in values.items()})

    def values(self, batch: SpladeBatch) -> dict[str, Tensor]:
        """Return the active terms, without their weights, each with its graph."""
        call = "SpladeObjective"
        try:
            active = self.active()
            check_batch(batch)
        except (TypeError, ValueError) as error:
            parts = batch if isinstance(batch, tuple) else (batch,)
            leaves = [x for part in parts for x in (part if isinstance(part, tuple) else (part,))]
            refuse_across_ranks(call, self.gather, leaves, error)
            raise
        weights = {f"weights[{name!r}]": self.weights[name] for name in active}
        agree_across_ranks(call, self.gather, batch.anchor.activations, **weights)
        given = {name: getattr(batch, name) for name in SpladeBatch._fields}
        batch = SpladeBatch(**{**given, "gather": self.gather, "memory": {}})
        values: dict[str, Tensor] = {}
        last = [name for name in active if getattr(self.terms[name], "is_last", False)]
        with autocast_off(batch.anchor.activations.device):
            for name in sorted(active, key=lambda name: name in last):
                try:
                    values[name] = value = self.terms[name](batch)
                    check_shapes(value=(value, ""))  # 0-d
                except (TypeError, ValueError) as error:
                    error.args = (f"the term {name!r}: {error}",)
                    raise
        return {name: values[name] for name in active}
