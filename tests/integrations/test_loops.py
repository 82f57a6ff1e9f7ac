"""accelerate and Lightning: the recipes of docs/trainers.md make the updates of a plain loop."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DistributedSampler

from sparse_losses.functional import cached_backward
from tests.distributed.ranks import as_torchrun_would
from tests.integrations import setting

works_with = pytest.mark.works_with
sgd = functools.partial(torch.optim.SGD, lr=setting.RATE)
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
HALF = "half"  # of a run: the folder or file that the other half resumes from


@dataclass
class Run:
    """A training that is done."""

    encoder: torch.nn.Module
    objective: torch.nn.Module
    totals: list[float]  # of all batches, or of the last one
    terms: dict[str, float]  # of the last one
    optimizer: torch.optim.Optimizer
    save: Callable[[Path], None]


def by_accelerate(
    folder,
    objective,
    schedules=(),
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
    """Trains as the page says, on sixteen rows."""
    recipe = setting.recipe("def train(accelerator")
    model = recipe["Towers"](setting.encoder(), objective)
    optimizer = optimizer(model.parameters())
    if options.pop("compiled", False):
        options["dynamo_backend"] = "aot_eager"
    accelerator = kind(cpu=True, gradient_accumulation_steps=accumulation, **options)
    resume = None if resume is None else str(resume)
    rows = setting.loader(setting.rows(16), batch_size)
    last = recipe["train"](
        accelerator, model, optimizer, rows, schedules, epochs=epochs, resume=resume
    )
    save = functools.partial(accelerator.save_state, safe_serialization=False)
    return Run(model.encoder, objective, [last["total"]], last, optimizer, save)


class Losses(lightning.Callback):
    """What was logged, batch by batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append({name: x.item() for name, x in trainer.callback_metrics.items()})


def by_lightning(
    folder,
    objective,
    schedules=(),
    *,
    batch_size=4,
    epochs=2,
    optimizer=sgd,
    accumulation=1,
    resume=None,
    kind=None,
    rank=None,
    **options,
):
    """Likewise; the epochs before those it resumes from are two."""
    ranks = 1 if rank is None else 2
    sampler = DistributedSampler(
        range(16), ranks, rank or 0, shuffle=False
    )  # its own would shuffle
    rows = setting.loader(setting.rows(16), batch_size, sampler=sampler)
    encoder = setting.encoder()
    if options.pop("compiled", False):
        encoder.compile(backend="aot_eager")
        objective.compile(backend="aot_eager")
    if options.pop("mixed_precision", "no") == "bf16":
        options["precision"] = "bf16-mixed"
    module = (kind or setting.recipe("class Retriever")["Retriever"])(
        encoder, objective, schedules, optimizer
    )
    losses = Losses()
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
    trainer.fit(module, rows, ckpt_path=resume)
    totals = [entry["loss"] for entry in losses.seen]
    (optimizer,) = trainer.optimizers
    return Run(encoder, objective, totals, losses.seen[-1], optimizer, trainer.save_checkpoint)


TRAINERS = [by_accelerate, by_lightning]
by_both = pytest.mark.parametrize("train", TRAINERS, ids=["accelerate", "Lightning"])


@pytest.fixture(autouse=True)
def _own_state():
    """What an Accelerator is told holds for the process."""
    yield
    forget_accelerator()


def forget_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def compare(run, reference, schedules=(), *, batch_size=4, tolerance=1e-5, **options):
    encoder = setting.encoder()
    batches = list(setting.loader(setting.rows(16), batch_size)) * 2
    totals = setting.plain_loop(encoder, reference, batches, schedules=schedules, **options)
    if run.totals:
        expected = totals[-len(run.totals) :]
        assert run.totals == pytest.approx(expected, rel=10 * tolerance)
    setting.assert_trained_alike(run.encoder, run.objective, encoder, reference, tolerance)


@works_with("accelerate", "fp32")
@works_with("Lightning", "fp32")
@by_both
def test_updates_are_those_of_a_plain_loop(train, tmp_path):
    objective, reference = setting.objective(), setting.objective()
    schedules, theirs = setting.steered(objective), setting.steered(reference)
    run = train(tmp_path, objective, schedules)
    compare(run, reference, theirs)
    assert [str(schedule) for schedule in schedules] == [str(schedule) for schedule in theirs]
    assert schedules[0].steps_taken == 8
    assert run.terms["info_nce"] + 0.01 * run.terms["query_flops"] < run.totals[-1]


@works_with("accelerate", "bf16")
@works_with("Lightning", "bf16")
@by_both
def test_under_bf16_autocast_likewise(train, tmp_path):
    run = train(tmp_path, setting.objective(), mixed_precision="bf16")
    compare(run, setting.objective(), bf16=True, tolerance=1e-3)


# The compiler looks at the gradients of its inputs, also of those that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@works_with("accelerate", "compile")
@works_with("Lightning", "compile")
@by_both
def test_compiled_likewise(train, tmp_path):
    torch._dynamo.reset()
    objective, reference = setting.objective(), setting.objective()
    run = train(tmp_path, objective, setting.steered(objective), compiled=True)
    compare(run, reference, setting.steered(reference), tolerance=1e-4)


@works_with("accelerate", "accumulation")
@works_with("Lightning", "accumulation")
@by_both
def test_accumulated_updates_are_those_of_the_whole_batch(train, tmp_path):
    schedule, _ = setting.steered(setting.objective())
    run = train(tmp_path, setting.row_by_row(), [schedule], batch_size=2, accumulation=4)
    run.totals.clear()  # of other batches
    compare(run, setting.row_by_row(), batch_size=8)
    assert schedule.steps_taken == 4


@works_with("accelerate", "resume")
@works_with("Lightning", "resume")
@by_both
def test_a_resumed_run_goes_on_as_the_first_one_did(train, tmp_path):
    def one(**options):
        objective = setting.objective()
        schedules = setting.steered(objective)
        run = train(tmp_path, objective, schedules, optimizer=adamw, **options)
        return run, [schedule.state_dict() for schedule in schedules]

    one()[0].save(tmp_path / HALF)  # after eight steps: two since the controller's last look
    straight, states = one(epochs=4)
    resumed, then_states = one(resume=tmp_path / HALF)
    mine, theirs = (setting.weights(x.encoder, x.objective) for x in (resumed, straight))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert resumed.terms == straight.terms
    assert resumed.totals == straight.totals[-len(resumed.totals) :]
    assert then_states == states
    assert states[0]["steps_taken"] == 16


class Scaled(Accelerator):
    """Scales the loss as in fp16, which accelerate leaves to GPUs; here it overflows first."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=2.0**-60)


def overflowing(train):
    """What makes the first steps overflow."""
    if train is by_accelerate:
        return {"kind": Scaled}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-12)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


@works_with("Lightning", "fp16")
@by_both
def test_a_step_that_the_scaler_skips_is_none(train, tmp_path):
    objective = setting.objective()
    schedule, controller = schedules = setting.steered(objective)
    run = train(tmp_path, objective, schedules, optimizer=adamw, **overflowing(train))
    taken = {int(state["step"]) for state in run.optimizer.state.values()}
    assert taken < {1, 2, 3, 4, 5, 6, 7}
    assert taken == {schedule.steps_taken} == {controller.report()["step"]}
    if train is by_lightning:
        assert run.totals[-1] < run.totals[0], "in fp16 it trains"


def test_schedules_attach_before_accelerate_prepares_or_after():
    objective = setting.objective()
    schedule, controller = setting.steered(objective)
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    schedule.attach(optimizer)
    prepared = Accelerator(cpu=True).prepare(optimizer)
    with pytest.raises(RuntimeError, match="attached once"):
        schedule.attach(prepared)
    controller.attach(prepared)
    prepared.step()
    assert schedule.steps_taken == controller.report()["step"] == 1


def cached_step(encoder, objective, columns, optimizer, backward):
    loss = functools.partial(setting.loss_of_columns, objective, columns)
    columns = list(columns.values())
    found = cached_backward(encoder, columns, loss, mini_batch_size=3, backward=backward)
    optimizer.step()
    optimizer.zero_grad()
    return found.total


@works_with("accelerate", "cached")
def test_cached_gradients_are_those_of_the_whole_batch_by_accelerate():
    encoder, objective = setting.encoder().train(), setting.objective()
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    rows = setting.loader(setting.rows(16), 8)
    optimizer = sgd([*encoder.parameters(), *objective.parameters()])
    wrapped, optimizer, rows = accelerator.prepare(encoder, optimizer, rows)
    totals = [
        cached_step(wrapped, objective, columns, optimizer, accelerator.backward).item()
        for columns in [*rows, *rows]
    ]
    run = Run(encoder, objective, totals, {}, optimizer, accelerator.save_state)
    compare(run, setting.objective(), batch_size=8)


@works_with("Lightning", "cached")
def test_cached_gradients_are_those_of_the_whole_batch_by_lightning(tmp_path):
    class Cached(setting.recipe("class Retriever")["Retriever"]):
        automatic_optimization = False

        def training_step(self, columns):
            by = self.optimizers(), self.manual_backward
            self.log("loss", cached_step(self.encoder, self.objective, columns, *by))

    objective, reference = setting.objective(), setting.objective()
    schedules, theirs = setting.steered(objective), setting.steered(reference)
    run = by_lightning(tmp_path, objective, schedules, batch_size=8, kind=Cached)
    compare(run, reference, theirs, batch_size=8)
    assert schedules[0].steps_taken == 4


def on_one_of_several(rank, folder):
    for train in TRAINERS:
        for name, (make, accumulation) in setting.SHARED.items():
            objective = make()
            schedules = setting.steered(objective)
            sizes = {"batch_size": 2, "accumulation": accumulation}
            run = train(folder, objective, schedules, rank=rank, **sizes)
            assert torch.distributed.get_world_size() == 2
            parts = run.encoder.state_dict(), objective.state_dict(), run.totals
            found = *parts, [str(schedule) for schedule in schedules]
            torch.save(found, folder / f"{train.__name__} {name} {rank}.pt")
            forget_accelerator()


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    as_torchrun_would(on_one_of_several, folder)
    return folder


@works_with("accelerate", "devices")
@works_with("Lightning", "devices")
@by_both
@pytest.mark.parametrize("name", list(setting.SHARED))
def test_two_processes_update_as_one_with_the_whole_batch(train, by_two, name):
    make, accumulation = setting.SHARED[name]
    for rank in (0, 1):
        saved, learned, totals, theirs = torch.load(by_two / f"{train.__name__} {name} {rank}.pt")
        encoder, objective, reference = setting.encoder(), make(), make()
        encoder.load_state_dict(saved)
        objective.load_state_dict(learned)
        schedules = setting.steered(reference)
        totals = totals if name == "gathered" else []  # the loss of a process is of its rows
        run = Run(encoder, objective, totals, {}, None, None)
        compare(run, reference, schedules, batch_size=4 * accumulation)
        assert [str(schedule) for schedule in schedules] == theirs
