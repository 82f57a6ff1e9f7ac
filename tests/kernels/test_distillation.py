"""The kernels of distillation: their values, their gradients, their edges."""

import itertools
import math

import numpy as np
import pytest
import torch

from sparse_losses import DistillationLoss
from sparse_losses.functional import distillation_loss
from sparse_losses.kernels import distillation as kernels

modes = pytest.mark.parametrize("standardize", ["batch", "row"])
terms = pytest.mark.parametrize("alphas", [(0.7, 0.3), (1.0, 0.0), (0.0, 1.0)], ids=str)


def sample(dtype):
    """Runs every kernel once, for `tools.compile_kernels`."""
    everything = itertools.product(
        [(40, 4096), (8, 10000), (600, 16)], ["batch", "row"], [False, True], [False, True]
    )
    for shape, standardize, has_mask, is_learned in everything:
        s = torch.zeros(shape, dtype=dtype, requires_grad=True)
        t = torch.zeros(shape, dtype=dtype)
        options = {
            "candidate_mask": torch.ones(shape, dtype=torch.bool) if has_mask else None,
            "temperature": torch.ones(()).requires_grad_() if is_learned else 3.0,
            "standardize": standardize,
            "impl": "triton",
        }
        distillation_loss(s, t, **options).backward()
