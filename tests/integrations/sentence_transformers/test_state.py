"""State that is not in the model: learned, scheduled, controlled, saved and resumed.

A whole run with all of it, resumed, is a row of tests/integrations/test_loops.py.
"""

import pytest
from datasets import DatasetDict

from sparse_losses import FlopsLoss, SparsityController, SpladeObjective
from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss
from sparse_losses.integrations.transformers import TrainingState
from tests.integrations.sentence_transformers.runs import (
    NAME,
    assert_same_weights,
    dataset,
    learning,
    logged,
    splade,
    train,
)
from tests.representation.tiny_models import CORPUS


@pytest.mark.works_with(NAME, "fp32", "resume")
def test_learned_parameters_of_a_dict_of_losses_are_resumed(sparse, tmp_path):
    runs = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = sparse()
        loss = {
            "pairs": SentenceTransformersLoss(model, learning()),
            "splade": splade(model, SentenceTransformersLoss(model, learning()), FlopsLoss()),
        }
        data = DatasetDict({"pairs": dataset(2), "splade": dataset(3)})
        settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
        settings |= {
            "multi_dataset_batch_sampler": "round_robin",
            "callbacks": [TrainingState(loss=loss)],
        }
        trainer = train(model, loss, data, tmp_path, resume=resume, **settings)
        learned = [loss["pairs"].loss.temperature, loss["splade"].loss.loss.temperature]
        runs.append((logged(trainer), [x.item() for x in learned], model))
    (values, learned, model), (resumed_values, resumed, same) = runs
    assert resumed == learned
    assert len({0.5, *learned}) == 3
    assert resumed_values == values
    assert_same_weights(same, model, rtol=0, atol=0)


def test_a_sparse_encoder_is_calibrated_at_the_end(sparse, tmp_path, capsys):
    model, objective = sparse(), SpladeObjective({"info_nce": 1.0, "document_flops": 0.02})
    controller = SparsityController(objective, target_active=9)
    loss, documents = SentenceTransformersLoss(model, objective), CORPUS * 2
    callbacks = [TrainingState(controller, loss=loss, calibrate_on=documents)]
    train(model, loss, dataset(2), tmp_path, callbacks=callbacks)
    given = [text for number, text in enumerate(documents) if number % 5]
    counts = [
        (model.encode_document(texts).to_dense() > 0).sum(1).double().mean().item()
        for texts in (given, documents[::5])
    ]
    assert counts[0] == pytest.approx(9, rel=0.02)
    said = f"documents: {counts[0]:.1f} active of 9 wanted, after calibration; {counts[1]:.1f} on"
    assert said in capsys.readouterr().out
