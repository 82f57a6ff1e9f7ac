"""Scores of CSR vectors, for the objective's terms on scores, with gradients at the entries."""

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from sparse_losses.fast.scores import Scores


def sparse_scores(*inputs: Tensor, cosine: bool) -> Tensor:
    """Return the scores ``[B, C]`` of queries with keys; all are CSR, as are their gradients."""
    scores: Tensor = _SparseScores.apply(cosine, *inputs)  # type: ignore[no-untyped-call]
    return scores


class _SparseScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cosine: bool, *inputs: Tensor) -> Tensor:
        ctx.cosine = cosine
        ctx.save_for_backward(*inputs)
        return _prepared(set(), inputs, cosine).block(slice(0, len(inputs[0])))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError("expected create_graph=False with CSR tensors")
        needs = {str(i) for i, need in enumerate(ctx.needs_input_grad[1:]) if need}
        scores = _prepared(needs, ctx.saved_tensors, ctx.cosine)
        scores.backward(slice(0, len(upstream)), upstream.clone())
        gradients = scores.gradients()
        return None, *(gradients.get(str(i)) for i in range(len(ctx.saved_tensors)))


def _prepared(needs: Set[str], inputs: Sequence[Tensor], cosine: bool) -> Scores:
    return Scores(needs, {str(i): x for i, x in enumerate(inputs)}, temperature=1.0, cosine=cosine)
