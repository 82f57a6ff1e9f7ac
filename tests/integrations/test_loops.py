"""Every trainer makes the updates of a plain loop."""

import functools
import itertools

import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.distributed.ranks import as_torchrun_would
from tests.integrations import setting
from tests.integrations.trainers import (
    Run,
    adamw,
    by_accelerate,
    by_hugging_face,
    by_lightning,
    by_sentence_transformers,
    compare,
)

works_with = pytest.mark.works_with
HALF = "half"  # of a run: the folder or file that the other half resumes from
TRAINERS = {
    "accelerate": by_accelerate,
    "Lightning": by_lightning,
    "Hugging Face Trainer": by_hugging_face,
    "sentence-transformers": by_sentence_transformers,
}
STATUS = "document_flops/status"
OF_TRANSFORMERS = (by_hugging_face, by_sentence_transformers)


each_trainer = pytest.mark.parametrize("train", TRAINERS.values(), ids=list(TRAINERS))


def each_works_with(*features):
    """Run for each trainer; the marks are the cells of docs/compatibility.md."""
    named = TRAINERS.items()
    marked = [pytest.param(train, id=n, marks=works_with(n, *features)) for n, train in named]
    return pytest.mark.parametrize("train", marked)


@pytest.fixture(autouse=True)
def _own_state():
    """The settings of an Accelerator hold for the process."""
    yield
    setting.forget_accelerator()


@each_works_with("fp32")
def test_updates_are_those_of_a_plain_loop(train, tmp_path):
    objective, reference = setting.objective(), setting.objective()
    schedules, theirs = setting.steered(objective), setting.steered(reference)
    run = train(tmp_path, objective, schedules)
    compare(run, reference, theirs)
    assert [str(schedule) for schedule in schedules] == [str(schedule) for schedule in theirs]
    assert schedules[0].steps_taken == 8
    assert objective.info_nce.temperature.item() != pytest.approx(1.0)
    assert run.terms["info_nce"] + 0.01 * run.terms["query_flops"] < run.totals[-1]


@each_works_with("bf16")
def test_updates_under_bf16_autocast_are_those_of_a_plain_loop(train, tmp_path):
    run = train(tmp_path, setting.objective(), mixed_precision="bf16")
    compare(run, setting.objective(), bf16=True, tolerance=1e-3)


# The compiler looks at the gradients of its inputs, also of those that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@each_works_with("compile")
def test_compiled_updates_are_those_of_a_plain_loop(train, tmp_path):
    torch._dynamo.reset()
    objective, reference = setting.objective(), setting.objective()
    run = train(tmp_path, objective, setting.steered(objective), compiled=True)
    compare(run, reference, setting.steered(reference), tolerance=1e-4)


@each_works_with("accumulation")
def test_accumulated_updates_are_those_of_the_whole_batch(train, tmp_path):
    schedule, _ = setting.steered(setting.objective())
    run = train(tmp_path, setting.row_by_row(), [schedule], batch_size=2, accumulation=4)
    if train not in OF_TRANSFORMERS:
        run.totals.clear()  # of other batches
    compare(run, setting.row_by_row(), batch_size=8)
    assert schedule.steps_taken == 4


@each_works_with("resume")
def test_a_resumed_run_continues_to_the_bit(train, tmp_path):
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
    """Options with which the first steps overflow."""
    if train is by_accelerate:
        return {"kind": Scaled}
    if train in OF_TRANSFORMERS:
        return {"scaler": torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=2.0**-60)}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-12)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


@works_with("Lightning", "fp16")
@each_trainer
def test_skipped_steps_do_not_count(train, tmp_path):
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


def compare_steered(train, folder, **options):
    """Compare a run with schedules, of which the controller sees every text once."""
    objective, reference = setting.objective(), setting.objective()
    schedules, theirs = setting.steered(objective), setting.steered(reference)
    run = train(folder, objective, schedules, batch_size=8, **options)
    compare(run, reference, theirs, batch_size=8)
    assert [str(schedule) for schedule in schedules] == [str(schedule) for schedule in theirs]
    assert schedules[0].steps_taken == 4


@works_with("sentence-transformers", "cached")
def test_cached_gradients_are_those_of_the_whole_batch_by_sentence_transformers(tmp_path):
    compare_steered(by_sentence_transformers, tmp_path, mini_batch_size=3)


BY_TWO = pytest.mark.parametrize("name", list(setting.SHARED))


def key_of(train, name):
    return f"{train.__name__} {name}"


def run_on_this_rank(rank, folder, train, name, **options):
    setting.forget_accelerator()
    make, accumulation = setting.SHARED[name]
    objective = make()
    schedules = setting.steered(objective)
    sizes = {"batch_size": 2, "accumulation": accumulation, "rank": rank}
    run = train(folder, objective, schedules, **sizes, **options)
    assert torch.distributed.get_world_size() == 2
    weights = run.encoder.state_dict(), objective.state_dict()
    states = [(schedule.state_dict(), str(schedule)) for schedule in schedules]
    return run, (weights, run.totals, run.terms, states)


def on_one_of_several(rank, folder):
    for train, name in itertools.product(TRAINERS.values(), setting.SHARED):
        this, half = folder / key_of(train, name), folder / f"{key_of(train, name)} {HALF}"
        here = functools.partial(run_on_this_rank, rank, this, train, name)
        run, outputs = here()
        run.save(half)
        straight, resumed = here(epochs=4)[1], here(resume=half)[1]
        torch.save((outputs, straight, resumed), folder / f"{key_of(train, name)} {rank}.pt")


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    as_torchrun_would(on_one_of_several, folder)
    return folder


@each_works_with("devices")
@BY_TWO
def test_two_processes_update_as_one_with_the_whole_batch(train, by_two, name):
    make, accumulation = setting.SHARED[name]
    for rank in (0, 1):
        outputs, _, _ = torch.load(by_two / f"{key_of(train, name)} {rank}.pt")
        (saved, learned), totals, _, states = outputs
        encoder, objective, reference = setting.encoder(), make(), make()
        encoder.load_state_dict(saved)
        objective.load_state_dict(learned)
        schedules = setting.steered(reference)
        if name != "gathered" and train not in OF_TRANSFORMERS:  # which means them over processes
            totals = []  # the loss of a process is of its rows
        run = Run(encoder, objective, totals, {}, None, None)
        compare(run, reference, schedules, batch_size=4 * accumulation)
        assert [str(schedule) for schedule in schedules] == [text for _, text in states]


@each_works_with("devices", "resume")
@BY_TWO
def test_two_processes_resume_with_the_same_figures(train, by_two, name):
    for rank in (0, 1):
        _, straight, resumed = torch.load(by_two / f"{key_of(train, name)} {rank}.pt")
        torch.testing.assert_close(resumed[0], straight[0], rtol=0, atol=0)
        assert resumed[1] == straight[1][-len(resumed[1]) :]
        assert resumed[2:] == straight[2:]


@works_with("Hugging Face Trainer", "devices")
@BY_TWO
def test_two_processes_of_the_hugging_face_trainer_log_as_one(by_two, name, tmp_path):
    make, accumulation = setting.SHARED[name]
    objective = make()
    schedules = setting.steered(objective)
    run = by_hugging_face(tmp_path, objective, schedules, batch_size=4 * accumulation)
    for rank in (0, 1):
        outputs, _, _ = torch.load(by_two / f"{key_of(by_hugging_face, name)} {rank}.pt")
        logged = outputs[2]
        assert "document/active_dimensions" in logged
        assert logged.keys() == run.terms.keys()
        for key, value in run.terms.items():
            assert logged[key] == (pytest.approx(value, rel=1e-3) if key != STATUS else value)
