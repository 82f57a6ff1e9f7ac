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
    SparsityController,
    SpladeBatch,
    SpladeEncoder,
    SpladeObjective,
    TrainingSchedule,
    Warmup,
)
from sparse_losses.functional import splade_pool
from sparse_losses.integrations.transformers import TrainingState


class ObjectiveTrainer(Trainer):
    """A Trainer of a masked language model whose loss is an objective of this package."""

    def __init__(self, *args: Any, objective: SpladeObjective, **options: Any) -> None:
        super().__init__(*args, **options)
        self.objective = objective.to(self.args.device)
        self.label_names, self.can_return_loss = [], True  # an evaluation needs no labels

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        def encode(input_ids, attention_mask):
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
            return splade_pool(logits, attention_mask)

        total, _ = self.objective(SpladeBatch.from_columns(encode, inputs))
        return (total, {}) if return_outputs else total


def train(folder: Path, *, steps: int = 40, resume: Path | None = None) -> ObjectiveTrainer:
    encoder = tiny.encoder()
    model, tokenizer = encoder.model, encoder.tokenizer  # from AutoModelForMaskedLM, AutoTokenizer
    objective = SpladeObjective(
        {"info_nce": 1.0, "query_flops": 0.01, "document_flops": 0.01},
        info_nce=InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.1))),
        gather=True,  # candidates and means of all devices
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": model.parameters()},
            {"params": objective.parameters(), "lr": 1e-3, "weight_decay": 0.0},
        ],
        lr=3e-3,
    )
    state = TrainingState(
        TrainingSchedule(objective, warmups={"query_flops": Warmup(20, "quadratic")}),
        SparsityController(objective, "document_flops", target_active=8),
        loss=objective,
        diagnostics={"document": Diagnostics(encoder.vocab_size)},
        calibrate_on=tiny.DOCUMENTS,
        calibrate_to=5,
        encoder=encoder,
    )
    trainer = ObjectiveTrainer(
        model,
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
        processing_class=tokenizer,
        data_collator=lambda rows: {
            side: encoder.tokenize([row[side] for row in rows]) for side in ("anchor", "positive")
        },
        train_dataset=tiny.TRAIN,
        eval_dataset=tiny.HELD_OUT,
        optimizers=(optimizer, None),
        callbacks=[state],
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    if trainer.is_world_process_zero():
        encoder.save_pretrained(folder / "calibrated")
    return trainer


def main(folder: Path) -> None:
    trainer = train(folder)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name in ("target", "active", "weight", "status"):
        assert f"document_flops/{name}" in logs[-1]
    resumed = train(folder, resume=folder / "checkpoint-20")
    assert logs[-1] == [entry for entry in resumed.state.log_history if "loss" in entry][-1]
    if trainer.is_world_process_zero():
        encoder = SpladeEncoder.from_pretrained(folder / "calibrated")
        print(f"held-out active dimensions: {tiny.active_dimensions(encoder):.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "run"))
