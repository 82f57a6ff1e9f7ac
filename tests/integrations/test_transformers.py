"""TrainingState in the Trainer of transformers: what the table of test_loops.py does not say."""

import json

import pytest
import torch

from sparse_losses import Diagnostics, SpladeBatch
from sparse_losses.integrations.transformers import TrainingState
from tests.integrations import setting
from tests.integrations.trainers import adamw

SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
works_with = pytest.mark.works_with
TRAINER = "Hugging Face Trainer"
ObjectiveTrainer = setting.example("train_with_transformers").ObjectiveTrainer


def make(folder, objective, *schedules, encoder=None, state=None, optimized=None, **settings):
    """A trainer with the callback; of a model and a learned temperature."""
    encoder = setting.encoder() if encoder is None else encoder
    if state is None:
        diagnostics = {side: Diagnostics(setting.VOCAB_SIZE) for side in ("query", "document")}
        state = TrainingState(*schedules, loss=objective, diagnostics=diagnostics)
    parameters = [*encoder.parameters(), *objective.parameters()]
    return ObjectiveTrainer(
        encoder,
        setting.arguments(folder, remove_unused_columns=False, **settings),
        objective=objective,
        data_collator=setting.collate,
        train_dataset=setting.rows(40),
        eval_dataset=setting.rows(7),
        optimizers=(adamw(parameters if optimized is None else optimized), None),
        callbacks=[state],
    )


def logs_of(trainer, name="loss"):
    """The log, without the times."""
    entries = [entry for entry in trainer.state.log_history if name in entry]
    timed = ("runtime", "per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in entries]


@works_with(TRAINER, "resume")
def test_best_model_comes_back_with_the_parameters_of_its_loss(tmp_path):
    objective, name = setting.objective(), "eval_terms/info_nce"
    best = {"load_best_model_at_end": True, "metric_for_best_model": "terms/info_nce"}
    best["greater_is_better"] = True  # so that the first is the best
    best |= {"eval_strategy": "steps", "eval_steps": 2}
    trainer = make(tmp_path, objective, **(SAVED | best | {"max_steps": 6}))
    trainer.train()
    assert trainer.state.best_global_step == 2
    before = [entry[name] for entry in logs_of(trainer, name)]
    assert trainer.evaluate()["eval_loss"] == logs_of(trainer, name)[0]["eval_loss"]
    assert before[0] > before[-1]


def test_schedules_begin_again_with_a_run_that_finds_its_batch_size(tmp_path, monkeypatch):
    objective = setting.objective()
    schedule = setting.schedule_of(objective)
    trainer = make(tmp_path, objective, schedule, auto_find_batch_size=True, max_steps=3)
    compute, sizes = trainer.compute_loss, []

    def short_of_memory(model, inputs, **options):
        sizes.append(len(inputs["anchor"]["input_ids"]))
        if sizes == [4, 4]:
            raise RuntimeError("CUDA out of memory.")
        return compute(model, inputs, **options)

    monkeypatch.setattr(trainer, "compute_loss", short_of_memory)
    trainer.train()
    assert sizes[1] > sizes[2]
    assert schedule.steps_taken == 3 == len(sizes) - 2


@works_with(TRAINER, "fp32")
def test_terms_are_logged_as_means_of_the_window(tmp_path):
    """An evaluation in between is no part of it."""
    objective = setting.objective()
    sizes = {"max_steps": 5, "gradient_accumulation_steps": 2, "logging_steps": 2}
    trainer = make(tmp_path, objective, **sizes, eval_strategy="steps", eval_steps=1)
    outputs = []
    objective.register_forward_hook(
        lambda *args: outputs.append(args[-1]) if torch.is_grad_enabled() else None
    )
    trainer.train()
    logs = logs_of(trainer)
    assert len(logs) == 2
    for entry, window in zip(logs, (outputs[:4], outputs[4:8]), strict=True):
        for name in objective.weights:
            values = [output.terms[name].item() for output in window]
            assert entry[f"terms/{name}"] == pytest.approx(sum(values) / 4)
        assert entry["loss"] == pytest.approx(sum(o.total.item() for o in window) / 4)
        assert entry["query/texts"] == entry["document/texts"] == 16
        assert 0 < entry["query/active_dimensions"] < setting.VOCAB_SIZE


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
            reference(SpladeBatch.from_columns(encoder, setting.collate(some)))
            for some in (rows[:4], rows[4:])
        )
    mean = (4 * four.total.item() + 3 * three.total.item()) / 7
    assert metrics["eval_loss"] == pytest.approx(mean, rel=1e-5)
    for name, term in four.terms.items():
        mean = (4 * term.item() + 3 * three.terms[name].item()) / 7
        assert metrics[f"eval_terms/{name}"] == pytest.approx(mean, rel=1e-5)
    assert not objective._forward_hooks, "nothing stays attached"


def test_parameters_that_are_not_optimised_are_an_error(tmp_path):
    encoder, objective = setting.encoder(), setting.objective()
    trainer = make(tmp_path, objective, encoder=encoder, optimized=encoder.parameters())
    with pytest.raises(ValueError, match=r"of the Trainer, got none of \['loss\..*temperature'\]"):
        trainer.train()


def test_second_training_state_is_an_error_when_training_starts(tmp_path):
    trainer = make(tmp_path, setting.objective(), state=TrainingState())
    trainer.add_callback(TrainingState())
    with pytest.raises(ValueError, match="expected one TrainingState for all schedules"):
        trainer.train()


@works_with(TRAINER, "resume")
def test_checkpoints_of_another_run_and_damaged_ones_are_errors(tmp_path):
    objective = setting.objective()
    make(tmp_path, objective, setting.schedule_of(objective), **SAVED).train()
    name = "restore_callback_states_from_checkpoint"
    others = [(TrainingState(), {}), (TrainingState(loss=objective), {}), (None, {name: True})]
    others.append((TrainingState(*[setting.schedule_of(setting.objective())] * 2), {}))
    for state, options in others:
        trainer = make(tmp_path, objective, state=state, **SAVED, **options)
        with pytest.raises(ValueError, match=rf"schedules and the parameters .* without `{name}`"):
            trainer.train(resume_from_checkpoint=True)
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    content = json.loads(path.read_text("utf-8"))
    (key,) = content["stateful_callbacks"]["TrainingState"]["learned"]
    before = setting.temperature(objective).item()
    for learned in (None, {}, {key: "garbage"}, {key: [1.0, 1.0]}):
        content["stateful_callbacks"]["TrainingState"]["learned"] = learned
        path.write_text(json.dumps(content))
        trainer = make(tmp_path, objective, setting.schedule_of(setting.objective()), **SAVED)
        with pytest.raises(ValueError, match=r"temperature'\] in checkpoint-2, got others"):
            trainer.train(resume_from_checkpoint=True)
        assert setting.temperature(objective).item() == before
