"""``python -m benchmarks.studies.ranks``: InfoNCE over the rows of several gloo ranks.

Every rank is a process on this machine. Memory is the maximum over ranks, without gloo's buffers
and the gradients themselves; time is that of the slowest rank.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.run.memory import peak_bytes
from benchmarks.run.table import RESULTS, circumstances, markdown, write
from benchmarks.run.timing import columns as quartiles
from benchmarks.run.timing import speedup
from sparse_losses.distributed import gather_rows, sum_over_ranks
from sparse_losses.functional import info_nce_loss

SIZES = ((256, 256), (1024, 256), (64, 30_522))  # rows per rank, columns
DENSITY = {30_522: 0.01}  # otherwise dense
CPU = torch.device("cpu")


def eager(anchor: Tensor, positive: Tensor, temperature: float = 0.07) -> Tensor:
    """Plain formula on gathered positives; the mean of the ranks' means."""
    anchor, positive = (torch.nn.functional.normalize(x, dim=1) for x in (anchor, positive))
    scores = anchor @ gather_rows(positive).T / temperature
    own = dist.get_rank() * len(anchor) + torch.arange(len(anchor))
    return sum_over_ranks(torch.nn.functional.cross_entropy(scores, own)) / dist.get_world_size()


VARIANTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eager": eager,
    "gather=True": lambda a, p: info_nce_loss(a, p, gather=True),
    'impl="blocks"': lambda a, p: info_nce_loss(a, p, gather=True, impl="blocks"),
}


def work(rank: int, world: int, folder: str, rounds: int, sizes: Sequence[tuple[int, int]]) -> None:
    """Measure all sizes and variants on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
    )
    rows = [row for size in sizes for row in measure(*size, rounds)]
    if rank == 0:
        torch.save(rows, Path(folder, "rows.pt"))
    dist.destroy_process_group()
    os._exit(0)  # at the interpreter's own end a thread of gloo may abort (PyTorch's issue 190489)


def measure(batch: int, columns: int, rounds: int) -> list[dict[str, object]]:
    """Measure all variants of one size, on all ranks at once."""
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(2, batch, columns)
    if columns in DENSITY:
        inputs = inputs.abs() * (torch.rand_like(inputs) < DENSITY[columns])
    anchor, positive = (x.requires_grad_() for x in inputs.unbind())
    runs = {
        name: lambda call=call: torch.autograd.grad(call(anchor, positive), (anchor, positive))
        for name, call in VARIANTS.items()
    }
    wanted = runs["eager"]()
    peaks = {}
    for name, run in runs.items():
        for gradient, expected in zip(run(), wanted, strict=True):
            # The inputs are dense tensors, so zeros have gradients as well.
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)
        peaks[name] = torch.tensor(peak_bytes(run, CPU), dtype=torch.float64)
        dist.all_reduce(peaks[name], dist.ReduceOp.MAX)
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(_seconds(runs[name]))
    about = {"ranks": dist.get_world_size(), "rows": batch, "columns": columns}
    return [
        about
        | {"variant": name, "rounds": rounds}
        | quartiles("seconds", seconds[name])
        | speedup(seconds, name)
        | {"peak_bytes": int(peaks[name][0])}
        | {"peak_bytes_without_gradients": int(peaks[name][1])}
        for name in names
    ]


def _seconds(run: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank; all start together."""
    dist.barrier()
    start = time.perf_counter()
    run()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of rows as measured or as read from the CSV."""
    lines = [
        (
            row["ranks"],
            f"{row['rows']} x {row['columns']}",
            f"`{row['variant']}`",
            f"{1e3 * float(row['seconds']):.3g} ms",
            f"{float(row['speedup_q1']):.2f}-{float(row['speedup_q3']):.2f}",
            f"{int(row['peak_bytes_without_gradients']) / 2**20:.1f} MiB",
        )
        for row in rows
        if row["variant"] in VARIANTS
    ]
    heading = ("ranks", "rows of each", "variant", "time", "x eager, quartiles", "extra memory")
    return markdown(heading, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.ranks")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tiny", action="store_true", help="one small size, a smoke test")
    parser.add_argument("--output", type=Path, default=RESULTS / "ranks.csv")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = ((4, 8),) if args.tiny else SIZES
    rows = []
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (world, folder, args.rounds, sizes), nprocs=world)
            rows += torch.load(Path(folder, "rows.pt"), weights_only=True)
    common = circumstances(CPU, "ranks")
    write(args.output, [row | common for row in rows])
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
