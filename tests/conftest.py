"""One thread, one seed a test, and Hypothesis without deadlines."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)  # test modules import `tests.cases` and `tests.oracles`

torch.set_num_threads(1)

_common = {
    "deadline": None,
    "max_examples": 30,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("dev", **_common)
settings.register_profile("ci", derandomize=True, **_common)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["plain", "fused"])
def path(request, monkeypatch):
    """By the plain formula, and by the hand-written gradient, whatever the size of the input."""
    from sparse_losses._core import fused

    fewest = {"plain": 10**18, "fused": 0}[request.param]
    monkeypatch.setattr(fused, "FEWEST_ELEMENTS", fewest)
    return request.param
