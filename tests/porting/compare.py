"""Two losses are the same if their values and their gradients are."""

from collections.abc import Callable

import numpy as np
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


def assert_follows(formula: Callable[..., float], ours: Tensor, *tensors: Tensor) -> None:
    """``ours`` is the NumPy formula of the tensors; its gradient the formula's differences."""
    arrays = [tensor.detach().numpy().copy() for tensor in tensors]
    torch.testing.assert_close(ours.item(), float(formula(*arrays)), rtol=1e-10, atol=1e-12)
    gradients = torch.autograd.grad(ours, tensors)
    for array, gradient in zip(arrays, gradients, strict=True):
        expected, step = np.zeros_like(array), 1e-5
        for index in np.ndindex(array.shape):
            was = array[index]
            array[index] = was + step
            above = formula(*arrays)
            array[index] = was - step
            expected[index] = (above - formula(*arrays)) / (2 * step)
            array[index] = was
        assert np.abs(expected).sum() > 0
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-5, atol=1e-8)
