"""TrainingState in the Trainer of transformers: what the table of test_loops.py does not say."""

import base64
import json
import re

import pytest
import torch
from safetensors.torch import save
from transformers import TrainerCallback

from sparse_losses import Diagnostics, InfoNCELoss, SparsityController, SpladeEncoder
from sparse_losses.integrations.transformers import TrainingState
from tests.integrations import setting
from tests.integrations.trainers import adamw, by_hugging_face, compare
from tests.objective.test_late_copies import LateCopy

VOCAB_SIZE = setting.VOCAB_SIZE
EXACT = {"rtol": 0.0, "atol": 0.0}
works_with = pytest.mark.works_with
TRAINER = "Hugging Face Trainer"
ObjectiveTrainer = setting.example("train_with_transformers").ObjectiveTrainer


def make(folder, objective, *schedules, encoder=None, state=None, optimized=None, **settings):
    """A trainer with the callback; of a model and a learned temperature."""
    encoder = setting.encoder() if encoder is None else encoder
    if state is None:
        diagnostics = {side: Diagnostics(VOCAB_SIZE) for side in ("query", "document")}
        state = TrainingState(*schedules, loss=objective, diagnostics=diagnostics)
    parameters = [*encoder.model.parameters(), *objective.parameters()]
    trainer = ObjectiveTrainer(
        encoder.model,
        setting.arguments(folder, remove_unused_columns=False, **settings),
        objective=objective,
        processing_class=encoder.tokenizer,
        data_collator=setting.collate,
        train_dataset=setting.rows(40),
        eval_dataset=setting.rows(7),
        optimizers=(adamw(parameters if optimized is None else optimized), None),
        callbacks=[state],
    )
    return trainer


def logs_of(trainer, name="loss"):
    """The log, without the times."""
    entries = [entry for entry in trainer.state.log_history if name in entry]
    timed = ("runtime", "per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in entries]


@works_with(TRAINER, "accumulation")
def test_last_step_of_fewer_batches_is_their_mean(tmp_path):
    run = by_hugging_face(tmp_path, setting.row_by_row(), accumulation=3, epochs=1)
    assert len(run.totals) == 2
    compare(run, setting.row_by_row(), batch_size=12, epochs=1)


@works_with(TRAINER, "resume")
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"accelerator_config": {"use_seedable_sampler": False}},  # PyTorch's own
    ],
)
def test_shuffled_rows_and_dropout_resume_to_the_bit(tmp_path, settings):
    def run(resume=None):
        objective = setting.objective()
        schedules = setting.steered(objective)
        trainer = make(
            tmp_path,
            objective,
            *schedules,
            encoder=setting.encoder(dropout=0.1),
            max_steps=8,
            save_strategy="steps",
            save_steps=4,
            lr_scheduler_type="linear",
            **settings,
        )
        trainer.train(resume_from_checkpoint=resume)
        weights = setting.weights(trainer.model, objective)
        states = json.loads(
            json.dumps([one.state_dict() for one in schedules])
        )  # as they are saved
        return weights, logs_of(trainer), states, schedules

    weights, logs, states, (schedule, controller) = run()
    moved = tmp_path / "elsewhere"
    (tmp_path / "checkpoint-4").rename(moved)
    then_weights, then_logs, then_states, _ = run(str(moved))
    torch.testing.assert_close(then_weights, weights, **EXACT)
    assert then_logs == logs
    assert then_states == states
    assert schedule.steps_taken == 8
    assert controller.checkpoint == str(tmp_path / "checkpoint-8")


def test_checkpoint_is_a_folder_of_the_model_and_a_file_of_numbers(tmp_path):
    encoder, objective = setting.encoder(), setting.objective()
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    make(tmp_path, objective, *setting.steered(objective), encoder=encoder, **settings).train()
    folder = tmp_path / "checkpoint-2"
    saved = SpladeEncoder.from_pretrained(folder)
    texts = ["서울 맛집", "a learned sparse retriever"]
    encoder.eval()
    one, other = (x.encode(texts, output="dense") for x in (saved, encoder))
    torch.testing.assert_close(one, other, **EXACT)
    state = json.loads((folder / "trainer_state.json").read_text("utf-8"))
    saved = state["stateful_callbacks"]["TrainingState"]
    assert saved["schedules"][0]["steps_taken"] == 2
    assert saved["learned"] == ["loss.info_nce.temperature"]


@works_with(TRAINER, "resume")
def test_best_model_comes_back_with_the_parameters_of_its_loss(tmp_path):
    objective = setting.objective()
    trainer = make(
        tmp_path,
        objective,
        max_steps=6,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="terms/info_nce",
        greater_is_better=True,  # so that the first is the best
    )
    trainer.train()
    assert trainer.state.best_global_step == 2
    name = "eval_terms/info_nce"
    before = [entry[name] for entry in logs_of(trainer, name)]
    assert trainer.evaluate()["eval_loss"] == logs_of(trainer, name)[0]["eval_loss"]
    assert before[0] > before[-1]


@works_with(TRAINER, "fp32")
def test_terms_are_logged_as_means_of_the_window(tmp_path):
    """An evaluation in between is no part of it."""
    objective = setting.objective()
    controller = SparsityController(objective, target_active=30)
    trainer = make(
        tmp_path,
        objective,
        controller,
        max_steps=5,
        gradient_accumulation_steps=2,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=1,
    )
    outputs = []
    objective.register_forward_hook(
        lambda *args: outputs.append(args[-1]) if torch.is_grad_enabled() else None
    )
    trainer.train()
    logs = logs_of(trainer)
    assert len(logs) == 2
    for entry, window in zip(logs, (outputs[:4], outputs[4:8]), strict=True):
        for name in ("info_nce", "query_flops"):  # the controller waits
            values = [output.terms[name].item() for output in window]
            assert entry[f"terms/{name}"] == pytest.approx(sum(values) / 4)
        assert entry["loss"] == pytest.approx(sum(o.total.item() for o in window) / 4)
        assert entry["query/texts"] == entry["document/texts"] == 16
        assert 0 < entry["query/active_dimensions"] < entry["document/largest"]
    report = controller.report()
    assert logs[1]["document_flops/target"] == 30
    assert logs[1]["document_flops/weight"] == 0.0  # it waits
    assert controller.steps == 5
    assert logs[1]["document_flops/status"] == report["status"] == "waiting"


class Seen(TrainerCallback):
    names: frozenset[str] = frozenset()

    def on_log(self, *_, logs, **__):
        self.names |= logs.keys()


@pytest.mark.parametrize("is_first", [True, False])
def test_callbacks_see_the_numbers_of_one_before_them(tmp_path, is_first):
    objective, seen = setting.objective(), Seen()
    trainer = make(tmp_path, objective, state=TrainerCallback(), max_steps=1)
    both = [TrainingState(loss=objective), seen]
    for callback in both if is_first else both[::-1]:
        trainer.add_callback(callback)
    trainer.train()
    assert ("terms/info_nce" in seen.names) == is_first
    assert "terms/info_nce" in logs_of(trainer)[0]


def test_unmeasured_number_of_a_controller_is_not_logged(tmp_path, monkeypatch):
    """On an accelerator a measurement arrives a step later."""
    monkeypatch.setattr("sparse_losses.objective.controller.HostCopy", LateCopy)
    objective = setting.objective()
    controller = SparsityController(objective, target_active=30)
    trainer = make(tmp_path, objective, controller)
    trainer.train()
    logs = logs_of(trainer)
    assert ["document_flops/active" in entry for entry in logs] == [False, True, True, True]
    assert all(entry["document_flops/status"] == "waiting" for entry in logs)


def test_evaluation_terms_are_means_over_rows(tmp_path):
    """As the loss is; the last batch has fewer rows."""
    objective, rows = setting.objective(), setting.rows(7)
    settings = {"eval_on_start": True, "per_device_eval_batch_size": 4}
    trainer = make(tmp_path, objective, max_steps=1, **settings)
    trainer.train()
    metrics = logs_of(trainer, "eval_loss")[0]
    encoder, reference = setting.encoder().eval(), setting.objective()
    with torch.no_grad():
        four, three = (
            reference(setting.batch_of(encoder, setting.collate(some)))
            for some in (rows[:4], rows[4:])
        )
    mean = (4 * four.total.item() + 3 * three.total.item()) / 7
    assert metrics["eval_loss"] == pytest.approx(mean, rel=1e-5)
    for name, term in four.terms.items():
        mean = (4 * term.item() + 3 * three.terms[name].item()) / 7
        assert metrics[f"eval_terms/{name}"] == pytest.approx(mean, rel=1e-5)
    assert not objective._forward_hooks, "nothing stays attached"


def test_evaluation_counts_active_dimensions(tmp_path):
    objective, rows = setting.objective(), setting.rows(7)
    terms = {"query_flops": "anchor", "document_flops": "positive"}
    controllers = [SparsityController(objective, term, target_active=2) for term in terms]
    settings = {"eval_on_start": True, "per_device_eval_batch_size": 4}
    trainer = make(tmp_path, objective, *controllers, max_steps=1, **settings)
    trainer.train()
    metrics = logs_of(trainer, "eval_loss")[0]
    with torch.no_grad():
        batch = setting.batch_of(setting.encoder().eval(), setting.collate(rows))
    for term, side in terms.items():
        active = getattr(batch, side).activations.count_nonzero().item() / 7
        assert metrics[f"eval_{term}/active"] == pytest.approx(active)


def test_parameters_that_are_not_optimised_are_an_error(tmp_path):
    encoder, objective = setting.encoder(), setting.objective()
    trainer = make(tmp_path, objective, encoder=encoder, optimized=encoder.model.parameters())
    with pytest.raises(ValueError, match=r"one without \['loss.info_nce.temperature'\]: pass the"):
        trainer.train()


def test_loss_within_the_model_is_the_models(tmp_path):
    """Then the trainer saves and averages it."""
    encoder, objective = setting.encoder(), setting.objective()
    encoder.model.objective = objective
    state = TrainingState(loss=objective)
    trainer = make(
        tmp_path, objective, encoder=encoder, state=state, optimized=encoder.parameters()
    )
    trainer.train()
    assert state.state()["learned"] == []


def test_checkpoint_of_another_run_is_an_error(tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    objective = setting.objective()
    make(tmp_path, objective, *setting.steered(objective), **saved).train()
    for state, message in (
        (TrainingState(), r"state of 0 schedules .* \[\], got one with 2 and .*temperature'\]"),
        (
            TrainingState(*setting.steered(objective)[:1], loss=objective),
            r"of 1 schedules .* 2 and",
        ),
    ):
        other = make(tmp_path, objective, state=state, **saved)
        with pytest.raises(ValueError, match=message):
            other.train(resume_from_checkpoint=True)


def test_second_training_state_is_an_error_when_training_starts(tmp_path):
    trainer = make(tmp_path, setting.objective(), state=TrainingState())
    trainer.add_callback(TrainingState())
    with pytest.raises(ValueError, match="expected one TrainingState for all schedules"):
        trainer.train()


@works_with(TRAINER, "resume")
def test_damaged_checkpoint_and_replaced_callbacks_are_errors(tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    objective = setting.objective()
    make(tmp_path, objective, **saved).train()
    name = "restore_callback_states_from_checkpoint"
    trainer = make(tmp_path, objective, **saved, **{name: True})
    with pytest.raises(ValueError, match=f"without `{name}`"):
        trainer.train(resume_from_checkpoint=True)
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    content = json.loads(path.read_text("utf-8"))
    others = save({"loss.info_nce.temperature": torch.ones(2)})
    for tensors in (None, "garbage", base64.b64encode(others).decode()):
        content["stateful_callbacks"]["TrainingState"]["tensors"] = tensors
        path.write_text(json.dumps(content))
        before = objective.info_nce.temperature.item()
        with pytest.raises(ValueError, match=r"temperature'\] of checkpoint-2 are damaged"):
            make(tmp_path, objective, **saved).train(resume_from_checkpoint=True)
        assert objective.info_nce.temperature.item() == before


def test_arguments_of_other_types_are_errors():
    for wrong in (3, setting.objective()):
        with pytest.raises(TypeError, match="expected schedules and controllers, got"):
            TrainingState(wrong)
    for wrong in ("x", {"loss": 3}):
        with pytest.raises(TypeError, match="expected `loss` to be a module or a dict of modules"):
            TrainingState(loss=wrong)


@pytest.mark.parametrize("target", [5, 90])
def test_the_end_of_a_run_says_what_became_of_the_target(target, tmp_path, capsys):
    """A target below what is active is reached by calibration, and another is named."""
    encoder, objective = setting.encoder(), setting.objective()
    documents = [row["positive"] for row in setting.rows(60)]
    controller = SparsityController(objective, target_active=target)
    objective.weights["query_flops"] = 0.0
    options = {"calibrate_on": documents, "encoder": encoder}
    if target == 5:
        options["calibrate_to"] = target = 6
    state = TrainingState(controller, loss=objective, **options)
    make(tmp_path, objective, encoder=encoder, state=state, max_steps=7).train()
    given = [text for number, text in enumerate(documents) if number % 5]
    counts = [
        (encoder.encode_document(texts, output="dense") > 0).sum(1).double().mean().item()
        for texts in (given, documents[::5])
    ]
    found = [line for line in capsys.readouterr().out.splitlines() if "wanted" in line]
    pattern = r"documents: ([\d.]+) active of (\d+) wanted, (.*); ([\d.]+) on texts left out of it"
    (first, wanted, done, left_out) = re.search(pattern, found[-1]).groups()
    assert [first, wanted, left_out] == [f"{counts[0]:.1f}", str(target), f"{counts[1]:.1f}"]
    assert controller.outcome() in found[0]
    if target == 6:
        assert counts[0] == pytest.approx(target, rel=0.02)
        assert done == "after calibration"
        assert encoder.document_threshold > 0
        assert "`calibrate` prunes the rest" in found[0]
    else:
        assert done == "not calibrated, which only removes dimensions"
        assert encoder.document_threshold is None


def test_calibration_needs_texts_a_target_and_an_encoder(tmp_path):
    objective = setting.objective()
    controller = SparsityController(objective, target_active=5)
    with pytest.raises(ValueError, match="at least five texts, got 4"):
        TrainingState(controller, calibrate_on=["a"] * 4)
    with pytest.raises(TypeError, match="list of strings, got str"):
        TrainingState(controller, calibrate_on="a document")
    with pytest.raises(ValueError, match="expected `calibrate_to`"):
        TrainingState(calibrate_on=["a"] * 5)
    state = TrainingState(controller, loss=objective, calibrate_on=["a"] * 5)
    with pytest.raises(TypeError, match=r"expected a SpladeEncoder, .* got BertForMaskedLM"):
        make(tmp_path, objective, state=state, max_steps=1).train()


def test_diagnostics_are_of_a_side_and_losses_may_be_a_dict():
    with pytest.raises(ValueError, match="diagnostics"):
        TrainingState(diagnostics={"queries": Diagnostics(VOCAB_SIZE)})
    losses = {"a.b": InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.5)))}
    assert list(TrainingState(loss=losses).losses) == ["a.b"], "data sets may have dots"
