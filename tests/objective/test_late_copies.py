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


def make_controller(every: int) -> SparsityController:
    objective = SpladeObjective({"document_flops": 0.1})
    return SparsityController(objective, target_active=4, every=every, ignore_steps=3 * every)


def batches() -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return [(torch.rand(6, V, generator=numbers) - 0.3).relu() for _ in range(STEPS)]


def steer(every: int, resumed_at: int | None = None) -> list[float]:
    """Return the weight after each step."""
    controller, weights = make_controller(every), []
    for step, batch in enumerate(batches(), start=1):
        controller.observe(batch)
        controller.step()
        weights.append(controller.objective.weights["document_flops"])
        if step == resumed_at:
            state = controller.state_dict()
            controller = make_controller(every)
            controller.load_state_dict(state)
            assert controller.objective.weights["document_flops"] == weights[-1]
    return weights


@pytest.mark.parametrize("every", [1, 4])
def test_it_steers_as_on_the_cpu_a_step_later(every, request):
    at_once = steer(every)
    request.getfixturevalue("accelerator")
    assert len({*at_once}) > 3
    assert steer(every) == [0.1, *at_once[:-1]]


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("resumed_at", [11, 12, 13])
def test_run_resumed_with_a_measurement_on_its_way_is_the_same(resumed_at):
    assert steer(4, resumed_at) == steer(4)


@pytest.mark.usefixtures("accelerator")
def test_collapse_is_noticed_a_step_later():
    controller = SparsityController(
        SpladeObjective({"document_flops": 0.1}), target_active=4, every=1, window=2
    )
    for _ in range(2):
        controller.observe(torch.zeros(2, V))
        controller.step()
    controller.observe(torch.zeros(2, V))
    with pytest.raises(CollapseError, match="all rows are dead at step 2"):
        controller.step()
