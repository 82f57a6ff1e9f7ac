"""Two processes train as one does."""

import pytest
import torch
from sentence_transformers.sparse_encoder import losses as theirs

from sparse_losses import (
    FlopsLoss,
    InfoNCELoss,
    NWSLoss,
    SparsityController,
    SpladeObjective,
)
from sparse_losses.integrations.sentence_transformers import LossState, SentenceTransformersLoss
from tests.distributed.ranks import as_torchrun_would
from tests.integrations.sentence_transformers.runs import (
    MULTI_HOT,
    NAME,
    SCORES,
    SIMILARITY,
    VOCABULARY,
    assert_moved,
    assert_same_weights,
    dataset,
    logged,
    objective,
    plain_loop,
    sparse_encoder,
    splade,
    train,
)


def info_nce(gather=True):
    return InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.5)), gather=gather)


def in_splade(model):
    base = SentenceTransformersLoss(model, info_nce())
    cached = {"kind": theirs.CachedSpladeLoss, "mini_batch_size": 1}
    return splade(model, base, FlopsLoss(gather=True), **cached)


# Columns, labels, the loss.
GLOBAL = {
    "cached": (4, None, lambda m: SentenceTransformersLoss(m, info_nce(), mini_batch_size=1)),
    "objective": (4, SCORES, lambda m: SentenceTransformersLoss(m, objective(gather=True))),
    "CachedSpladeLoss": (3, None, in_splade),
}
LOCAL = {"a device's own": (2, None, lambda m: SentenceTransformersLoss(m, info_nce(False)))}


def run(name, folder, path, batch_size, **settings):
    model = sparse_encoder(folder).double()
    columns, labels, make = (GLOBAL | LOCAL)[name]
    trainer = train(
        model,
        make(model),
        dataset(columns, labels).select(range(8)),
        f"{path}/{name}",
        callbacks=[LossState],
        per_device_train_batch_size=batch_size,
        num_train_epochs=1,
        **settings,
    )
    return trainer, model, [x.item() for _, x in trainer_state(trainer)._learned()]


def trainer_state(trainer):
    return next(x for x in trainer.callback_handler.callbacks if isinstance(x, LossState))


def on_device(rank, folder, path):
    """One of two processes, each with every other batch of two."""
    for name in GLOBAL | LOCAL:
        trainer, model, learned = run(name, folder, path, 2, ddp_backend="gloo")
        found = {"model": model.state_dict(), "learned": learned, "values": logged(trainer)}
        torch.save(found, f"{path}/{name}-{rank}.pt")
    with_state(rank, folder, path)


@pytest.fixture(scope="module")
def by_two(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("two")
    as_torchrun_would(on_device, folder, str(path))
    return path


@pytest.mark.works_with(NAME, "devices", "cached")
def test_two_devices_train_as_one_on_the_global_batch(folder, by_two, sparse, tmp_path):
    for name in GLOBAL | LOCAL:
        if name in GLOBAL:
            trainer, reference, learned = run(name, folder, tmp_path, 4)
            values = logged(trainer)
        else:
            reference, alone = sparse(), info_nce(False)
            each = plain_loop(
                reference,
                lambda t, _, loss=alone: loss(t[0].activations, t[1].activations),
                2,
                learned=[alone.temperature],
                epochs=1,
                every=2,
                batch=2,
                count=8,
            )
            learned = [alone.temperature.item()]
            values = [(each[0] + each[1]) / 2, (each[2] + each[3]) / 2]
        assert_moved(reference, sparse())
        assert all(abs(x - 0.5) > 1e-4 for x in learned), name
        for rank in (0, 1):
            found = torch.load(by_two / f"{name}-{rank}.pt", weights_only=True)
            model = sparse()
            model.load_state_dict(found["model"])
            assert_same_weights(model, reference)
            assert found["learned"] == pytest.approx(learned, rel=1e-5), name
            if rank == 0:  # which has the mean of both
                assert found["values"] == pytest.approx(values, rel=1e-3, abs=1e-3), name


def steered(folder, path, resume=None):
    """A controller whose window ends between two checkpoints."""
    model = sparse_encoder(folder)
    ours = SpladeObjective({"info_nce": 1.0, "document_flops": 0.02})
    controller = SparsityController(
        ours, "document_flops", target_active=20, ignore_steps=0, every=3, window=3
    )
    train(
        model,
        SentenceTransformersLoss(model, ours),
        dataset(2).select(range(8)),
        f"{path}/steered",
        resume=resume,
        callbacks=[lambda trainer: LossState(trainer, controller)],
        per_device_train_batch_size=1,
        num_train_epochs=1,
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=2,
        ddp_backend="gloo",
    )
    return controller.state_dict()


def with_state(rank, folder, path):
    found = {"straight": steered(folder, path)}
    found["resumed"] = steered(folder, path, resume=f"{path}/steered/checkpoint-2")
    torch.manual_seed(rank)
    prototype = torch.nn.Parameter(torch.randn(5, VOCABULARY))
    found["drawn"] = prototype.detach().clone()
    model = sparse_encoder(folder)
    train(
        model,
        SentenceTransformersLoss(model, NWSLoss(SIMILARITY), prototype=prototype),
        dataset(1, MULTI_HOT).select(range(8)),
        f"{path}/drawn",
        callbacks=[LossState],
        per_device_train_batch_size=2,
        max_steps=2,
        ddp_backend="gloo",
    )
    found["learned"] = prototype.detach()
    torch.save(found, f"{path}/{rank}.pt")


def test_what_devices_share_is_the_same_on_all(by_two):
    first, second = (torch.load(by_two / f"{rank}.pt") for rank in (0, 1))
    for found in (first, second):
        assert found["resumed"] == found["straight"]
    assert first["straight"]["seen"], "saved between two looks"
    assert first["straight"] == second["straight"], "a controller sees the texts of all devices"
    assert not torch.equal(first["drawn"], second["drawn"])
    torch.testing.assert_close(first["learned"], second["learned"], rtol=0.0, atol=0.0)
    moved = (first["learned"] - first["drawn"]).abs().max()
    assert 0.0 < moved < (second["learned"] - second["drawn"]).abs().max()
