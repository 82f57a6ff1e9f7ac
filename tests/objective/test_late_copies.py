"""The controller on an accelerator, where a measurement arrives a step after it was sent."""

import pytest
import torch

from sparse_losses import CollapseError, SparsityController, SpladeObjective
from sparse_losses._core.host_copy import HostCopy

V, STEPS = 16, 25


class LateCopy(HostCopy):
    """A copy of a CPU tensor that counts as not here yet, as one of an accelerator's does."""

    def __init__(self, *args):
        super().__init__(*args)
        self.is_here = False


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr("sparse_losses.objective.controller.HostCopy", LateCopy)


def make_controller() -> SparsityController:
    return SparsityController(SpladeObjective({"document_flops": 0.1}), target_active=4)


def batches() -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return [(torch.rand(6, V, generator=numbers) - 0.3).relu() for _ in range(STEPS)]


def steer(resumed_at: int | None = None) -> list[float]:
    """Return the weight after each step."""
    controller, weights = make_controller(), []
    for step, batch in enumerate(batches(), start=1):
        controller.observe(batch)
        controller.step()
        weights.append(controller.objective.weights["document_flops"])
        if step == resumed_at:
            state = controller.state_dict()
            controller = make_controller()
            controller.load_state_dict(state)
            assert controller.objective.weights["document_flops"] == weights[-1]
    return weights


def test_it_steers_as_on_the_cpu_a_step_later(request):
    at_once = steer()
    request.getfixturevalue("accelerator")
    assert len({*at_once}) > 10
    assert steer() == [0.0, *at_once[:-1]]


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("resumed_at", [4, 5, 12])
def test_run_resumed_with_a_measurement_on_its_way_is_the_same(resumed_at):
    assert steer(resumed_at) == steer()


@pytest.mark.usefixtures("accelerator")
def test_collapse_is_noticed_a_step_later():
    controller = make_controller()
    controller.steps = 100  # a window of four
    for _ in range(4):
        controller.observe(torch.zeros(2, V))
        controller.step()
    controller.observe(torch.zeros(2, V))
    with pytest.raises(CollapseError, match="all rows are dead at step 4"):
        controller.step()
