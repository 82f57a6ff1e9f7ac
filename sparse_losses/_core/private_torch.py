"""All private PyTorch names that this package uses; a test per name fails once it can go."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def assert_on_device(condition: Tensor, message: str) -> None:
    """Assert on the device, without a host sync and without a graph break."""
    torch._assert_async(condition, message)


def log_softmax_backward(gradient: Tensor, log_probabilities: Tensor) -> Tensor:
    """Return the gradient of the logits of ``log_softmax(-1)``, in one launch."""
    dtype = gradient.dtype
    return torch._log_softmax_backward_data(gradient, log_probabilities, -1, dtype)


# Whether a transform of `torch.func` is active; PyTorch has no public query.
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

# The level of forward-mode derivatives, -1 where they are inactive; PyTorch has no public query.
forward_level = functools.partial(getattr, torch.autograd.forward_ad, "_current_level")


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor is batched by ``vmap``; in-place operations are then impossible."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
