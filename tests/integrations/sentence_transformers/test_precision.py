"""Half precision and compilation."""

import pytest
import torch

from sparse_losses import FlopsLoss
from tests.integrations.sentence_transformers.runs import (
    ALONE,
    NAME,
    adapter,
    assert_same_weights,
    dataset,
    logged,
    plain_loop,
    splade,
    train,
)


@pytest.mark.works_with(NAME, "bf16")
@pytest.mark.parametrize(("name", "mini_batch_size"), [("info_nce", None), ("objective", 3)])
def test_bf16(name, mini_batch_size, single, tmp_path):
    loss, columns, labels, function = ALONE[name]
    model, reference, full = single(), single(), single()
    ours = adapter(model, loss, mini_batch_size=mini_batch_size)
    data = dataset(columns, labels)
    once = {"num_train_epochs": 1, "learning_rate": 1e-3}
    trainer = train(model, ours, data, tmp_path, bf16=True, **once)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = plain_loop(reference, function, columns, labels, lr=1e-3, epochs=1)
    exact = plain_loop(full, function, columns, labels, lr=1e-3, epochs=1)
    assert logged(trainer) == pytest.approx(values, rel=0.02)
    assert logged(trainer) != pytest.approx(exact, rel=1e-5)


@pytest.mark.works_with(NAME, "compile")
def test_a_compiled_model(single, tmp_path):
    loss, columns, labels, _ = ALONE["info_nce"]
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    models, runs = [single(), single()], []
    for model, settings in zip(models, ({}, compiled), strict=True):
        ours = splade(model, adapter(model, loss), FlopsLoss())
        data = dataset(columns, labels)
        runs.append(train(model, ours, data, tmp_path, num_train_epochs=1, **settings))
    assert type(runs[1].loss.model).__name__ == "OptimizedModule"
    assert logged(runs[1]) == pytest.approx(logged(runs[0]), rel=1e-3, abs=1e-3)
    assert_same_weights(*models)
