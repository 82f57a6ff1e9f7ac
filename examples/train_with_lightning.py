"""Train a SPLADE encoder with Lightning.

python examples/train_with_lightning.py
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import tiny
import torch
from torch.utils.data import DataLoader

from sparse_losses import (
    InfoNCELoss,
    SpladeBatch,
    SpladeEncoder,
    SpladeObjective,
    TrainingSchedule,
    Warmup,
    calibrate,
)
from sparse_losses.objective import terms

adamw = functools.partial(torch.optim.AdamW, lr=3e-3)


class Retriever(lightning.LightningModule):
    def __init__(
        self,
        encoder: SpladeEncoder,
        objective: SpladeObjective,
        schedule: TrainingSchedule,
        optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    ) -> None:
        super().__init__()
        self.encoder, self.objective = encoder, objective
        self.schedule, self.optimizer = schedule, optimizer
        self.train()  # a loaded model is in evaluation mode, and Lightning leaves it there

    def loss(self, columns: dict[str, Any], prefix: str = "") -> torch.Tensor:
        batch = SpladeBatch.from_columns(self.encoder, columns)
        total, terms = self.objective(batch)
        named = {f"{prefix}{name}": value for name, value in {"loss": total, **terms}.items()}
        self.log_dict(named, batch_size=len(batch.anchor.activations))
        return total

    def training_step(self, columns: dict[str, Any]) -> torch.Tensor:
        return self.loss(columns)

    def validation_step(self, columns: dict[str, Any]) -> None:
        self.loss(columns, "val_")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = self.optimizer(self.parameters())
        self.schedule.attach(optimizer)
        return optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["schedule"] = self.schedule.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.schedule.load_state_dict(checkpoint["schedule"])


def train(folder: Path, *, epochs: int, resume: Path | None = None) -> lightning.Trainer:
    encoder = tiny.encoder(dropout=0.0)  # Lightning does not save the random state
    calibrate(encoder, tiny.DOCUMENTS, 8, method="shift")  # the start
    loss = InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.1)))
    objective = SpladeObjective(
        {"info_nce": (1.0, terms.info_nce(loss)), "query_flops": (0.01, terms.flops("query"))},
        gather=True,  # candidates and means of all devices
    )
    schedule = TrainingSchedule(objective, warmups={"query_flops": Warmup(20, "quadratic")})

    def collate(rows: list[dict[str, str]]) -> dict[str, Any]:
        return {side: encoder.tokenize([row[side] for row in rows]) for side in rows[0]}

    loaders = [DataLoader(x, batch_size=8, collate_fn=collate) for x in (tiny.TRAIN, tiny.HELD_OUT)]
    trainer = lightning.Trainer(
        max_epochs=epochs, default_root_dir=folder, logger=False, enable_progress_bar=False
    )
    trainer.fit(Retriever(encoder, objective, schedule), *loaders, ckpt_path=resume)
    return trainer


def main(folder: Path) -> None:
    half, whole = train(folder, epochs=4), train(folder, epochs=8)
    checkpoint = half.checkpoint_callback.best_model_path
    resumed = train(folder, epochs=8, resume=checkpoint)
    assert resumed.callback_metrics == whole.callback_metrics
    assert resumed.model.schedule.state_dict() == whole.model.schedule.state_dict()
    print({name: round(x.item(), 4) for name, x in whole.callback_metrics.items()})
    calibrate(whole.model.encoder, tiny.DOCUMENTS, 3)  # the end: save the encoder afterwards
    print(f"held-out active dimensions: {tiny.active_dimensions(whole.model.encoder):.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "run"))
