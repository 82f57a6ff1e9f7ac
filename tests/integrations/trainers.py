"""The trainers of the examples and of sentence-transformers, one function each."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from sentence_transformers import (
    SparseEncoder,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
)
from torch.utils.data import DistributedSampler

from sparse_losses import Diagnostics, SpladeEncoder, TrainingSchedule
from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss
from sparse_losses.integrations.transformers import TrainingState
from tests.integrations import setting

sgd = functools.partial(torch.optim.SGD, lr=setting.RATE)
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


@dataclass
class Run:
    """A training that is done."""

    encoder: torch.nn.Module
    objective: torch.nn.Module
    totals: list[float]  # of all batches, or of the last one
    terms: dict[str, float]  # of the last one, and what else was logged of it
    optimizer: torch.optim.Optimizer
    schedule: TrainingSchedule
    save: Callable[[Path], None]


def by_accelerate(
    folder,
    objective,
    *,
    batch_size=4,
    epochs=2,
    optimizer=sgd,
    accumulation=1,
    resume=None,
    kind=Accelerator,
    rank=None,  # which it knows
    **options,
):
    """Train as the example does, on sixteen rows."""
    example, schedule = setting.example("train_with_accelerate"), setting.schedule_of(objective)
    model = example.Training(setting.encoder(), objective)
    optimizer = optimizer(model.parameters())
    if options.pop("compiled", False):
        options["dynamo_backend"] = "aot_eager"
    accelerator = kind(cpu=True, gradient_accumulation_steps=accumulation, **options)
    schedule.attach(optimizer)
    accelerator.register_for_checkpointing(schedule)
    prepared = accelerator.prepare(model, optimizer, setting.loader(setting.rows(16), batch_size))
    if resume is not None:
        accelerator.load_state(str(resume))
    last = example.train(accelerator, *prepared, epochs=epochs)
    save = functools.partial(accelerator.save_state, safe_serialization=False)
    return Run(model.encoder, objective, [last["total"]], last, optimizer, schedule, save)


class Losses(lightning.Callback):
    """The log, batch by batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append({name: x.item() for name, x in trainer.callback_metrics.items()})


def by_lightning(
    folder,
    objective,
    *,
    batch_size=4,
    epochs=2,
    optimizer=sgd,
    accumulation=1,
    resume=None,
    rank=None,
    **options,
):
    """Likewise; a resumed run has two epochs before."""
    ranks = 1 if rank is None else 2
    sampler = DistributedSampler(range(16), ranks, rank or 0, shuffle=False)
    rows = setting.loader(setting.rows(16), batch_size, sampler=sampler)
    encoder, schedule = setting.encoder(), setting.schedule_of(objective)
    if options.pop("compiled", False):
        encoder.compile(backend="aot_eager")
        objective.compile(backend="aot_eager")
    if options.pop("mixed_precision", "no") == "bf16":
        options["precision"] = "bf16-mixed"
    kind, losses = setting.example("train_with_lightning").Retriever, Losses()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=epochs if resume is None else epochs + 2,
        accumulate_grad_batches=accumulation,
        callbacks=[losses],
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **options,
    )
    trainer.fit(kind(encoder, objective, schedule, optimizer), rows, ckpt_path=resume)
    totals, last = [entry["loss"] for entry in losses.seen], losses.seen[-1]
    (optimizer,) = trainer.optimizers
    return Run(encoder, objective, totals, last, optimizer, schedule, trainer.save_checkpoint)


def settings_of(
    *,
    batch_size=4,
    epochs=2,
    optimizer=sgd,
    accumulation=1,
    resume=None,
    compiled=False,
    mixed_precision="no",
    **settings,
):
    """The functions' arguments, in the words of ``TrainingArguments``."""
    if compiled:
        settings |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    if optimizer is adamw:
        settings |= {"optim": "adamw_torch_fused", "learning_rate": 1e-2}
    return {
        "bf16": mixed_precision == "bf16",
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "max_steps": -1,
        "num_train_epochs": epochs if resume is None else epochs + 2,
        "save_strategy": "steps",  # and at the end
        "save_steps": 1000,
        **settings,
    }


def run_of(trainer, encoder, objective, schedule, folder, resume, scaler):
    """Train with the Trainer of transformers, or one that inherits from it."""
    if scaler is not None:
        trainer.accelerator.scaler = scaler
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    totals = [entry["loss"] for entry in logged]
    terms = {name.removeprefix("terms/"): value for name, value in sorted(logged[-1].items())}

    def save(path):
        if trainer.is_world_process_zero():
            (folder / f"checkpoint-{trainer.state.global_step}").rename(path)
        trainer.accelerator.wait_for_everyone()

    return Run(encoder, objective, totals, terms, trainer.optimizer, schedule, save)


def by_hugging_face(
    folder,
    objective,
    *,
    resume=None,
    kind=setting.InOrder,
    collate=setting.collate,
    scaler=None,
    rank=None,  # which it knows
    **options,
):
    """Likewise; the trainer's model is the encoder."""
    encoder, schedule = setting.encoder(), setting.schedule_of(objective)
    parameters = [*encoder.parameters(), *objective.parameters()]
    settings = {"remove_unused_columns": False, **options}
    diagnostics = {"document": Diagnostics(setting.VOCAB_SIZE)}
    trainer = kind(
        encoder,
        setting.arguments(folder, **settings_of(resume=resume, **settings)),
        objective=objective,
        data_collator=collate,
        train_dataset=setting.rows(16),
        optimizers=(options.get("optimizer", sgd)(parameters), None),
        callbacks=[TrainingState(schedule, loss=objective, diagnostics=diagnostics)],
    )
    return run_of(trainer, encoder, objective, schedule, folder, resume, scaler)


def by_sentence_transformers(
    folder,
    objective,
    *,
    mini_batch_size=None,
    resume=None,
    scaler=None,
    rank=None,  # which it knows
    **options,
):
    """Likewise."""
    settings = settings_of(resume=resume, batch_sampler=setting.in_order, **options)
    args = setting.arguments(folder, SparseEncoderTrainingArguments, **settings)
    with args.main_process_first():
        if args.process_index == 0:
            setting.encoder().save_pretrained(folder / "start")
    model, schedule = SparseEncoder(str(folder / "start"), device="cpu"), []
    loss = SentenceTransformersLoss(model, objective, mini_batch_size=mini_batch_size)

    def schedules(steps):
        """Made when training starts, and the trainer knows how long it is."""
        assert steps == trainer.state.max_steps > 0
        schedule.append(setting.schedule_of(objective))
        return schedule

    trainer = SparseEncoderTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(setting.rows(16)),
        loss=loss,
        callbacks=[TrainingState(schedules, loss=loss)],
    )
    encoder = SpladeEncoder(model[0].auto_model, model.tokenizer)
    run = run_of(trainer, encoder, objective, None, folder, resume, scaler)
    (run.schedule,) = schedule
    return run


def compare(
    run,
    reference,
    *,
    batch_size=4,
    epochs=2,
    collate=setting.collate,
    tolerance=1e-5,
    **options,
):
    """Compare a run with PyTorch's own loop."""
    encoder = setting.encoder()
    batches = list(setting.loader(setting.rows(16), batch_size, collate_fn=collate)) * epochs
    totals = setting.plain_loop(encoder, reference, batches, **options)
    if run.totals:
        expected = totals[-len(run.totals) :]
        assert run.totals == pytest.approx(expected, rel=10 * tolerance)
    setting.assert_trained_alike(run.encoder, run.objective, encoder, reference, tolerance)
    assert run.objective.weights == reference.weights
