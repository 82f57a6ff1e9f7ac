"""Runs a function on several gloo ranks, each a process, and brings back what they return."""

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Return ``function(rank, *args)`` of every rank; it must be importable."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world_size, folder, timeout_s, function, args), nprocs=world_size)
        return [
            pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in range(world_size)
        ]


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # no name look-up, which some sandboxes lack
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        result = function(rank, *args)
        dist.barrier()  # a rank that still reads may be aborted by one that has left
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
