"""Scores of several teachers: the formula in loops, its invariances, its edges."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import mix_teachers
from tests.strategies import draw, seeds


def moments(row):
    """Mean and standard deviation of a dict of scores by candidate."""
    if not row:
        return 0.0, 0.0
    mean = math.fsum(row.values()) / len(row)
    variance = math.fsum((x - mean) ** 2 for x in row.values()) / len(row)
    return mean, 0.0 if len(set(row.values())) == 1 else math.sqrt(variance)


def standardized(row):
    mean, spread = moments(row)
    return {c: (x - mean) / spread if spread else 0.0 for c, x in row.items()}


def oracle(teachers, weights, reference, mask):
    """The mixture, row by row; the reference has a score in every row."""
    expected = np.full(teachers[0].shape, -np.inf)
    for i in range(len(expected)):
        rows = [
            {c: float(x) for c, x in enumerate(t[i]) if x != -np.inf and mask[i, c]}
            for t in teachers
        ]
        mixed = {}
        for c in range(expected.shape[1]):
            present = [
                (w, standardized(row)[c])
                for w, row in zip(weights, rows, strict=True)
                if w > 0 and c in row
            ]
            if present:
                total = math.fsum(w for w, _ in present)
                mixed[c] = math.fsum(w * z for w, z in present) / total
        mean, spread = moments(rows[reference])
        for c, z in standardized(mixed).items():
            expected[i, c] = mean + spread * z
    return expected


@given(seeds, st.integers(1, 4))
def test_value_is_the_formula_for_teachers_with_gaps(seed, count):
    rng = np.random.default_rng(seed)
    shape = (rng.integers(1, 4), rng.integers(1, 6))
    teachers = [rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4) for _ in range(count)]
    for teacher in teachers:
        teacher[rng.random(shape) < 0.25] = -np.inf
    reference = int(rng.integers(count))
    teachers[reference][:, 0] = rng.normal(size=shape[0])  # it has a score in every row
    weights = rng.random(count) * (rng.random(count) < 0.8)
    weights[rng.integers(count)] = 0.5
    mask = rng.random(shape) < 0.8
    mask[:, 0] = True
    mixed = mix_teachers(
        [torch.from_numpy(x) for x in teachers],
        weights=weights.tolist(),
        reference=reference,
        candidate_mask=torch.from_numpy(mask),
    )
    expected = oracle(teachers, weights, reference, mask)
    torch.testing.assert_close(mixed, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


@given(seeds, st.floats(1e-3, 1e3), st.floats(-1e3, 1e3))
def test_only_the_reference_sets_shift_and_scale(seed, scale, shift):
    one, two, three = (draw(seed + n, 3, 5) for n in range(3))
    mixed = mix_teachers([one, two, three], weights=[1.0, 2.0, 0.5])
    moved = mix_teachers([one, scale * two + shift, three], weights=[1.0, 2.0, 0.5])
    torch.testing.assert_close(moved, mixed, rtol=1e-8, atol=1e-8)
    given_numbers = mix_teachers([one, two], reference=(4.0, 2.0))
    for found, mean, spread in (
        (mixed, one.mean(1), one.std(1, correction=0)),
        (given_numbers, torch.full_like(one[:, 0], 4.0), torch.full_like(one[:, 0], 2.0)),
    ):
        torch.testing.assert_close(found.mean(1), mean)
        torch.testing.assert_close(found.std(1, correction=0), spread)


@given(seeds)
def test_one_teacher_or_equal_ones_are_the_identity(seed):
    scores = draw(seed, 4, 5)
    scores[1, 2:] = -torch.inf
    scores[2] = 0.1  # all equal
    scores[3] = -torch.inf
    torch.testing.assert_close(mix_teachers([scores]), scores)
    torch.testing.assert_close(mix_teachers([scores, 3 * scores - 1], weights=[1, 4]), scores)


def test_a_row_that_the_reference_lacks_gets_its_mean_moments():
    reference = torch.tensor([[3.0, 1.0], [9.0, 3.0], [-torch.inf, -torch.inf]])
    other = torch.tensor([[0.0, 1.0], [0.0, 1.0], [5.0, 4.0]])
    mixed = mix_teachers([reference, other], weights=[0.0, 1.0])
    torch.testing.assert_close(mixed, torch.tensor([[1.0, 3.0], [3.0, 9.0], [6.0, 2.0]]))


def test_the_result_has_no_gradient_and_the_dtype_of_the_computation():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape in ((0, 3), (2, 0), (2, 3)):
            mixed = mix_teachers([torch.ones(shape, dtype=dtype, requires_grad=True)] * 2)
            assert mixed.shape == shape
            assert mixed.dtype == torch.promote_types(dtype, torch.float32)
            assert not mixed.requires_grad


def test_a_nan_shows_in_its_row_unless_it_is_masked():
    scores = torch.tensor([[1.0, torch.nan, 2.0], [1.0, 2.0, 3.0]])
    mixed = mix_teachers([torch.ones(2, 3).cumsum(1), scores])
    assert mixed.isnan().tolist() == [[True] * 3, [False] * 3]
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    assert mix_teachers([scores], candidate_mask=mask)[0].tolist() == [1.0, -torch.inf, 2.0]


@pytest.mark.parametrize(
    ("scores", "options", "words"),
    [
        ([], {}, "scores"),
        (torch.zeros(2, 3), {}, "scores"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], {}, "C"),
        ([torch.zeros(2, 3, dtype=torch.int64)], {}, "floating"),
        ([torch.zeros(2, 3)], {"weights": [1.0, 1.0]}, "weights"),
        ([torch.zeros(2, 3)], {"weights": [0.0]}, "weights"),
        ([torch.zeros(2, 3)], {"weights": [-1.0]}, r"weights\[0\]"),
        ([torch.zeros(2, 3)], {"reference": 1}, "reference"),
        ([torch.zeros(2, 3)], {"reference": (0.0, -1.0)}, r"reference\[1\]"),
        ([torch.zeros(2, 3)], {"candidate_mask": torch.ones(2, 2)}, "candidate_mask"),
    ],
)
def test_errors_name_what_is_wrong(scores, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        mix_teachers(scores, **options)
