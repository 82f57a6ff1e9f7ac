"""Train a SPLADE encoder on several devices, in plain PyTorch.

torchrun --nproc-per-node 2 examples/train_with_ddp.py
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparse_losses import (
    InfoNCELoss,
    ObjectiveOutput,
    SpladeBatch,
    SpladeEncoder,
    SpladeObjective,
    TrainingSchedule,
    Warmup,
    calibrate,
)
from sparse_losses.objective import terms


class Training(torch.nn.Module):
    """Texts in, loss out: one module, so that DDP and compilers see every parameter."""

    def __init__(self, encoder: SpladeEncoder, objective: SpladeObjective) -> None:
        super().__init__()
        self.encoder, self.objective = encoder, objective

    def forward(self, columns: dict[str, Any]) -> ObjectiveOutput:
        return self.objective(SpladeBatch.from_columns(self.encoder, columns))


def save(path: Path, state: dict[str, Any]) -> None:
    """Write the whole file, or keep the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def train(
    training: Training,
    folder: Path,
    *,
    steps: int = 40,
    batch_size: int = 8,  # per rank
    accumulate: int = 1,  # batches per step of the optimiser
    dtype: torch.dtype = torch.float32,
    resume: Path | None = None,
) -> dict[str, Any]:
    """Return the last state; `folder` has one of every twentieth step."""
    device, rank, ranks = next(training.parameters()).device, dist.get_rank(), dist.get_world_size()
    encoder, objective = training.encoder, training.objective
    schedule = TrainingSchedule(objective, warmups={"query_flops": Warmup(20, "quadratic")})
    model = DistributedDataParallel(training.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    schedule.attach(optimizer)  # counts the steps that the scaler does not skip
    parts = {"training": training, "optimizer": optimizer, "scaler": scaler, "schedule": schedule}
    first, log = 0, {}
    if resume is not None:
        saved = torch.load(resume, map_location=device, weights_only=True)
        first = saved["step"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step in range(first, steps):
        torch.manual_seed(step * ranks + rank)  # dropout: another on every rank, resumed alike
        for part in range(accumulate):
            start = ((step * accumulate + part) * ranks + rank) * batch_size
            rows = [tiny.TRAIN[(start + i) % len(tiny.TRAIN)] for i in range(batch_size)]
            columns = {s: encoder.tokenize([r[s] for r in rows]) for s in rows[0]}
            is_last = part == accumulate - 1
            with nullcontext() if is_last else model.no_sync():
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    total, terms = model(columns)
                scaler.scale(total / accumulate).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        log = {"total": total.item(), **{name: term.item() for name, term in terms.items()}}
        state = {name: part.state_dict() for name, part in parts.items()} | {"step": step + 1}
        if rank == 0 and (step + 1) % 20 == 0:  # after a step every rank has the same state
            print(log, schedule, flush=True)
            save(folder / f"step-{step + 1}.pt", state)
    dist.barrier()
    return state | {"log": log}


def start() -> Training:
    encoder = tiny.encoder()
    calibrate(encoder, tiny.DOCUMENTS, 8, method="shift")  # the start
    loss = InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.1)))
    objective = SpladeObjective(
        {"info_nce": (1.0, terms.info_nce(loss)), "query_flops": (0.01, terms.flops("query"))},
        gather=True,  # candidates and means of all ranks
    )
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    return Training(encoder, objective).to(device)


def main(folder: Path) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    whole = train(training := start(), folder)
    resumed = train(start(), folder, resume=folder / "step-20.pt")
    assert (resumed["schedule"], resumed["log"]) == (whole["schedule"], whole["log"])
    if dist.get_rank() == 0:
        calibrate(training.encoder, tiny.DOCUMENTS, 3)  # the end: save the encoder afterwards
        print(f"held-out active dimensions: {tiny.active_dimensions(training.encoder):.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "run"))
