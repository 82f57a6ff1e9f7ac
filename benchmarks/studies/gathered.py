"""``python -m benchmarks.studies.gathered``: what ranks send in a step with ``gather=True``.

Queries and documents are random vectors with a share of active entries, dense or as CSR. The loss
is InfoNCE on dot products of all ranks' rows. Bytes are those of a rank, forward and backward: the
tensors that it gathers, its own rows included, and those that it gives to be summed. Value and
gradient, in fp64, are compared with those of one process that holds all rows.
"""

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparse_losses
from benchmarks.run.table import RESULTS, circumstances, markdown, write

LAYOUTS = {"dense": torch.strided, "CSR": torch.sparse_csr}


class Sent(TorchDispatchMode):
    """Sum the bytes of the larger side of every collective operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it moves if it is collective."""
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            self.bytes += max(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


def vectors(rows: int, vocabulary: int, active: float, dtype: torch.dtype) -> list[Tensor]:
    """Draw queries and documents, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    both = torch.rand(2, rows, vocabulary, generator=generator, dtype=dtype)
    return list((both - (1 - active)).relu() / active)


def step(
    sides: Sequence[Tensor], layout: torch.layout, gather: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return value and gradients of InfoNCE."""
    leaves = [x.to_sparse(layout=layout) if layout != torch.strided else x for x in sides]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    value = sparse_losses.info_nce_loss(*leaves, similarity="dot", temperature=1.0, gather=gather)
    gradients = torch.autograd.grad(value, leaves)
    return value.detach(), [x.to_dense() if x.layout != torch.strided else x for x in gradients]


def measure(rank: int, ranks: int, meeting: str, shape: tuple[int, int, float]) -> None:
    """Count and compare on one rank; the first writes what it found."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # no name look-up
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    pairs, vocabulary, active = shape
    found = []
    for name, layout in LAYOUTS.items():
        row: dict[str, Any] = {"ranks": ranks, "pairs": pairs, "V": vocabulary, "active": active}
        for dtype in (torch.float32, torch.float64):
            every = vectors(ranks * pairs, vocabulary, active, dtype)
            own = [x[rank * pairs : (rank + 1) * pairs] for x in every]
            with Sent() as sent:
                value, gradients = step(own, layout, gather=True)
            if dtype == torch.float32:
                row |= {"layout": name, "mib_sent": sent.bytes / 2**20}
        expected, whole = step(every, layout, gather=False)
        row["value_difference"] = abs(value / expected - 1).item()
        # DDP divides the gradients by the number of ranks.
        pieces = [x[rank * pairs : (rank + 1) * pairs] for x in whole]
        off = [
            ((a / ranks - b).norm() / b.norm()).item()
            for a, b in zip(gradients, pieces, strict=True)
        ]
        found.append(row | {"gradient_difference": max(off)})
    if rank == 0:
        torch.save(found, f"{meeting}.found")
    dist.barrier()
    os._exit(0)  # gloo's threads may hold up the end of the interpreter


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure on 2 and 4 ranks, write the CSV, and print the table."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.studies.gathered")
    options.add_argument("--output", type=Path, default=RESULTS / "gathered.csv")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--pairs", type=int, default=32, help="of a rank")
    options.add_argument("--vocabulary", type=int, default=250_002)
    options.add_argument("--active", type=float, nargs="+", default=[0.001, 0.01])
    args = options.parse_args(arguments)
    rows = []
    for ranks in args.ranks:
        for active in args.active:
            with tempfile.TemporaryDirectory() as folder:
                meeting = f"{folder}/meeting"
                shape = (args.pairs, args.vocabulary, active)
                mp.spawn(measure, (ranks, meeting, shape), nprocs=ranks)
                found = torch.load(f"{meeting}.found", weights_only=True)
            rows += [row | circumstances(torch.device("cpu"), "gathered") for row in found]
    write(args.output, rows)
    columns = list(rows[0])[:8]
    print(
        markdown(
            columns,
            [
                [
                    f"{row[name]:.4g}" if isinstance(row[name], float) else row[name]
                    for name in columns
                ]
                for row in rows
            ],
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
