"""SparsityController on several ranks: it sees the texts of all, and its state is theirs."""

import pytest
import torch
import torch.distributed as dist

from sparse_losses import SparsityController, SpladeObjective
from tests.distributed.ranks import run_ranks

V, EVERY = 16, 4


def controller() -> SparsityController:
    objective = SpladeObjective({"document_flops": 0.1})
    return SparsityController(objective, target_active=4, ignore_steps=0, every=EVERY)


def batches(steps: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [(torch.rand(6, V) - 0.3).relu() for _ in range(steps)]


def steer(rank: int, world: int, steps: int, saved_by: int | None) -> dict:
    """Each rank observes its rows; halfway through a window one rank's state replaces all."""
    made = controller()
    for number, batch in enumerate(batches(steps)):
        if saved_by is not None and number == EVERY + 2:
            states = [made.state_dict()]
            dist.broadcast_object_list(states, src=saved_by)
            made = controller()
            made.load_state_dict(states[0])
        made.observe(batch.chunk(world)[rank])
        made.step()
    return made.state_dict()


@pytest.mark.parametrize("saved_by", [None, 0, 1])
def test_the_state_is_that_of_one_process_also_resumed_within_a_window(saved_by):
    steps = 3 * EVERY + 1
    expected = steer(0, 1, steps, None)
    *sums, count, _, _ = expected.pop("seen")  # of an open window, with the number of its batches
    for state in run_ranks(2, steer, 2, steps, saved_by):
        assert state.pop("seen") == pytest.approx([*sums, 2 * count, 0.0, 0.0])  # two a step
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            is_number = isinstance(value, (float, list, tuple))
            assert state[name] == (pytest.approx(value) if is_number else value), name


def observe_on_some(rank: int, observers: tuple[int, ...]) -> tuple[str, float]:
    made = controller()
    message = ""
    for _ in range(EVERY):
        if rank in observers:
            made.observe(torch.ones(2, V))
        try:
            made.step()
        except RuntimeError as error:
            message = str(error)
    return message, made.objective.weights["document_flops"]


def test_a_rank_that_observes_nothing_leaves_nobody_waiting():
    one, other = run_ranks(2, observe_on_some, (1,))
    assert one == other
    message, weight = one
    assert message == ""
    assert weight > 0.1, "too dense: the weight rose, on both ranks"


def test_without_any_observation_every_rank_says_so():
    for message, _ in run_ranks(2, observe_on_some, ()):
        assert "expected `observe(activations)` before `step()`, got none" in message
