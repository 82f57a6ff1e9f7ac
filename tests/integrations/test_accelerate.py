"""accelerate: the recipe of docs/trainers.md makes the updates of a plain loop."""

import functools

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from sparse_losses.functional import cached_backward
from tests.distributed.ranks import as_torchrun_would
from tests.integrations import setting

works_with = pytest.mark.works_with
RECIPE = "def train(accelerator"


@pytest.fixture(autouse=True)
def _own_state():
    """What an Accelerator is told holds for the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=setting.RATE)


def run(objective, schedules=(), *, batch_size=4, optimizer=sgd, resume=None, epochs=2, **options):
    """Trains as the page says, on sixteen rows."""
    recipe = setting.recipe(RECIPE)
    encoder = setting.encoder()
    model = recipe["Towers"](encoder, objective)
    optimizer = optimizer(model)
    loader = setting.loader(setting.rows(16), batch_size)
    accelerator = Accelerator(cpu=True, **options)
    last = recipe["train"](
        accelerator, model, optimizer, loader, schedules, epochs=epochs, resume=resume
    )
    return accelerator, model, optimizer, last


def compare(model, last, reference, schedules=(), *, batch_size=4, tolerance=1e-5, **options):
    encoder = setting.encoder()
    batches = list(setting.loader(setting.rows(16), batch_size)) * 2
    totals = setting.plain_loop(encoder, reference, batches, schedules=schedules, **options)
    if last is not None:
        assert last["total"] == pytest.approx(totals[-1], rel=10 * tolerance)
    setting.assert_trained_alike(model.encoder, model.objective, encoder, reference, tolerance)


@works_with("accelerate", "fp32")
def test_updates_are_those_of_a_plain_loop():
    objective, reference = setting.objective(), setting.objective()
    schedules, theirs = setting.steered(objective), setting.steered(reference)
    _, model, _, last = run(objective, schedules)
    compare(model, last, reference, theirs)
    for schedule, other in zip(schedules, theirs, strict=True):
        assert str(schedule) == str(other)
    assert schedules[0].steps_taken == 8


@works_with("accelerate", "bf16")
def test_under_bf16_autocast_likewise():
    _, model, _, last = run(setting.objective(), mixed_precision="bf16")
    compare(model, last, setting.objective(), bf16=True, tolerance=1e-3)


@works_with("accelerate", "compile")
def test_compiled_likewise():
    torch._dynamo.reset()
    _, model, _, last = run(setting.objective(), dynamo_backend="aot_eager")
    compare(model, last, setting.objective(), tolerance=1e-4)


@works_with("accelerate", "accumulation")
def test_accumulated_updates_are_those_of_the_whole_batch():
    objective = setting.row_by_row()
    schedules = setting.steered(setting.objective())
    _, model, _, _ = run(objective, schedules[:1], batch_size=2, gradient_accumulation_steps=4)
    compare(model, None, setting.row_by_row(), batch_size=8)
    assert schedules[0].steps_taken == 4


@works_with("accelerate", "cached")
def test_cached_gradients_are_those_of_the_whole_batch():
    encoder, objective = setting.encoder(), setting.objective()
    both = setting.recipe(RECIPE)["Towers"](encoder, objective).train()
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    wrapped, optimizer, loader = accelerator.prepare(
        encoder, sgd(both), setting.loader(setting.rows(16), 8)
    )
    for columns in [*loader, *loader]:
        found = cached_backward(
            wrapped,
            list(columns.values()),
            functools.partial(setting.loss_of_columns, objective, columns),
            mini_batch_size=3,
            backward=accelerator.backward,
        )
        optimizer.step()
        optimizer.zero_grad()
    compare(both, {"total": found.total.item()}, setting.objective(), batch_size=8)


def test_schedules_attach_before_prepare_or_after():
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


def test_a_step_that_the_scaler_skips_is_none():
    objective = setting.objective()
    schedule, controller = setting.steered(objective)

    class Scaled(Accelerator):
        """Scales the loss as in fp16, which accelerate leaves to GPUs; here it overflows first."""

        def __init__(self, **options):
            super().__init__(**options)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=2.0**-60)

    recipe = setting.recipe(RECIPE)
    model = recipe["Towers"](setting.encoder(), objective)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = setting.loader(setting.rows(16), 4)
    recipe["train"](Scaled(cpu=True), model, optimizer, loader, [schedule, controller], epochs=2)
    taken = {int(state["step"]) for state in optimizer.state.values()}
    assert taken < {1, 2, 3, 4, 5, 6, 7}
    assert taken == {schedule.steps_taken} == {controller.report()["step"]}


@works_with("accelerate", "resume")
def test_a_resumed_run_goes_on_as_the_first_one_did(tmp_path):
    def one(**options):
        objective = setting.objective()
        schedules = setting.steered(objective)
        adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
        return run(
            objective, schedules, optimizer=lambda m: adamw(m.parameters()), **options
        ), schedules

    (accelerator, *_), _ = one()
    accelerator.save_state(str(tmp_path), safe_serialization=False)
    # That was after eight steps: two since the controller's last look.
    (_, straight, _, last), theirs = one(epochs=4)
    (_, resumed, _, also_last), mine = one(resume=str(tmp_path))
    assert also_last == last
    torch.testing.assert_close(setting.weights(resumed), setting.weights(straight), rtol=0, atol=0)
    for schedule, other in zip(mine, theirs, strict=True):
        assert schedule.state_dict() == other.state_dict()
    assert mine[0].steps_taken == 16


def on_one_of_several(rank, folder):
    for name, (make, accumulation) in setting.SHARED.items():
        objective = make()
        schedules = setting.steered(objective)
        accelerator, model, _, last = run(
            objective, schedules, batch_size=2, gradient_accumulation_steps=accumulation
        )
        assert accelerator.num_processes == 2
        found = model.state_dict(), last, [str(schedule) for schedule in schedules]
        torch.save(found, folder / f"{name} {rank}.pt")
        GradientState._reset_state()
        AcceleratorState._reset_state()


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    as_torchrun_would(on_one_of_several, folder)
    return folder


@works_with("accelerate", "devices")
@pytest.mark.parametrize("name", list(setting.SHARED))
def test_two_processes_update_as_one_with_the_whole_batch(by_two, name):
    make, accumulation = setting.SHARED[name]
    for rank in (0, 1):
        saved, last, theirs = torch.load(by_two / f"{name} {rank}.pt")
        model = setting.recipe(RECIPE)["Towers"](setting.encoder(), make())
        model.load_state_dict(saved)
        reference = make()
        schedules = setting.steered(reference)
        last = last if name == "gathered" else None  # the loss of a process is of its rows
        compare(model, last, reference, schedules, batch_size=4 * accumulation)
        assert [str(schedule) for schedule in schedules] == theirs
