"""Every trainer makes the updates of a plain loop."""

import itertools

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.distributed.ranks import as_torchrun_would
from tests.integrations import setting, trainers

works_with = pytest.mark.works_with
HALF = "half"  # of a run: the folder or file that the other half resumes from
TRAINERS = {
    "accelerate": trainers.by_accelerate,
    "Lightning": trainers.by_lightning,
    "Hugging Face Trainer": trainers.by_hugging_face,
    "sentence-transformers": trainers.by_sentence_transformers,
}
OF_TRANSFORMERS = (trainers.by_hugging_face, trainers.by_sentence_transformers)


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
    objective = setting.objective()
    run = train(tmp_path, objective)
    trainers.compare(run, setting.objective())
    assert run.schedule.steps_taken == 8
    assert setting.temperature(objective).item() != pytest.approx(1.0)
    assert run.terms["info_nce"] + 0.01 * run.terms["query_flops"] < run.totals[-1]


@each_works_with("bf16")
def test_updates_under_bf16_autocast_are_those_of_a_plain_loop(train, tmp_path):
    run = train(tmp_path, setting.objective(), mixed_precision="bf16")
    trainers.compare(run, setting.objective(), bf16=True, tolerance=1e-3)


# The compiler looks at the gradients of its inputs, also of those that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@each_works_with("compile")
def test_compiled_updates_are_those_of_a_plain_loop(train, tmp_path):
    torch._dynamo.reset()
    run = train(tmp_path, setting.objective(), compiled=True)
    trainers.compare(run, setting.objective(), tolerance=1e-4)


@each_works_with("accumulation")
def test_accumulated_updates_are_those_of_the_whole_batch(train, tmp_path):
    run = train(tmp_path, setting.row_by_row(), batch_size=2, accumulation=4)
    if train not in OF_TRANSFORMERS:
        run.totals.clear()  # of other batches
    trainers.compare(run, setting.row_by_row(), batch_size=8)
    assert run.schedule.steps_taken == 4


class Labelled(setting.InOrder):
    """A Trainer of batches that have `labels`, such as scores of a teacher."""

    def compute_loss(self, model, inputs, *args, **options):
        texts = {name: column for name, column in inputs.items() if name != "labels"}
        return super().compute_loss(model, texts, *args, **options)


class ByTheEncoder(Labelled):
    """A Trainer that does not say how its loss is to be divided: its model does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.model_accepts_loss_kwargs = self.model.accepts_loss_kwargs


@works_with("Hugging Face Trainer", "accumulation")
@pytest.mark.parametrize(
    ("kind", "batch_size", "accumulation"),
    [(Labelled, 4, 3), (ByTheEncoder, 2, 4)],  # three batches, the last step has one
)
def test_labels_in_a_batch_change_no_gradient(kind, batch_size, accumulation, tmp_path):
    def collate(rows):
        return setting.collate(rows) | {"labels": torch.rand(len(rows), 2)}

    options = {"kind": kind, "collate": collate, "epochs": 1}
    sizes = {"batch_size": batch_size, "accumulation": accumulation}
    run = trainers.by_hugging_face(tmp_path, setting.row_by_row(), **sizes, **options)
    trainers.compare(run, setting.row_by_row(), batch_size=batch_size * accumulation, epochs=1)


@each_works_with("resume")
def test_a_resumed_run_continues_to_the_bit(train, tmp_path):
    def one(**options):
        objective = setting.objective()
        run = train(tmp_path, objective, optimizer=trainers.adamw, **options)
        return run, run.schedule.state_dict()

    one()[0].save(tmp_path / HALF)  # after eight steps
    straight, state = one(epochs=4)
    resumed, then_state = one(resume=tmp_path / HALF)
    mine, theirs = (setting.weights(x.encoder, x.objective) for x in (resumed, straight))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert resumed.terms == straight.terms
    assert resumed.totals == straight.totals[-len(resumed.totals) :]
    assert then_state == state
    assert state["steps_taken"] == 16


def overflowing(train):
    """Options with which the first steps overflow in fp16, which accelerate leaves to GPUs."""
    if train is trainers.by_lightning:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-12)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    return {"scaler": torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=2.0**-60)}


@works_with("Lightning", "fp16")
@pytest.mark.parametrize("train", TRAINERS.values(), ids=list(TRAINERS))
def test_skipped_steps_do_not_count(train, tmp_path):
    run = train(tmp_path, setting.objective(), optimizer=trainers.adamw, **overflowing(train))
    taken = {int(state["step"]) for state in run.optimizer.state.values()}
    assert taken < {1, 2, 3, 4, 5, 6, 7}
    assert taken == {run.schedule.steps_taken}
    if train is trainers.by_lightning:
        assert run.totals[-1] < run.totals[0], "in fp16 it trains"


@works_with("sentence-transformers", "cached")
def test_cached_gradients_are_those_of_the_whole_batch_by_sentence_transformers(tmp_path):
    sizes = {"batch_size": 8, "mini_batch_size": 3}
    run = trainers.by_sentence_transformers(tmp_path, setting.objective(), **sizes)
    trainers.compare(run, setting.objective(), batch_size=8)
    assert run.schedule.steps_taken == 4


BY_TWO = pytest.mark.parametrize("name", list(setting.SHARED))


def key_of(train, name):
    return f"{train.__name__} {name}"


def on_one_of_several(rank, folder):
    for train, name in itertools.product(TRAINERS.values(), setting.SHARED):
        key, (make, accumulation) = key_of(train, name), setting.SHARED[name]
        sizes, outputs = {"batch_size": 2, "accumulation": accumulation, "rank": rank}, []
        for options in ({}, {"epochs": 4}, {"resume": folder / f"{key} {HALF}"}):
            setting.forget_accelerator()
            objective = make()
            with torch.no_grad():
                for parameter in objective.parameters():
                    parameter += rank  # each process draws its own, and trains that of the first
            run = train(folder / key, objective, **sizes, **options)
            assert torch.distributed.get_world_size() == 2
            if not options:
                run.save(folder / f"{key} {HALF}")
            weights = run.encoder.state_dict(), objective.state_dict()
            states = run.schedule.state_dict(), objective.weights
            outputs.append((weights, run.totals, run.terms, *states))
        torch.save(outputs, folder / f"{key} {rank}.pt")


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
        (saved, learned), totals, _, _, its_weights = outputs
        encoder, objective = setting.encoder(), make()
        encoder.load_state_dict(saved)
        objective.load_state_dict(learned)
        objective.weights = its_weights
        if name != "gathered" and train not in OF_TRANSFORMERS:  # which means them over processes
            totals = []  # the loss of a process is of its rows
        run = trainers.Run(encoder, objective, totals, {}, None, None, None)
        trainers.compare(run, make(), batch_size=4 * accumulation)


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
    run = trainers.by_hugging_face(tmp_path, make(), batch_size=4 * accumulation)
    for rank in (0, 1):
        outputs, _, _ = torch.load(by_two / f"{key_of(trainers.by_hugging_face, name)} {rank}.pt")
        logged = outputs[2]
        assert "document/active_dimensions" in logged
        assert logged.keys() == run.terms.keys()
        for key, value in run.terms.items():
            assert logged[key] == pytest.approx(value, rel=1e-3)
