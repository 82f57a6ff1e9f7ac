"""Scores that several losses share: their values and gradients.

The objective alone calls these functions; there they would be tested through all of its terms.
"""

import pytest
import torch

from sparse_losses.objective.shared_scores import shared_scores
from tests.strategies import draw

B, D, N = 5, 4, 3
NEGATIVES = {"none": None, "shared": draw(2, N, D), "each": draw(2, B * N, D).view(B, N, D)}
over_negatives = pytest.mark.parametrize("negative", NEGATIVES.values(), ids=NEGATIVES)
over_similarities = pytest.mark.parametrize("cosine", [False, True], ids=["dot", "cosine"])


def by_formula(query, key, negative, *, cosine):
    rows = [x for x in (query, key, negative) if x is not None]
    if cosine:
        rows = [x / x.square().sum(-1, keepdim=True).sqrt() for x in rows]
    scores = [torch.einsum("qd,kd->qk", rows[0], rows[1])]
    if negative is not None:
        names = "qd,kd->qk" if negative.ndim == 2 else "qd,qkd->qk"
        scores.append(torch.einsum(names, rows[0], rows[2]))
    return torch.cat(scores, dim=1)


def leaves_of(*inputs):
    return [None if x is None else x.detach().clone().requires_grad_() for x in inputs]


@over_negatives
@over_similarities
@pytest.mark.parametrize("num_keys", [2, 7])
def test_scores_and_gradients_are_those_of_the_formula(negative, cosine, num_keys):
    leaves = leaves_of(draw(0, B, D), draw(1, num_keys, D), negative)
    wanted = [x for x in leaves if x is not None]
    expected = by_formula(*leaves, cosine=cosine)
    scores = shared_scores(*leaves, cosine=cosine)
    torch.testing.assert_close(scores, expected)
    upstream = draw(3, *scores.shape)
    gradients = torch.autograd.grad(expected, wanted, upstream)
    for _ in range(2):  # a second time from the same graph
        grads = torch.autograd.grad(scores, wanted, upstream, retain_graph=True)
        torch.testing.assert_close(grads, gradients)
    for leaf, gradient in zip(wanted, gradients, strict=True):  # of one input alone
        inputs = [x if x is leaf or x is None else x.detach() for x in leaves]
        scores = shared_scores(*inputs, cosine=cosine)
        torch.testing.assert_close(torch.autograd.grad(scores, leaf, upstream)[0], gradient)


@over_negatives
@over_similarities
def test_second_derivatives_and_jacobians_are_those_of_the_formula(negative, cosine):
    leaves = leaves_of(draw(0, B, D), draw(1, B, D), negative)
    wanted = [x for x in leaves if x is not None]
    seconds, jacobians = [], []
    for function in (shared_scores, by_formula):
        scores = function(*leaves, cosine=cosine)
        gradients = torch.autograd.grad(scores.square().sum(), wanted, create_graph=True)
        squares = sum(g.square().sum() for g in gradients)
        seconds.append(torch.autograd.grad(squares, wanted))
        rows = torch.eye(scores.numel(), dtype=scores.dtype).view(-1, *scores.shape)
        scores = function(*leaves, cosine=cosine)
        jacobians.append(torch.autograd.grad(scores, wanted, rows, is_grads_batched=True))
    torch.testing.assert_close(*seconds)
    torch.testing.assert_close(*jacobians)
    assert all(x.any() for x in seconds[0])
