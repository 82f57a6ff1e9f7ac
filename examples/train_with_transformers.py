"""Train a SPLADE model with the Trainer of transformers.

python examples/train_with_transformers.py
torchrun --nproc-per-node 2 examples/train_with_transformers.py
"""

import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import Trainer, TrainingArguments

from sparse_losses import (
    Diagnostics,
    InfoNCELoss,
    SpladeBatch,
    SpladeEncoder,
    SpladeObjective,
    TrainingSchedule,
    Warmup,
    calibrate,
)
from sparse_losses.integrations.transformers import TrainingState
from sparse_losses.objective import terms


class ObjectiveTrainer(Trainer):
    """A Trainer whose model is a SpladeEncoder, and whose loss is an objective."""

    def __init__(self, *args: Any, objective: SpladeObjective, **options: Any) -> None:
        super().__init__(*args, **options)
        self.objective = objective.to(self.args.device)
        self.label_names, self.can_return_loss = [], True  # an evaluation needs no labels
        # The loss is a mean. Of other models a Trainer takes it for a sum if a batch has `labels`,
        # and then does not divide it by the number of accumulated batches.
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        total, _ = self.objective(SpladeBatch.from_columns(model, inputs))
        return (total, {}) if return_outputs else total

    # Checkpoints are folders that `SpladeEncoder.from_pretrained` loads.
    def _save(self, output_dir=None, state_dict=None):
        if self.args.should_save:
            self.model.save_pretrained(output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        saved = SpladeEncoder.from_pretrained(resume_from_checkpoint)
        self.model.load_state_dict(saved.state_dict())

    def _load_best_model(self):
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def train(folder: Path, *, steps: int = 40, resume: Path | None = None) -> ObjectiveTrainer:
    encoder = tiny.encoder()
    calibrate(encoder, tiny.DOCUMENTS, 8, method="shift")  # the start
    loss = InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.1)))
    objective = SpladeObjective(
        {"info_nce": (1.0, terms.info_nce(loss)), "query_flops": (0.01, terms.flops("query"))},
        gather=True,  # candidates and means of all devices
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": encoder.parameters()},
            {"params": objective.parameters(), "lr": 1e-3, "weight_decay": 0.0},
        ],
        lr=3e-3,
    )
    state = TrainingState(
        TrainingSchedule(objective, warmups={"query_flops": Warmup(20, "quadratic")}),
        loss=objective,
        diagnostics={"document": Diagnostics(encoder.vocab_size)},
    )
    trainer = ObjectiveTrainer(
        encoder,
        TrainingArguments(
            str(folder),
            max_steps=steps,
            save_steps=20,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=20,
            per_device_train_batch_size=8,
            remove_unused_columns=False,  # the collator needs the texts
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
        objective=objective,
        data_collator=lambda rows: {
            side: encoder.tokenize([row[side] for row in rows]) for side in ("anchor", "positive")
        },
        train_dataset=tiny.TRAIN,
        eval_dataset=tiny.HELD_OUT,
        optimizers=(optimizer, None),
        callbacks=[state],
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    calibrate(encoder, tiny.DOCUMENTS, 3, verbose=trainer.is_world_process_zero())
    if trainer.is_world_process_zero():
        encoder.save_pretrained(folder / "calibrated")
    return trainer


def main(folder: Path) -> None:
    trainer = train(folder)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    resumed = train(folder, resume=folder / "checkpoint-20")
    assert logs[-1] == [entry for entry in resumed.state.log_history if "loss" in entry][-1]
    if trainer.is_world_process_zero():
        encoder = SpladeEncoder.from_pretrained(folder / "calibrated")
        print(f"held-out active dimensions: {tiny.active_dimensions(encoder):.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "run"))
