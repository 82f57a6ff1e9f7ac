"""Ranks that are threads of this process: a collective is a meeting at a barrier.

A real group costs seconds to start (tests/distributed/ranks.py); this one nothing, so that every
loss can be tried with it wherever one of its lines changes.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import sparse_losses.distributed as ours

TIMEOUT = 10.0  # seconds of a rank that waits for another


def run_threads(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return ``function(rank, *args)`` of every rank; the first error is raised again."""
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []
    group = _Group(world_size)

    def work(rank: int) -> None:
        group.local.rank = rank
        try:
            results[rank] = function(rank, *args)
        except BaseException as error:
            errors.append(error)
            group.barrier.abort()  # or the others would wait

    with group.installed():
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # The others' errors are that they waited in vain.
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results


class _Group:
    def __init__(self, world_size: int) -> None:
        self.size = world_size
        self.barrier = threading.Barrier(world_size, timeout=TIMEOUT)
        self.local = threading.local()
        self.sent: list[Tensor | None] = [None] * world_size

    def everyones(self, x: Tensor) -> list[Tensor]:
        """What every rank sent, which must be alike, and in memory as it is read."""
        assert x.is_contiguous()
        self.sent[self.local.rank] = x.detach().clone()
        self.barrier.wait()
        sent = [x for x in self.sent if x is not None]
        self.barrier.wait()  # nobody sends again before all have read
        assert len({(each.shape, each.dtype) for each in sent}) == 1
        return sent

    def all_gather(self, out: Tensor, x: Tensor, group: None) -> None:
        out.copy_(torch.cat(self.everyones(x)))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        out.copy_(sum(self.everyones(x)).chunk(self.size)[self.local.rank])

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        combine = torch.maximum if op == dist.ReduceOp.MAX else torch.add
        x.copy_(functools.reduce(combine, self.everyones(x)))

    @contextmanager
    def installed(self) -> Iterator[None]:
        with (
            mock.patch.multiple(
                dist,
                is_initialized=lambda: True,
                get_world_size=lambda: self.size,
                get_rank=lambda: self.local.rank,
                get_backend=lambda: "gloo",
                all_reduce=self.all_reduce,
            ),
            mock.patch.multiple(
                ours, _all_gather=self.all_gather, _reduce_scatter=self.reduce_scatter
            ),
        ):
            yield
