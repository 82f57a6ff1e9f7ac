"""The trainers of the examples and of sentence-transformers, one function each."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import sentence_transformers as st
import torch
from accelerate import Accelerator
from datasets import Dataset
from lightning.pytorch.callbacks import LambdaCallback
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


DEFAULTS = {"batch_size": 4, "epochs": 2, "optimizer": sgd, "accumulation": 1, "resume": None}
DEFAULTS |= {"compiled": False, "mixed_precision": "no", "rank": None}


def planned(options):
    """The options that all trainers take, and the others."""
    others = {name: x for name, x in options.items() if name not in DEFAULTS}
    return SimpleNamespace(**{name: options.get(name, x) for name, x in DEFAULTS.items()}), others


def by_accelerate(folder, objective, *, scaler=None, **options):
    """Train as the example does, on sixteen rows."""
    plan, options = planned(options)
    example, schedule = setting.example("train_with_accelerate"), setting.schedule_of(objective)
    model = example.Training(setting.encoder(), objective)
    optimizer = plan.optimizer(model.parameters())
    options |= {"dynamo_backend": "aot_eager"} if plan.compiled else {}
    options |= {"gradient_accumulation_steps": plan.accumulation}
    accelerator = Accelerator(cpu=True, mixed_precision=plan.mixed_precision, **options)
    accelerator.scaler = accelerator.scaler if scaler is None else scaler
    schedule.attach(optimizer)
    accelerator.register_for_checkpointing(schedule)
    loader = setting.loader(setting.rows(16), plan.batch_size)
    prepared = accelerator.prepare(model, optimizer, loader)
    if plan.resume is not None:
        accelerator.load_state(str(plan.resume))
    last = example.train(accelerator, *prepared, epochs=plan.epochs)
    save = functools.partial(accelerator.save_state, safe_serialization=False)
    return Run(model.encoder, objective, [last["total"]], last, optimizer, schedule, save)


def by_lightning(folder, objective, **options):
    """Likewise; a resumed run has two epochs before."""
    plan, options = planned(options)
    ranks = 1 if plan.rank is None else 2
    sampler = DistributedSampler(range(16), ranks, plan.rank or 0, shuffle=False)
    rows = setting.loader(setting.rows(16), plan.batch_size, sampler=sampler)
    encoder, schedule = setting.encoder(), setting.schedule_of(objective)
    for module in (encoder, objective) if plan.compiled else ():
        module.compile(backend="aot_eager")
    if plan.mixed_precision == "bf16":
        options["precision"] = "bf16-mixed"
    kind, seen = setting.example("train_with_lightning").Retriever, []

    def remember(trainer, *_):
        seen.append({name: x.item() for name, x in trainer.callback_metrics.items()})

    quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=plan.epochs if plan.resume is None else plan.epochs + 2,
        accumulate_grad_batches=plan.accumulation,
        callbacks=[LambdaCallback(on_train_batch_end=remember)],
        default_root_dir=folder,
        **(options | dict.fromkeys(quiet, False)),
    )
    trainer.fit(kind(encoder, objective, schedule, plan.optimizer), rows, ckpt_path=plan.resume)
    totals, (optimizer,) = [entry["loss"] for entry in seen], trainer.optimizers
    return Run(encoder, objective, totals, seen[-1], optimizer, schedule, trainer.save_checkpoint)


def settings_of(plan):
    """The same in the words of ``TrainingArguments``."""
    settings = {"bf16": plan.mixed_precision == "bf16"}
    if plan.compiled:
        settings |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    if plan.optimizer is adamw:
        settings |= {"optim": "adamw_torch_fused", "learning_rate": 1e-2}
    return settings | {
        "per_device_train_batch_size": plan.batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "max_steps": -1,
        "num_train_epochs": plan.epochs if plan.resume is None else plan.epochs + 2,
        "save_strategy": "steps",  # and at the end
        "save_steps": 1000,
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
    folder, objective, *, kind=setting.InOrder, collate=setting.collate, scaler=None, **options
):
    """Likewise; the trainer's model is the encoder."""
    plan, _ = planned(options)
    encoder, schedule = setting.encoder(), setting.schedule_of(objective)
    parameters = [*encoder.parameters(), *objective.parameters()]
    diagnostics = {"document": Diagnostics(setting.VOCAB_SIZE)}
    trainer = kind(
        encoder,
        setting.arguments(folder, remove_unused_columns=False, **settings_of(plan)),
        objective=objective,
        data_collator=collate,
        train_dataset=setting.rows(16),
        optimizers=(plan.optimizer(parameters), None),
        callbacks=[TrainingState(schedule, loss=objective, diagnostics=diagnostics)],
    )
    return run_of(trainer, encoder, objective, schedule, folder, plan.resume, scaler)


def by_sentence_transformers(folder, objective, *, mini_batch_size=None, scaler=None, **options):
    """Likewise."""
    plan, _ = planned(options)
    settings = settings_of(plan) | {"batch_sampler": setting.in_order}
    args = setting.arguments(folder, st.SparseEncoderTrainingArguments, **settings)
    with args.main_process_first():
        if args.process_index == 0:
            setting.encoder().save_pretrained(folder / "start")
    model = st.SparseEncoder(str(folder / "start"), device="cpu")
    schedule = setting.schedule_of(objective)
    loss = SentenceTransformersLoss(model, objective, mini_batch_size=mini_batch_size)
    trainer = st.SparseEncoderTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(setting.rows(16)),
        loss=loss,
        callbacks=[TrainingState(schedule, loss=loss)],
    )
    encoder = SpladeEncoder(model[0].auto_model, model.tokenizer)
    return run_of(trainer, encoder, objective, schedule, folder, plan.resume, scaler)


def compare(run, reference, *, batch_size=4, epochs=2, tolerance=1e-5, **options):
    """Compare a run with PyTorch's own loop."""
    encoder = setting.encoder()
    batches = list(setting.loader(setting.rows(16), batch_size)) * epochs
    totals = setting.plain_loop(encoder, reference, batches, **options)
    if run.totals:
        expected = totals[-len(run.totals) :]
        assert run.totals == pytest.approx(expected, rel=10 * tolerance)
    setting.assert_trained_alike(run.encoder, run.objective, encoder, reference, tolerance)
    assert run.objective.weights == reference.weights
