"""Runs functions on several gloo ranks, each a process, and brings back what they return.

Starting a process costs seconds, so the ranks stay and wait for the next function; a failure ends
them, and the next call starts others.
"""

import atexit
import importlib
import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)  # of a rank that waits for another


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return ``function(rank, *args)`` of every rank; it must be importable."""
    if world_size not in _GROUPS:
        _GROUPS[world_size] = _Group(world_size)
    try:
        return _GROUPS[world_size].call(function, args)
    except BaseException:
        _GROUPS.pop(world_size).close()
        raise


class _Group:
    """Processes of one process group, and a pipe to each."""

    def __init__(self, world_size: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.processes, self.pipes = [], []
        for rank in range(world_size):
            pipe, theirs = mp.get_context("spawn").Pipe()
            args = rank, world_size, f"file://{self.folder.name}/meeting", theirs
            self.processes.append(mp.get_context("spawn").Process(target=_serve, args=args))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(pipe)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        found = {}
        while len(found) < len(self.pipes):
            for pipe in wait([pipe for pipe in self.pipes if pipe not in found]):
                result, error = pickle.loads(pipe.recv_bytes())
                assert not error, f"on rank {self.pipes.index(pipe)}:\n{error}"
                found[pipe] = result
        return [found[pipe] for pipe in self.pipes]

    def close(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self.folder.cleanup()


_GROUPS: dict[int, _Group] = {}


@atexit.register
def _close() -> None:
    for group in _GROUPS.values():
        group.close()


def _serve(rank: int, world_size: int, meeting: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # no name look-up, which some sandboxes lack
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the tests have ended
            leave()
        try:
            answer = function(rank, *args), ""
            dist.barrier()  # a rank that still reads may be aborted by one that has left
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))


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
    leave()


def leave() -> NoReturn:
    """End a process that has done its work, without the interpreter's own end.

    A thread of gloo may still hold the last tensor that was sent. Where it lets go of it while the
    interpreter ends, it asks for the interpreter's lock, is unwound through C++ that allows no
    exception, and aborts the process: "terminate called without an active exception". That is
    PyTorch's, at least to 2.13, `destroy_process_group` or not (its issue 190489).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def example(name: str = "train_with_ddp") -> Any:
    """The module of an example."""
    folder = str(Path(__file__).resolve().parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
