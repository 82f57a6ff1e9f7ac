"""SparsityController where reading a value would wait: it steers a step later, by the same law."""

import pytest
import torch

from sparse_losses import CollapseError, SparsityController, SpladeObjective
from tools import simulated_device

if reason := simulated_device.why_not():
    pytest.skip(reason, allow_module_level=True)
simulated_device.start()
V, STEPS = 16, 25


def controller(every: int) -> SparsityController:
    objective = SpladeObjective({"document_flops": 0.1})
    return SparsityController(objective, target_active=4, every=every, ignore_steps=3 * every)


def batches() -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return [(torch.rand(6, V, generator=numbers) - 0.3).relu() for _ in range(STEPS)]


def steer(device: str, every: int, resumed_at: int | None = None) -> list[float]:
    """The weight after each step."""
    made, weights = controller(every), []
    for step, batch in enumerate(batches(), start=1):
        made.observe(batch.to(device))
        made.step()
        weights.append(made.objective.weights["document_flops"])
        if step == resumed_at:
            state = made.state_dict()
            made = controller(every)
            made.load_state_dict(state)
            assert made.objective.weights["document_flops"] == weights[-1]
    return weights


@pytest.mark.parametrize("every", [1, 4])
def test_it_steers_as_on_the_cpu_a_step_later(every):
    here, there = steer("cpu", every), steer("sim", every)
    assert len({*here}) > 3
    assert there == [0.1, *here[:-1]]


@pytest.mark.parametrize("resumed_at", [11, 12, 13])
def test_a_run_resumed_with_a_look_on_its_way_is_the_same(resumed_at):
    assert steer("sim", 4, resumed_at) == steer("sim", 4)


def test_a_look_is_not_read_twice():
    made = controller(1)
    for batch in batches()[:6]:
        made.observe(batch.to("sim"))
        made.step()
    before = made.report()
    assert made.report() == before
    assert made.state_dict() == made.state_dict()
    assert made.report() == before


def test_a_collapse_is_noticed_a_step_later():
    made = SparsityController(
        SpladeObjective({"document_flops": 0.1}), target_active=4, every=1, window=2
    )
    for _ in range(2):
        made.observe(torch.zeros(2, V, device="sim"))
        made.step()
    made.observe(torch.zeros(2, V, device="sim"))
    with pytest.raises(CollapseError, match="all rows are dead at step 2"):
        made.step()
