"""Train a SPLADE encoder with accelerate.

python examples/train_with_accelerate.py
accelerate launch --num-processes 2 examples/train_with_accelerate.py
"""

import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

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
    """Encoder and objective in one module, so that DDP and compilers see the whole step."""

    def __init__(self, encoder: SpladeEncoder, objective: SpladeObjective) -> None:
        super().__init__()
        self.encoder, self.objective = encoder, objective

    def forward(self, columns: dict[str, Any]) -> ObjectiveOutput:
        return self.objective(SpladeBatch.from_columns(self.encoder, columns))


def train(
    accelerator: Accelerator,
    model: Training,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    epochs: int = 1,
) -> dict[str, float]:
    """Train, after `accelerator.prepare`; return the total and the terms of the last step."""
    model.train()
    for _ in range(epochs):
        for columns in loader:
            with accelerator.accumulate(model):
                total, terms = model(columns)
                accelerator.backward(total)
                optimizer.step()
                optimizer.zero_grad()
    return {"total": total.item()} | {name: term.item() for name, term in terms.items()}


def start() -> tuple[tuple[Any, ...], TrainingSchedule]:
    """What is trained, and its schedule; a resumed run starts with the same."""
    encoder = tiny.encoder()
    calibrate(encoder, tiny.DOCUMENTS, 8, method="shift")  # the start
    loss = InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.1)))
    objective = SpladeObjective(
        {"info_nce": (1.0, terms.info_nce(loss)), "query_flops": (0.01, terms.flops("query"))},
        gather=True,  # candidates and means of all devices
    )
    model = Training(encoder, objective)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def collate(rows: list[dict[str, str]]) -> dict[str, Any]:
        return {side: encoder.tokenize([row[side] for row in rows]) for side in rows[0]}

    loader = DataLoader(tiny.TRAIN, batch_size=8, shuffle=True, collate_fn=collate)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    schedule = TrainingSchedule(objective, warmups={"query_flops": Warmup(20, "quadratic")})
    schedule.attach(optimizer)
    accelerator.register_for_checkpointing(schedule)
    return (accelerator, *accelerator.prepare(model, optimizer, loader)), schedule


def main(folder: Path) -> None:
    parts, schedule = start()
    accelerator, model, *_ = parts
    train(*parts, epochs=4)
    # Not as safetensors, which leave out what model and head share.
    accelerator.save_state(str(folder), safe_serialization=False)
    log = train(*parts, epochs=4)

    resumed, same = start()
    resumed[0].load_state(str(folder))
    assert train(*resumed, epochs=4) == log
    assert same.state_dict() == schedule.state_dict()
    accelerator.print(log)
    encoder = accelerator.unwrap_model(model).encoder
    calibrate(encoder, tiny.DOCUMENTS, 3)  # the end: save the encoder afterwards
    accelerator.print(f"held-out active dimensions: {tiny.active_dimensions(encoder):.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "run"))
