"""SparsityController on several ranks: it sees the texts of all, and its state is theirs."""

import pytest
import torch
import torch.distributed as dist

from sparse_losses import SparsityController, SpladeBatch, SpladeObjective, Texts
from tests.distributed.ranks import run_ranks

V = 16


def controller(gather: bool = False) -> SparsityController:
    weights = {"info_nce": 1.0, "document_flops": 0.1}
    return SparsityController(SpladeObjective(weights, gather=gather), target_active=4)


def batches(steps: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [(torch.rand(6, V) - 0.3).relu() for _ in range(steps)]


def steer(rank: int, world: int, steps: int, saved_by: int | None) -> dict:
    """Each rank observes its rows; one rank's state replaces all."""
    made = controller()
    for number, batch in enumerate(batches(steps)):
        if number == saved_by:
            states = [made.state_dict()]
            dist.broadcast_object_list(states, src=saved_by)
            made = controller()
            made.load_state_dict(states[0])
        made.observe(batch.chunk(world)[rank])
        made.step()
    return made.state_dict()


@pytest.mark.parametrize("saved_by", [None, 1])
def test_the_state_is_that_of_one_process_also_resumed(saved_by):
    expected = steer(0, 1, 13, None)
    assert expected["started_at"] is not None
    for state in run_ranks(2, steer, 2, 13, saved_by):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert state[name] == (pytest.approx(value) if isinstance(value, float) else value)


def attach(rank: int, world: int) -> dict:
    """Follow the objective's batches until FLOPS has started."""
    made = controller(gather=True)
    made.attach(optimizer := torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    for batch in batches(8):
        texts = Texts(batch.chunk(world)[rank])
        made.objective(SpladeBatch(texts, texts))
        optimizer.step()
    return made.state_dict()


def test_the_first_weight_is_that_of_one_process():
    alone, (one, other) = attach(0, 1), run_ranks(2, attach, 2)
    assert one == other
    assert one["ranking"] == pytest.approx(alone["ranking"], rel=1e-5)
    assert one["first_weight"] == pytest.approx(alone["first_weight"], rel=1e-5)


def posting(rank: int, world: int, late: bool) -> dict:
    """Steer by the longest list; the first rank may have no text in the first steps."""
    made = SparsityController(weight=1.0, target_posting=0.1)
    for number, batch in enumerate(batches(12)):
        if not (late and rank == 0 and number < 3):
            made.observe(batch.chunk(world)[rank])
        made.step()
    return made.state_dict()


def test_the_longest_list_is_that_of_all_ranks():
    one, other = run_ranks(2, posting, 2, False)
    assert one == other
    assert one["level"] == pytest.approx(posting(0, 1, False)["level"])
    one, other = run_ranks(2, posting, 2, True)
    assert one.pop("frequency") != other.pop("frequency"), "a rank without texts forgets none"
    assert one == other


def observe_on_some(rank: int, observers: tuple[int, ...]) -> tuple[str, float]:
    made = controller()
    message = ""
    for _ in range(50):
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
