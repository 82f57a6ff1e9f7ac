"""Two losses are the same if their values and their gradients are."""

import torch
from torch import Tensor

Q, N, V = 4, 3, 9  # queries, negatives of each, tokens


def activations(*shape: int, seed: int = 0) -> Tensor:
    """Not negative, many of them 0, in double precision."""
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(*shape, generator=random, dtype=torch.float64)
    return torch.where(x > 0.4, x, 0.0).requires_grad_()


def assert_equal(theirs: Tensor, ours: Tensor, *tensors: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    expected = torch.autograd.grad(theirs, tensors)
    assert all(gradient.abs().sum() > 0 for gradient in expected)
    gradients = torch.autograd.grad(ours, tensors)
    torch.testing.assert_close(gradients, expected, rtol=1e-8, atol=1e-10)
