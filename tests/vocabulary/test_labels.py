"""Label similarity: the formula pair by pair, and what it does where it is undefined."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses import label_similarity

METHODS = ["npmi", "jaccard"]


@st.composite
def multi_hot(draw):
    rows, columns = draw(st.integers(0, 8)), draw(st.integers(0, 4))
    bits = st.lists(st.integers(0, 1), min_size=columns, max_size=columns)
    drawn = draw(st.lists(bits, min_size=rows, max_size=rows))
    return torch.tensor(drawn, dtype=torch.int64).reshape(rows, columns)


def npmi(i, j, n):
    together = sum(a and b for a, b in zip(i, j, strict=True))
    if together in (0, n):
        return float(together > 0)
    p_ij, p_i, p_j = together / n, sum(i) / n, sum(j) / n
    return (math.log(p_ij / (p_i * p_j)) / -math.log(p_ij) + 1) / 2


def jaccard(i, j, n):
    either = sum(a or b for a, b in zip(i, j, strict=True))
    return sum(a and b for a, b in zip(i, j, strict=True)) / either if either else 0.0


def loop(labels, method):
    columns = [column.tolist() for column in labels.T]
    size, pair = len(columns), {"npmi": npmi, "jaccard": jaccard}[method]
    matrix = [
        [1.0 if i == j else pair(columns[i], columns[j], len(labels)) for j in range(size)]
        for i in range(size)
    ]
    return np.array(matrix).reshape(size, size)


@pytest.mark.parametrize("method", METHODS)
@given(multi_hot())
def test_similarity_equals_the_formula(method, labels):
    got = label_similarity(labels.double(), method=method)
    assert got.dtype == torch.float64
    assert ((got >= 0) & (got <= 1)).all()
    np.testing.assert_allclose(got, loop(labels, method), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.half, torch.float])
def test_any_dtype_of_labels_gives_the_double_result_in_single_precision(method, dtype):
    labels = (torch.rand(40, 5) < 0.4).to(dtype)
    got = label_similarity(labels.requires_grad_(dtype.is_floating_point), method=method)
    assert not got.requires_grad, "a constant to the graph"
    assert got.dtype == torch.float32
    assert torch.equal(got, label_similarity(labels.double(), method=method).float())
    assert got[0, 1] > 0
