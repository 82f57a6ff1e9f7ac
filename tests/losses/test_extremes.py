"""Inputs of any magnitude in fp32, held against the same numbers in fp64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import FIRST, to_tensors
from tests.strategies import MAGNITUDES, seeds

# Cosines and standardised scores do not see a magnitude; temperatures are those of the table.
ANY_MAGNITUDE = {
    "info_nce": ("anchor", "positive"),
    "triplet_margin": ("anchor", "positive", "negative"),
    "nws": ("query", "prototype", "key", "queue"),
    "positive_activation": ("activations",),
}


@pytest.mark.parametrize("stem", ANY_MAGNITUDE)
@given(seed=seeds, data=st.data())
def test_any_magnitude_in_fp32_is_as_in_fp64(stem, seed, data):
    case = FIRST[stem]
    tensors = to_tensors(case.arrays(seed=seed), torch.float32)
    for name in ANY_MAGNITUDE[stem]:
        if tensors.get(name) is None:
            continue
        scale = data.draw(st.sampled_from(MAGNITUDES), label=name)
        x = tensors[name].abs() if name == "activations" else tensors[name]  # whose sum may cancel
        tensors[name] = (x * scale).requires_grad_(name in case.differentiable)
    exact = dict(tensors)
    for name, x in tensors.items():
        if x is not None and x.is_floating_point():
            exact[name] = x.detach().double().requires_grad_(x.requires_grad)
    value, expected = case.function()(**tensors), case.function()(**exact)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    for name in case.differentiable:
        size = exact[name].grad.abs().amax(-1, keepdim=True)  # what a row's sums are made of
        wrong = (tensors[name].grad.double() - exact[name].grad).abs() > 1e-4 * size + 1e-37
        assert not wrong.any(), name
