"""A rank that leaves, or holds a NaN: an error on the others, or their value."""

import multiprocessing
import os
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from tests.cases import FIRST, to_tensors
from tests.distributed.ranks import run_ranks
from tests.distributed.test_gather import part, whole

TIMEOUT = 20  # seconds, of the process group


def rank_of_two(rank: int, meeting: str, pipe: Connection) -> None:
    """Stay, and send what a forward and a backward pass say; or leave after a forward pass."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timeout)

    def info_nce() -> torch.Tensor:
        tensors = FIRST["info_nce"].tensors(3)
        tensors["anchor"].requires_grad_()
        return FIRST["info_nce"].function()(**tensors, gather=True)

    value, said = info_nce(), []
    for call in (value.backward, info_nce) if rank == 0 else ():
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    pipe.send(said)
    os._exit(0)  # a thread of gloo may abort the interpreter's own end


def test_a_rank_that_leaves_within_a_step_ends_the_others_calls(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    for rank in range(2):
        spawn.Process(target=rank_of_two, args=(rank, f"file://{tmp_path}/meeting", theirs)).start()
    assert sorted(len(ours.recv()) for _ in range(2)) == [0, 2]


def nan_on_one(rank: int) -> list[str]:
    hidden = []
    for stem, case in FIRST.items():
        mine = to_tensors(part(case, whole(case, 2, seed=2), rank, 2))
        leaf = mine[case.differentiable[0]]
        leaf[:rank] = torch.nan
        value = case.function()(
            **mine | {case.differentiable[0]: leaf.requires_grad_()}, gather=True
        )
        value.backward()
        if not value.isnan() or leaf.grad.shape != leaf.shape:
            hidden.append(stem)
    return hidden


def test_a_nan_on_one_rank_is_the_value_of_all_and_nobody_waits():
    assert run_ranks(2, nan_on_one) == [[], []]
