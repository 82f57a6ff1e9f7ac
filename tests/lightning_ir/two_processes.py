"""One of several processes of a training: `torchrun two_processes.py BACKBONE OUT GATHER`."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.lightning_ir.test_training import across_queries, row_by_row
from tests.lightning_ir.tiny import batches, loader, module, trainer


def main(backbone: str, out: str, gather: str) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    losses = across_queries(gather=True) if gather == "gather" else row_by_row()
    made = module(Path(backbone), losses)
    ran = trainer(Path(out), 3, devices=ranks, strategy="ddp", use_distributed_sampler=False)
    ran.fit(made, loader(batches(3 * ranks)[rank::ranks]))
    torch.save(made.state_dict(), Path(out) / f"{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
