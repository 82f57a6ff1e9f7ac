"""The weighted sum of many losses over one batch."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_flag, check_number
from sparse_losses._core.loss import shown
from sparse_losses._core.precision import autocast_off, compute_dtype
from sparse_losses.distributed import agree_across_ranks, refuse_across_ranks, skip_size_check
from sparse_losses.objective.batch import SpladeBatch, Texts, check_batch
from sparse_losses.objective.terms import Function


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
        terms: by name the weight $\lambda$, a number or a 0-d tensor, and the term $\ell$, a module
            or function of the batch that returns a 0-d tensor: ``sparse_losses.objective.terms``
            has builders. A term of weight 0 is not called.
        gather: whether the package's terms use the texts of all ranks. Teacher scores are then of
            all ranks' candidates, ``[B, W B + W N]``, or of this rank's alone, ``[B, B + N]``.

    ``weights`` holds $\lambda$ by name and may be changed between steps, ``terms`` the modules:
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
        terms: Mapping[str, tuple[float | Tensor, Callable[[SpladeBatch], Tensor]]],
        *,
        gather: bool = False,
    ) -> None:
        super().__init__()
        check_flag(gather=gather)
        self.gather, self.terms = gather, nn.ModuleDict()
        self.weights: dict[str, float | Tensor] = {}
        for name, pair in terms.items():
            if not (isinstance(pair, tuple) and len(pair) == 2 and callable(pair[1])):
                raise TypeError(f"expected the term {name!r} as (weight, function), got {pair!r}")
            self.weights[name], function = pair
            self.terms[name] = function if isinstance(function, nn.Module) else Function(function)
        self.active()

    def active(self) -> list[str]:
        """Return the names of the terms that are called: their weight is not 0, or a tensor."""
        for name, weight in self.weights.items():
            if name not in self.terms:
                raise ValueError(f"expected weights of the terms {[*self.terms]}, got {name!r}")
            if not isinstance(weight, Tensor):
                check_number(f"weights[{name!r}]", weight)
            elif weight.ndim:
                raise ValueError(f"expected weights[{name!r}] to be 0-d, got {list(weight.shape)}")
        return [name for name, w in self.weights.items() if isinstance(w, Tensor) or w != 0]

    def forward(self, batch: SpladeBatch) -> ObjectiveOutput:
        """Return the weighted sum and the value of every active term."""
        values, total = self.values(batch), None
        for name, value in values.items():
            weight = self.weights[name]
            if total is None:
                total = weight * value
            elif isinstance(weight, Tensor) or torch.compiler.is_compiling():
                total = total + weight * value
            else:  # one operation; a compiler would compile `alpha` as a constant
                total = torch.add(total, value, alpha=weight)
        if total is None:  # without terms the sum is 0 and must be part of the graph
            x = batch.anchor.activations
            total = x.flatten()[:0].to(compute_dtype(activations=x)).sum()
        return ObjectiveOutput(total, {name: value.detach() for name, value in values.items()})

    def values(self, batch: SpladeBatch) -> dict[str, Tensor]:
        """Return the active terms, without their weights, each with its graph."""
        try:
            active = self.active()
            check_batch(batch)
        except (TypeError, ValueError) as error:
            tensors = _named(batch).values()
            refuse_across_ranks("SpladeObjective", self.gather, tensors, error)
            raise
        is_compared = self.gather is not False and self._agree_across_ranks(active, batch)
        batch = SpladeBatch(*batch[:8], gather=self.gather, memory={})
        late = [
            name for name in active if getattr(self.terms[name], "uses_scores_of_others", False)
        ]
        values: dict[str, Tensor] = {}
        with (
            autocast_off(batch.anchor.activations.device),
            skip_size_check() if is_compared else nullcontext(),
        ):
            for name in [*(name for name in active if name not in late), *late]:
                try:
                    values[name] = value = self.terms[name](batch)
                    if getattr(value, "ndim", None) != 0:
                        got = getattr(value, "shape", value)
                        raise TypeError(f"expected a 0-d tensor, got {got}")
                except (TypeError, ValueError) as error:
                    error.args = (f"the term {name!r}: {error}",)
                    raise
        return {name: values[name] for name in active}

    def _agree_across_ranks(self, active: Sequence[str], batch: SpladeBatch) -> bool:
        """Return whether ranks were compared; raise unless all have the same terms and sizes."""
        tensors, values = _named(batch), {}
        if not torch.compiler.is_compiling():  # a number may be symbolic there
            values = dict(zip("BV", map(str, batch.anchor.activations.shape), strict=True))
            for name, x in tensors.items():
                shape = list(x.shape[: -1 if name.endswith(("input_ids", "_mask")) else None])
                values[f"`{name}`"] = f"{'real' if x.is_floating_point() else 'integer'} {shape}"
            for name in active:
                values[f"weights[{name!r}]"] = shown(self.weights[name])
                values[f"term {name!r}"] = repr(self.terms[name])
        call = f"SpladeObjective of {', '.join(active)}"
        is_compared = agree_across_ranks(call, self.gather, *tensors.values(), **values)
        return is_compared and not torch.compiler.is_compiling()

    def extra_repr(self) -> str:
        """Return the weights."""
        return f"weights={self.weights}, gather={self.gather}"


def _named(batch: object) -> dict[str, Tensor]:
    """Return the tensors of a batch by name."""
    if not isinstance(batch, SpladeBatch):
        return {}
    named: dict[str, object] = dict(zip(SpladeBatch._fields, batch, strict=True))
    for side, part in zip(SpladeBatch._fields, batch, strict=True):
        if isinstance(part, Texts):
            for field, x in zip(Texts._fields, part, strict=True):
                named[f"{side}.{field}"] = x
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}
