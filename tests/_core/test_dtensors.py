"""DTensors need a PyTorch that has their operators."""

import pytest
import torch

from sparse_losses._core.dtensors import agree, beside_dtensors


class DTensor:
    """What counts as one."""

    device_mesh = None


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.12.1"])
def test_an_older_pytorch_is_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    for call in (beside_dtensors, lambda x: agree("a call", False, {"x": x})):
        with pytest.raises(
            ValueError, match=r"expected PyTorch 2\.13 or newer for DTensors, got 2"
        ):
            call(DTensor())


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1", "3.0.0a0+git1"])
def test_newer_ones_are_taken(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    beside_dtensors(DTensor())
