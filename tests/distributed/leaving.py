"""What the ranks that stay see of one that leaves: ``python -m tests.distributed.leaving``.

Imports once, then forks the ranks of every scenario, all at the same time, each with a process
group of its own. Prints, as JSON, what each rank said and after how many seconds.
"""

import functools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import sparse_losses as sl
from tests.cases import FIRST, LOSSES

TIMEOUT = 5  # seconds, of the process groups
V = 8
Calls = dict[str, Callable[[], Any]]


def of_a_loss(stem: str, **options: Any) -> torch.Tensor:
    tensors = FIRST[stem].tensors(3)
    for name in FIRST[stem].differentiable:
        tensors[name].requires_grad_()
    return FIRST[stem].function()(**tensors, gather=True, **options)


def of_a_counter(counter: Any, *batch: torch.Tensor) -> None:
    counter.update(*batch)
    counter.all_reduce()


def enqueue() -> None:
    sl.LabelQueue(9, V, 2, gather=True).enqueue(torch.rand(4, V), torch.ones(4, 2))


def collective(name: str) -> None:
    getattr(sl.distributed, name)(torch.rand(4, V, requires_grad=True))


COLLECTIVES = "gather_rows", "sum_over_ranks", "scatter_sum", "maximum_over_ranks"
IN_BACKWARD = "info_nce"  # whose gradients communicate
IDS = torch.tensor([[1, 2]])
CALLS: Calls = {
    **{stem: functools.partial(of_a_loss, stem) for stem in LOSSES},
    **{
        f"{stem}, definition": lambda s=stem: of_a_loss(s, impl="definition")
        for stem in ("info_nce", "nws")
    },
    **{name: functools.partial(collective, name) for name in COLLECTIVES},
    "queue": enqueue,
    "diagnostics": lambda: of_a_counter(sl.Diagnostics(V), torch.rand(4, V)),
    "document_frequency": lambda: of_a_counter(sl.DocumentFrequency(V), IDS, torch.ones(1, 2)),
}


def stay(leaves: bool, seconds: float, calls: Calls) -> dict[str, Any]:
    """What each call says of a rank that stays, once the other, silent for so long, has left."""
    value = CALLS[IN_BACKWARD]()
    if leaves:
        time.sleep(seconds)
        os._exit(3)
    said = {}
    for name, call in (calls or {IN_BACKWARD: value.backward}).items():
        start, said[name] = time.monotonic(), ["", 0.0]
        try:
            call()
        except Exception as error:
            said[name][0] = f"{type(error).__name__}: {error}".splitlines()[0]
        said[name][1] = time.monotonic() - start
    return said


SCENARIOS: dict[str, tuple[float, Calls]] = {
    "exits": (0, CALLS),
    "is silent": (TIMEOUT + 2, {"info_nce": CALLS["info_nce"]}),
    "exits before the backward pass": (0, {}),  # whose forward pass all ranks were in
}


def rank_of(number: int, meeting: str, scenario: str, pipe: Connection) -> None:
    timeout, place = timedelta(seconds=TIMEOUT), {"rank": number, "world_size": 2}
    dist.init_process_group("gloo", init_method=meeting, timeout=timeout, **place)
    pipe.send(stay(number == 1, *SCENARIOS[scenario]))
    os._exit(0)  # a thread of gloo may abort the interpreter's own end


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    fork, ranks = multiprocessing.get_context("fork"), []
    with tempfile.TemporaryDirectory() as folder:
        for place, name in enumerate(SCENARIOS):
            for number in range(2):
                ours, theirs = fork.Pipe(duplex=False)
                args = number, f"file://{folder}/{place}", name, theirs
                ranks.append((name, fork.Process(target=rank_of, args=args), ours))
                ranks[-1][1].start()
                theirs.close()
        found: dict[str, list[Any]] = {name: [] for name in SCENARIOS}
        for name, process, pipe in ranks:
            process.join()
            found[name].append([process.exitcode, pipe.recv() if not process.exitcode else None])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
