"""LabelQueue(gather=True): one queue on all ranks, that of one process with their rows in order."""

import torch

from sparse_losses import LabelQueue
from tests.distributed.ranks import run_ranks

SIZE, DIM, LABELS, ROWS = 10, 3, 4, 2


def rows(step: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)
    return torch.randn(world * ROWS, DIM), torch.randint(0, 2, (world * ROWS, LABELS))


def fill(rank: int, world: int, gather: bool, steps: int, resume_at: int) -> dict:
    queue = LabelQueue(SIZE, DIM, LABELS, gather=gather)
    for step in range(steps):
        if step == resume_at:
            state = queue.state_dict()
            queue = LabelQueue(SIZE, DIM, LABELS, gather=gather)
            queue.load_state_dict(state)
        queue.enqueue(*(x.chunk(world)[rank] if gather else x for x in rows(step, world)))
    return {**queue.state_dict(), "mask": queue.mask}


def compare(rank: int, world: int) -> None:
    for steps, resume_at in ((1, -1), (5, -1), (5, 3)):  # partly filled; gone round; resumed
        expected = fill(0, world, False, steps, resume_at=-1)
        found = fill(rank, world, True, steps, resume_at)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_it_is_the_queue_of_one_process_also_resumed():
    run_ranks(2, compare, 2)
