"""Runs a function on several gloo ranks, each a process, and brings back what they return."""

import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

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
    _leave()


def as_torchrun_would(function: Callable[..., None], *args: Any, processes: int = 2) -> None:
    """Run ``function(rank, *args)`` in so many processes, which find a gloo group's address set."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_as_torchrun_would, (function, processes, port, args), nprocs=processes)


def _as_torchrun_would(
    rank: int, function: Callable[..., None], processes: int, port: int, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    function(rank, *args)
    if dist.is_initialized():  # Lightning ends what it began
        dist.barrier()
        dist.destroy_process_group()
    _leave()


def _leave() -> NoReturn:
    """End a process that has done its work, without the interpreter's own end.

    A thread of PyTorch's that waits for the interpreter while it ends is unwound through C++ then,
    which now and then aborts the process: "terminate called without an active exception".
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
