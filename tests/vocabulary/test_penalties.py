"""Token penalties: the formula, who is exempt from what, and in which order."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses import idf_penalty, language_penalty

IDF = torch.tensor([0.5, 1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
values = st.lists(st.floats(-20, 20).map(lambda x: round(x, 3)), min_size=1, max_size=8)


def ids_below(size):
    return st.sets(st.integers(0, size - 1))


def loop(
    idf,
    alpha=4.0,
    special_token_ids=(),
    special_penalty=100.0,
    stopword_ids=(),
    stopword_penalty=15.0,
    minimum=0.0,
    shape="exponential",
):
    ordinary = [value for j, value in enumerate(idf) if j not in special_token_ids]
    weights = []
    for j, value in enumerate(idf):
        if j in special_token_ids:
            weights.append(special_penalty)
            continue
        low, high = min(ordinary), max(ordinary)
        weight = 1.0
        if high > low:
            share = (value - low) / (high - low)
            weight = math.exp(-alpha * share) if shape == "exponential" else 1 - share
        weight = max(weight, minimum)
        weights.append(weight * stopword_penalty if j in stopword_ids else weight)
    return weights


@given(
    st.data(),
    values,
    st.floats(0, 8),
    st.floats(0, 200),
    st.floats(0, 30),
    st.floats(0, 1),
    st.sampled_from(["exponential", "linear"]),
)
def test_penalty_equals_the_formula(data, idf, alpha, sp, st_, low, shape):
    options = {
        "alpha": alpha,
        "special_token_ids": data.draw(ids_below(len(idf))),
        "special_penalty": sp,
        "stopword_ids": data.draw(ids_below(len(idf))),
        "stopword_penalty": st_,
        "minimum": low,
        "shape": shape,
    }
    got = idf_penalty(torch.tensor(idf, dtype=torch.float64), **options)
    np.testing.assert_allclose(got, loop(idf, **options), rtol=1e-12, atol=1e-12)


def test_all_tokens_may_be_special_and_there_may_be_none():
    assert idf_penalty(IDF, special_token_ids=range(5)).tolist() == [100] * 5
    assert idf_penalty(torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_halves_are_computed_in_single_precision(dtype):
    weight = idf_penalty(IDF.to(dtype).requires_grad_(), special_token_ids=[4])
    assert weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not weight.requires_grad, "a constant to the graph"
    expected = loop(IDF.tolist(), special_token_ids=[4])
    np.testing.assert_allclose(weight, expected, rtol=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("make", [tuple, set, np.array, torch.tensor])
def test_ids_may_come_in_any_form_and_repeat(make):
    ids = make([3, 1, 3])
    for name in ("special_token_ids", "stopword_ids"):
        assert torch.equal(idf_penalty(IDF, **{name: ids}), idf_penalty(IDF, **{name: [1, 3]}))
    for options in ({"allowed_ids": ids}, {"allowed_ids": [], "special_token_ids": ids}):
        assert language_penalty(5, **options).tolist() == [100, 0, 100, 0, 100]


@given(st.data(), st.integers(1, 8), st.floats(0, 1000, width=32))
def test_language_penalty_is_zero_for_allowed_and_special_tokens_only(data, size, penalty):
    allowed, special = data.draw(ids_below(size)), data.draw(ids_below(size))
    got = language_penalty(size, allowed, special_token_ids=special, penalty=penalty)
    assert got.dtype == torch.float32
    assert got.tolist() == [0.0 if j in allowed | special else penalty for j in range(size)]
