"""One of several processes of a training: `torchrun two_processes.py BACKBONE OUT`."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.lightning_ir.test_training import across_queries, row_by_row
from tests.lightning_ir.tiny import batches, loader, module, trainer


def main(backbone: str, out: str) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = {"devices": ranks, "strategy": "ddp", "use_distributed_sampler": False}
    for kind, losses in (("rows", row_by_row()), ("gather", across_queries(gather=True))):
        made = module(Path(backbone), losses)
        own = batches(3 * ranks)[rank::ranks]
        trainer(Path(out), 3, **options).fit(made, loader(own))
        torch.save(made.state_dict(), Path(out) / f"{kind}-{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
