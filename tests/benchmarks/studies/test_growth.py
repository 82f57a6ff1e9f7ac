"""Exponents are slopes, and the extrapolation counts what it says."""

import pytest

pytest.importorskip("rich")

from benchmarks.losses import benchmark
from benchmarks.schema import Case
from benchmarks.studies.growth import AXES, Device, exponent, predict


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


def test_a_prediction_scales_with_the_devices():
    device = Device("d", 1e12, 1e11)
    one, eight = predict(device, 1), predict(device, 8)
    assert one[0].flops / eight[0].flops == pytest.approx(8)
    assert one[0].seconds > eight[0].seconds
    # 2 * 768 * (4096 * 512 * 0.75 * 250002 + 2 * active)
    assert one[0].flops == pytest.approx(6.04e14, rel=0.02)
    half = predict(Device("d", 1e12, 1e11, share=0.5), 1)
    assert half[0].seconds == pytest.approx(2 * one[0].seconds)
