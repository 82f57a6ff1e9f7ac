"""What is not in the model: learned, scheduled, steered, saved and resumed.

A whole run with all of it, resumed, is a row of tests/integrations/test_loops.py.
"""

import pytest
from datasets import DatasetDict

from sparse_losses import (
    FlopsLoss,
    InfoNCELoss,
    SparsityController,
    SpladeObjective,
    TrainingSchedule,
    Warmup,
)
from sparse_losses.integrations.sentence_transformers import LossState, SentenceTransformersLoss
from tests.integrations.sentence_transformers.runs import (
    NAME,
    assert_same_weights,
    dataset,
    learning,
    logged,
    splade,
    train,
)


def run_with_state(model, path, resume=None, keep=True, **settings):
    """A temperature that is learned, a schedule and a controller, saved every other step."""
    ours = SpladeObjective(
        {"info_nce": 1.0, "document_flops": 0.02, "query_flops": 0.01}, info_nce=learning()
    )
    schedule = TrainingSchedule(ours, warmups={"query_flops": Warmup(5, "quadratic")})
    controller = SparsityController(ours, "document_flops", target_active=20)
    kept = [lambda trainer: LossState(trainer, schedule, controller)]
    saved = {"save_strategy": "steps", "save_steps": 2}
    loss = SentenceTransformersLoss(model, ours)
    callbacks = kept if keep else ()
    trainer = train(model, loss, dataset(2), path, resume, callbacks, **saved, **settings)
    return trainer, ours, schedule


@pytest.mark.works_with(NAME, "fp32", "resume")
def test_what_a_loss_learned_is_resumed_alone_too(sparse, tmp_path):
    runs = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = sparse()
        loss = {
            "pairs": SentenceTransformersLoss(model, learning()),
            "splade": splade(model, SentenceTransformersLoss(model, learning()), FlopsLoss()),
        }
        data = DatasetDict({"pairs": dataset(2), "splade": dataset(3)})
        settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
        settings |= {"multi_dataset_batch_sampler": "round_robin", "callbacks": [LossState]}
        trainer = train(model, loss, data, tmp_path, resume=resume, **settings)
        learned = [loss["pairs"].loss.temperature, loss["splade"].loss.loss.temperature]
        runs.append((logged(trainer), [x.item() for x in learned], model))
    (values, learned, model), (resumed_values, resumed, same) = runs
    assert resumed == learned
    assert len({0.5, *learned}) == 3
    assert resumed_values == values
    assert_same_weights(same, model, rtol=0, atol=0)


def test_state_that_is_not_there_is_an_error(sparse, tmp_path):
    run_with_state(sparse(), tmp_path, max_steps=2, keep=False)
    middle = str(tmp_path / "checkpoint-2")
    with pytest.raises(FileNotFoundError, match=r"sparse_losses.pt in .*checkpoint-2, .* got none"):
        run_with_state(sparse(), tmp_path, resume=middle)
    run_with_state(sparse(), tmp_path, max_steps=2)
    model, ours = sparse(), SpladeObjective({"info_nce": 1.0}, info_nce=learning())
    loss, kept = SentenceTransformersLoss(model, ours), [lambda trainer: LossState(trainer)]
    with pytest.raises(ValueError, match=r"temperature'\] and 0 schedules .* got .*'\] and 2"):
        train(model, loss, dataset(2), tmp_path, resume=middle, callbacks=kept)


def test_their_warm_up_resumes_over_our_regularisers(sparse, tmp_path):
    runs = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = sparse()
        loss = splade(model, SentenceTransformersLoss(model, InfoNCELoss()), FlopsLoss())
        settings = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 3}
        trainer = train(model, loss, dataset(2), tmp_path, resume=resume, **settings)
        runs.append((trainer, model))
    (whole, model), (resumed, same) = runs
    parts = logged(whole, "document_regularizer_loss")
    assert parts[0] == 0.0
    assert parts[1] > 0.0
    assert logged(resumed, "document_regularizer_loss")[-4:] == parts[-4:]
    assert_same_weights(same, model, rtol=0, atol=0)


def test_nothing_stays_attached_after_training(sparse, tmp_path):
    model = sparse()
    trainer, ours, schedule = run_with_state(model, tmp_path)
    assert schedule.steps_taken == 6
    assert not ours._forward_hooks
    trainer.train()
    assert schedule.steps_taken == 12
