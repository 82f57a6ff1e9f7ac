"""Distillation where z-scores are summed in fp64 instead of shifted and scaled."""

import pytest
import torch

from sparse_losses.functional import distillation_loss
from tools import simulated_device

if reason := simulated_device.why_not():
    pytest.skip(reason, allow_module_level=True)
simulated_device.start()

SCORES = torch.tensor([[0.5, 2.0, -1.0, 0.25], [1.0, -2.0, 0.75, 3.0], [2.0, 0.0, 1.5, -0.5]])
TEACHER = torch.tensor([[1.0, 1.5, -2.0, 0.0], [0.5, -1.0, 1.0, 2.0], [2.5, 1.0, 0.5, 0.0]])
HOLES = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0]])
ONE = torch.zeros(3, 4)
ONE[1, 2] = 1.0
NONE = torch.zeros(3, 4)


def value_and_gradient(student, teacher, mask, device, dtype, **options):
    student = student.to(device, dtype).requires_grad_()
    mask = None if mask is None else mask.to(device)
    teacher = teacher.to(device, dtype)
    loss = distillation_loss(student, teacher, candidate_mask=mask, **options)
    loss.backward()
    return loss.detach().cpu().double(), student.grad.cpu().double()


@pytest.mark.parametrize("mask", [None, HOLES, ONE, NONE], ids=["all", "holes", "one", "none"])
@pytest.mark.parametrize("standardize", ["batch", "row"])
@pytest.mark.parametrize("alpha_kl", [0.0, 0.7])
@pytest.mark.parametrize(("factor", "offset"), [(1.0, 0.0), (1.0, 1000.0), (1e25, 0.0)])
def test_it_is_the_formula_in_fp64(mask, standardize, alpha_kl, factor, offset):
    if alpha_kl and factor > 1:
        factor = 1.0  # a softmax of such scores is 0 or 1
    student, teacher = factor * SCORES + offset, factor * TEACHER - offset
    options = {"standardize": standardize, "alpha_kl": alpha_kl, "alpha_mse": 0.3}
    options["temperature"] = 2.0  # which leaves all digits of a score
    expected = value_and_gradient(
        student, teacher, mask, "cpu", torch.float64, **options, impl="definition"
    )
    found = value_and_gradient(student, teacher, mask, "sim", torch.float32, **options)
    torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(factor * found[1], factor * expected[1], rtol=2e-5, atol=1e-6)
    if mask is None or mask is HOLES:
        assert found[0] > 0.01
        assert found[1].any()
