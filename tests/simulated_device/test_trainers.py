"""A step of the trainers on a device that is not the CPU: they wait, our parts add nothing.

What waits is counted with a plain loss first: the Trainer for its inputs, to look for NaN and to
log, the model to look for padding.
"""

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from sentence_transformers import SparseEncoderTrainer
from transformers import TrainerCallback, TrainingArguments

from sparse_losses import (
    Diagnostics,
    InfoNCELoss,
    SparsityController,
    SpladeObjective,
    TrainingSchedule,
    Warmup,
)
from sparse_losses.integrations.sentence_transformers import LossState, SentenceTransformersLoss
from sparse_losses.integrations.transformers import SpladeTrainer
from tests.integrations import setting
from tests.integrations.sentence_transformers import runs
from tests.representation.tiny_models import pair
from tools import simulated_device

if reason := simulated_device.why_not():
    pytest.skip(reason, allow_module_level=True)
simulated_device.start()
SIM = torch.device("sim")
STEPS, LOGGED_EVERY = 9, 3
SETTINGS = {
    "max_steps": STEPS,
    "logging_steps": LOGGED_EVERY,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


@pytest.fixture(autouse=True)
def _state():
    """Ties of weights survive the move, and accelerate forgets the device afterwards."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)
    AcceleratorState._reset_state(reset_partial_state=True)


def on_the_device(arguments):
    """The arguments, of a Trainer that finds the simulated device (accelerate knows no other)."""
    assert arguments.device.type == "cpu"
    PartialState._shared_state["device"] = vars(arguments)["_setup_devices"] = SIM
    return arguments


class CountWaits(TrainerCallback):
    """How often the host waits in each step, from its beginning to that of the next."""

    def __init__(self):
        self.found, self.counting = [], None

    def on_step_begin(self, *_, **__):
        self.on_train_end()
        self.counting = simulated_device.counting()
        self.counts = self.counting.__enter__()

    def on_train_end(self, *_, **__):
        if self.counting is not None:
            self.counting.__exit__(None, None, None)
            self.found.append(self.counts.waits)
        self.counting = None


def waits(trainer):
    """In each step but the first, in which ids are copied once, and the last, which ends it all."""
    trainer.add_callback(counter := CountWaits())
    with simulated_device.lag(200):  # a fifth of a step
        trainer.train()
    assert len(counter.found) == STEPS
    return counter.found[1:-1]


def splade_trainer(folder, objective, **options):
    rows = [{k: row[k] for k in ("anchor", "positive", "negative")} for row in setting.rows()]
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=4, **SETTINGS)
    return SpladeTrainer(
        setting.encoder(max_length=16).to(SIM),
        on_the_device(arguments),
        objective=objective,
        train_dataset=rows,
        **options,
    )


def test_the_trainer_of_transformers_waits_as_with_a_plain_loss(tmp_path):
    def plain(batch):
        return (batch.anchor.activations * batch.positive.activations).sum()

    expected = waits(splade_trainer(tmp_path, plain))
    objective = setting.objective().to(SIM)
    special, size = setting.tokenizer().all_special_ids, setting.VOCAB_SIZE
    trainer = splade_trainer(
        tmp_path,
        objective,
        schedules=setting.steered(objective),
        diagnostics={
            s: Diagnostics(size, special_token_ids=special) for s in ("query", "document")
        },
    )
    assert waits(trainer) == expected
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS // LOGGED_EVERY
    for entry in logged:
        assert entry["info_nce"] > 0
        assert entry["query/active_dimensions"] > 0
        assert entry["document/texts"] == 4 * LOGGED_EVERY
    weights = [entry["document_flops/weight"] for entry in logged]
    assert len({*weights}) == len(weights), "it is steered"


class Plain(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, features, labels=None):
        return sum(self.model(column)["sentence_embedding"].sum() for column in features)


def sentence_trainer(folder, make_loss, *steered):
    model, tokenizer = pair("bert")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    encoder = runs.sparse_encoder(str(folder / "model")).to(SIM)
    # Their filter waits twice for each value that a loss reports.
    settings = SETTINGS | {"logging_nan_inf_filter": False}
    trainer = SparseEncoderTrainer(
        model=encoder,
        args=on_the_device(runs.arguments(folder, **settings)),
        train_dataset=runs.dataset(3),
        loss=make_loss(encoder),
    )
    trainer.add_callback(LossState(trainer, *steered))
    return trainer


def test_the_trainer_of_sentence_transformers_waits_no_more_than_with_a_plain_loss(tmp_path):
    expected = waits(sentence_trainer(tmp_path, Plain))
    objective = SpladeObjective(
        {"info_nce": 1.0, "query_flops": 0.1, "document_flops": 0.1, "triplet_margin": 0.1},
        info_nce=InfoNCELoss(temperature=0.1),
        special_token_ids=[0, 1],
    ).to(SIM)
    steered = [
        TrainingSchedule(objective, warmups={"query_flops": Warmup(5)}),
        SparsityController(objective, target_active=9, every=2, ignore_steps=0),
    ]
    trainer = sentence_trainer(
        tmp_path, lambda model: SentenceTransformersLoss(model, objective), *steered
    )
    for step, (ours, theirs) in enumerate(zip(waits(trainer), expected, strict=True), start=2):
        if step % LOGGED_EVERY:  # where it logs it reads and resets each term
            assert ours <= theirs, step
    assert objective.weights["query_flops"] == 0.1
    assert objective.weights["document_flops"] != 0.1
