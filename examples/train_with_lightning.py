"""Train a SPLADE encoder with Lightning.

python examples/train_with_lightning.py
"""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning
import tiny
import torch
from torch.utils.data import DataLoader

from sparse_losses import (
    InfoNCELoss,
    SparsityController,
    SpladeBatch,
    SpladeEncoder,
    SpladeObjective,
    TrainingSchedule,
    Warmup,
)

adamw = functools.partial(torch.optim.AdamW, lr=3e-3)


class Retriever(lightning.LightningModule):
    def __init__(
        self,
        encoder: SpladeEncoder,
        objective: SpladeObjective,
        schedules: Sequence[Any] = (),
        optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    ) -> None:
        super().__init__()
        self.encoder, self.objective = encoder, objective
        self.schedules, self.optimizer = list(schedules), optimizer
        self.train()  # a loaded model is in evaluation mode, and Lightning leaves it there

    def loss(self, columns: dict[str, Any], prefix: str = "") -> torch.Tensor:
        batch = SpladeBatch.from_columns(self.encoder, columns)
        total, terms = self.objective(batch)
        named = {f"{prefix}{name}": value for name, value in {"loss": total, **terms}.items()}
        self.log_dict(named, batch_size=len(batch.anchor.activations))
        return total

    def training_step(self, columns: dict[str, Any]) -> torch.Tensor:
        for controller in self.schedules:
            if isinstance(controller, SparsityController):
                numbers = controller.report()
                for name in ("target", "active", "weight"):
                    if numbers[name] is not None:  # before the first measurement
                        self.log(f"{controller.term}/{name}", float(numbers[name]))
        return self.loss(columns)

    def validation_step(self, columns: dict[str, Any]) -> None:
        self.loss(columns, "val_")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = self.optimizer(self.parameters())
        for schedule in self.schedules:
            schedule.attach(optimizer)
        return optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["schedules"] = [schedule.state_dict() for schedule in self.schedules]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for schedule, state in zip(self.schedules, checkpoint["schedules"], strict=True):
            schedule.load_state_dict(state)


def train(folder: Path, *, epochs: int, resume: Path | None = None) -> lightning.Trainer:
    encoder = tiny.encoder(dropout=0.0)  # Lightning does not save the random state
    objective = SpladeObjective(
        {"info_nce": 1.0, "query_flops": 0.01, "document_flops": 0.01},
        info_nce=InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.1))),
        gather=True,  # candidates and means of all devices
    )
    schedules = [
        TrainingSchedule(objective, warmups={"query_flops": Warmup(20, "quadratic")}),
        SparsityController(objective, "document_flops", target_active=8),
    ]

    def collate(rows: list[dict[str, str]]) -> dict[str, Any]:
        return {side: encoder.tokenize([row[side] for row in rows]) for side in rows[0]}

    loaders = [DataLoader(x, batch_size=8, collate_fn=collate) for x in (tiny.TRAIN, tiny.HELD_OUT)]
    trainer = lightning.Trainer(
        max_epochs=epochs, default_root_dir=folder, logger=False, enable_progress_bar=False
    )
    trainer.fit(Retriever(encoder, objective, schedules), *loaders, ckpt_path=resume)
    return trainer


def main(folder: Path) -> None:
    half, whole = train(folder, epochs=4), train(folder, epochs=8)
    checkpoint = half.checkpoint_callback.best_model_path
    resumed = train(folder, epochs=8, resume=checkpoint)
    assert resumed.callback_metrics == whole.callback_metrics
    for mine, other in zip(resumed.model.schedules, whole.model.schedules, strict=True):
        assert mine.state_dict() == other.state_dict()
    print({name: round(x.item(), 4) for name, x in whole.callback_metrics.items()})
    whole.model.encoder.calibrate(tiny.DOCUMENTS, 5)  # prunes; save the encoder afterwards
    print(f"held-out active dimensions: {tiny.active_dimensions(whole.model.encoder):.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "run"))
