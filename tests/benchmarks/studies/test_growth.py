"""Exponents are slopes, and every axis is one of its loss."""

import pytest

pytest.importorskip("rich")

from benchmarks.losses import benchmark
from benchmarks.schema import Case
from benchmarks.studies.growth import AXES, exponent


def test_exponents_are_slopes():
    slope, fit = exponent([1, 2, 4, 8], [3, 12, 48, 192])
    assert slope == pytest.approx(2)
    assert fit == pytest.approx(1)


def test_axes_contain_their_base_and_name_variants():
    for axis in AXES:
        assert axis.name in axis.base
        assert len(axis.values) >= 3
        names = {variant.name for variant in Case(benchmark(axis.loss), axis.base).variants()}
        assert set(axis.variants) <= names
