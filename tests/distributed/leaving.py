"""What the ranks that stay see of one that leaves: ``python -m tests.distributed.leaving``.

Imports once, then forks the ranks of every scenario, all at the same time, each with a process
group of its own. Prints, as JSON, what each rank said and after how many seconds.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sparse_losses as sl
from tests.cases import FIRST, LOSSES

TIMEOUT = 5  # seconds, of the process groups
V = 8


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    anchor, positive = torch.rand(2, 4, V)
    return anchor.requires_grad_(), positive.requires_grad_()


def of_a_loss(stem: str, **options: Any) -> Callable[[], torch.Tensor]:
    case = FIRST[stem]

    def call() -> torch.Tensor:
        tensors = case.tensors(3)
        for name in case.differentiable:
            tensors[name].requires_grad_()
        return case.function()(**tensors, gather=True, **options)

    return call


def count() -> None:
    seen = sl.DocumentFrequency(V)
    seen.update(torch.tensor([[1, 2]]), torch.ones(1, 2))
    seen.all_reduce()


def diagnose() -> None:
    seen = sl.Diagnostics(V)
    seen.update(batch()[0])
    seen.all_reduce()


CALLS: dict[str, Callable[[], torch.Tensor | None]] = {
    **{stem: of_a_loss(stem) for stem in LOSSES},
    **{f"{stem}, definition": of_a_loss(stem, impl="definition") for stem in ("info_nce", "nws")},
    "queue": lambda: sl.LabelQueue(9, V, 2, gather=True).enqueue(
        batch()[1].detach(), torch.ones(4, 2)
    ),
    "diagnostics": diagnose,
    "document_frequency": count,
    "gather_rows": lambda: sl.distributed.gather_rows(batch()[0]).sum(),
    "sum_over_ranks": lambda: sl.distributed.sum_over_ranks(batch()[0]).sum(),
    "scatter_sum": lambda: sl.distributed.scatter_sum(batch()[0]).sum(),
    "maximum_over_ranks": lambda: sl.distributed.maximum_over_ranks(batch()[0]).sum(),
}
IN_BACKWARD = "info_nce"  # whose gradients communicate


def tried(function: Callable[[], Any]) -> tuple[str, float]:
    start = time.monotonic()
    try:
        function()
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    return said, time.monotonic() - start


def stay(leaves: bool, leave: Callable[[], None], names: tuple[str, ...]) -> dict[str, Any]:
    """Every call by a rank that stays, after the others have left."""
    CALLS["info_nce"]()
    if leaves:
        leave()
    return {name: tried(CALLS[name]) for name in names}


def stay_in_backward(leaves: bool) -> dict[str, Any]:
    """A backward pass whose forward pass all ranks were in."""
    value = CALLS[IN_BACKWARD]()
    if leaves:
        leave_at_once()
    return {IN_BACKWARD: tried(value.backward)}


def leave_at_once() -> None:
    os._exit(3)


def leave_slowly() -> None:
    """Still there, and silent for longer than the others wait."""
    time.sleep(TIMEOUT + 2)
    os._exit(3)


SCENARIOS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "exits": lambda leaves: stay(leaves, leave_at_once, tuple(CALLS)),
    "is silent": lambda leaves: stay(leaves, leave_slowly, ("info_nce",)),
    "exits before the backward pass": stay_in_backward,
}


def rank_of(number: int, folder: Path, run: Callable[[bool], dict[str, Any]]) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=number,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT),
    )
    found = run(number == 1)
    (folder / f"{number}.json").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # a thread of gloo may abort the interpreter's own end


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as root:
        ranks = []
        for place, (name, run) in enumerate(SCENARIOS.items()):
            folder = Path(root) / str(place)
            folder.mkdir()
            for number in range(2):
                args = number, folder, run
                process = multiprocessing.get_context("fork").Process(target=rank_of, args=args)
                process.start()
                ranks.append((name, process, folder / f"{number}.json"))
        for name, process, said in ranks:
            process.join()
            calls = json.loads(said.read_text(encoding="utf-8")) if said.exists() else None
            found.setdefault(name, []).append([process.exitcode, calls])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
