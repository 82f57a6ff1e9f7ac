"""Lightning: the module of docs/trainers.md makes the updates of a plain loop."""

import functools

import lightning
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DistributedSampler

from sparse_losses.functional import cached_backward
from tests.distributed.ranks import as_torchrun_would
from tests.integrations import setting

works_with = pytest.mark.works_with
RECIPE = "class Retriever"
sgd = functools.partial(torch.optim.SGD, lr=setting.RATE)


class Losses(lightning.Callback):
    """What was logged, batch by batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append({name: x.item() for name, x in trainer.callback_metrics.items()})


def run(
    folder,
    objective,
    schedules=(),
    *,
    batch_size=4,
    optimizer=sgd,
    encoder=None,
    sampler=None,
    resume=None,
    retriever=None,
    **options,
):
    """Trains as the page says, on sixteen rows."""
    loader = setting.loader(setting.rows(16), batch_size, sampler=sampler)
    retriever = retriever or setting.recipe(RECIPE)["Retriever"]
    module = retriever(encoder or setting.encoder(), objective, schedules, optimizer)
    losses = Losses()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    plain = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "callbacks": [losses]}
    options = {**quiet, **plain, "default_root_dir": folder, **options}
    trainer = lightning.Trainer(enable_checkpointing=False, **options)
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer, module, losses.seen


def compare(module, logged, reference, schedules=(), *, batch_size=4, tolerance=1e-5, **options):
    encoder = setting.encoder()
    batches = list(setting.loader(setting.rows(16), batch_size)) * 2
    totals = setting.plain_loop(encoder, reference, batches, schedules=schedules, **options)
    if logged is not None:
        assert [entry["loss"] for entry in logged] == pytest.approx(totals, rel=10 * tolerance)
    setting.assert_trained_alike(module.encoder, module.objective, encoder, reference, tolerance)


@works_with("Lightning", "fp32")
def test_updates_are_those_of_a_plain_loop(tmp_path):
    objective, reference = setting.objective(), setting.objective()
    schedules, theirs = setting.steered(objective), setting.steered(reference)
    _, module, logged = run(tmp_path, objective, schedules)
    compare(module, logged, reference, theirs)
    assert [str(schedule) for schedule in schedules] == [str(schedule) for schedule in theirs]
    assert schedules[0].steps_taken == 8
    assert logged[-1]["info_nce"] + 0.01 * logged[-1]["query_flops"] < logged[-1]["loss"]


@works_with("Lightning", "bf16")
def test_under_bf16_autocast_likewise(tmp_path):
    _, module, logged = run(tmp_path, setting.objective(), precision="bf16-mixed")
    compare(module, logged, setting.objective(), bf16=True, tolerance=1e-3)


@works_with("Lightning", "fp16")
def test_in_fp16_a_step_that_the_scaler_skips_is_none(tmp_path):
    objective = setting.objective()
    schedule, controller = schedules = setting.steered(objective)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-12)
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    trainer, _, logged = run(
        tmp_path,
        objective,
        schedules,
        optimizer=adamw,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
    )
    taken = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert taken < {1, 2, 3, 4, 5, 6, 7}
    assert taken == {schedule.steps_taken} == {controller.report()["step"]}
    assert logged[-1]["loss"] < logged[0]["loss"]


# The compiler looks at the gradients of its inputs, also of those that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@works_with("Lightning", "compile")
def test_compiled_likewise(tmp_path):
    torch._dynamo.reset()
    encoder, objective, reference = setting.encoder(), setting.objective(), setting.objective()
    schedules = setting.steered(objective)
    encoder.compile(backend="aot_eager")
    objective.compile(backend="aot_eager")
    _, module, logged = run(tmp_path, objective, schedules, encoder=encoder)
    compare(module, logged, reference, setting.steered(reference), tolerance=1e-4)


@works_with("Lightning", "accumulation")
def test_accumulated_updates_are_those_of_the_whole_batch(tmp_path):
    schedule, _ = setting.steered(setting.objective())
    options = {"batch_size": 2, "accumulate_grad_batches": 4}
    _, module, _ = run(tmp_path, setting.row_by_row(), [schedule], **options)
    compare(module, None, setting.row_by_row(), batch_size=8)
    assert schedule.steps_taken == 4


@works_with("Lightning", "cached")
def test_cached_gradients_are_those_of_the_whole_batch(tmp_path):
    class Cached(setting.recipe(RECIPE)["Retriever"]):
        automatic_optimization = False

        def training_step(self, columns):
            optimizer = self.optimizers()
            found = cached_backward(
                self.encoder,
                list(columns.values()),
                functools.partial(setting.loss_of_columns, self.objective, columns),
                mini_batch_size=3,
                backward=self.manual_backward,
            )
            optimizer.step()
            optimizer.zero_grad()
            self.log("loss", found.total)

    objective, reference = setting.objective(), setting.objective()
    schedules, theirs = setting.steered(objective), setting.steered(reference)
    _, module, logged = run(tmp_path, objective, schedules, batch_size=8, retriever=Cached)
    compare(module, logged, reference, theirs, batch_size=8)
    assert schedules[0].steps_taken == 4


@works_with("Lightning", "resume")
def test_a_resumed_run_goes_on_as_the_first_one_did(tmp_path):
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)

    def one(**options):
        objective = setting.objective()
        schedules = setting.steered(objective)
        found = run(tmp_path, objective, schedules, optimizer=adamw, **options)
        return *found, [schedule.state_dict() for schedule in schedules]

    file = tmp_path / "half.ckpt"
    one()[0].save_checkpoint(file)  # after eight steps: two since the controller's last look
    _, straight, logged, states = one(max_epochs=4)
    _, resumed, then_logged, then_states = one(max_epochs=4, resume=file)
    torch.testing.assert_close(setting.weights(resumed), setting.weights(straight), rtol=0, atol=0)
    assert then_logged == logged[8:]
    assert then_states == states
    assert states[0]["steps_taken"] == 16


def on_one_of_several(rank, folder, processes=2):
    for name, (make, accumulation) in setting.SHARED.items():
        objective = make()
        schedules = setting.steered(objective)
        _, module, _ = run(
            folder,
            objective,
            schedules,
            batch_size=2,
            strategy="ddp",
            devices=processes,
            accumulate_grad_batches=accumulation,
            # Its own would shuffle.
            sampler=DistributedSampler(range(16), processes, rank, shuffle=False),
        )
        assert torch.distributed.get_world_size() == processes
        found = module.state_dict(), [str(schedule) for schedule in schedules]
        torch.save(found, folder / f"{name} {rank}.pt")


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    as_torchrun_would(on_one_of_several, folder)
    return folder


@works_with("Lightning", "devices")
@pytest.mark.parametrize("name", list(setting.SHARED))
def test_two_processes_update_as_one_with_the_whole_batch(by_two, name):
    make, accumulation = setting.SHARED[name]
    for rank in (0, 1):
        saved, theirs = torch.load(by_two / f"{name} {rank}.pt")
        module = setting.recipe(RECIPE)["Retriever"](setting.encoder(), make())
        module.load_state_dict(saved)
        reference = make()
        schedules = setting.steered(reference)
        compare(module, None, reference, schedules, batch_size=4 * accumulation)
        assert [str(schedule) for schedule in schedules] == theirs
