"""Two processes train as one does."""

import os
import socket

import pytest
import torch
from sentence_transformers.sparse_encoder import losses as theirs

from sparse_losses import FlopsLoss, InfoNCELoss, MinActivationLoss
from sparse_losses.integrations.sentence_transformers import LossState, SentenceTransformersLoss
from tests.integrations.sentence_transformers.runs import (
    NAME,
    SCORES,
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


def in_splade(model, **options):
    base = SentenceTransformersLoss(model, info_nce())
    return splade(model, base, FlopsLoss(gather=True), **options)


# Columns, labels, the loss.
GLOBAL = {
    "info_nce": (4, None, lambda m: SentenceTransformersLoss(m, info_nce())),
    "cached": (4, None, lambda m: SentenceTransformersLoss(m, info_nce(), mini_batch_size=1)),
    "objective": (4, SCORES, lambda m: SentenceTransformersLoss(m, objective(gather=True))),
    "mean of rows": (
        2,
        None,
        lambda m: SentenceTransformersLoss(m, MinActivationLoss(threshold=5.0)),
    ),
    "SpladeLoss": (3, None, in_splade),
    "CachedSpladeLoss": (
        3,
        None,
        lambda m: in_splade(m, kind=theirs.CachedSpladeLoss, mini_batch_size=1),
    ),
}
LOCAL = {"a device's own": (2, None, lambda m: SentenceTransformersLoss(m, info_nce(False)))}


def run(name, folder, path, batch_size, **settings):
    model = sparse_encoder(folder)
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


def on_device(rank, folder, path, port):
    """One of two processes, each with every other batch of two."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    for name in GLOBAL | LOCAL:
        trainer, model, learned = run(name, folder, path, 2, ddp_backend="gloo")
        found = {"model": model.state_dict(), "learned": learned, "values": logged(trainer)}
        torch.save(found, f"{path}/{name}-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.works_with(NAME, "devices", "cached")
def test_two_devices_train_as_one_on_the_global_batch(folder, sparse, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(on_device, (folder, str(tmp_path), port), nprocs=2)
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
            found = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
            model = sparse()
            model.load_state_dict(found["model"])
            assert_same_weights(model, reference)
            assert found["learned"] == pytest.approx(learned, rel=1e-5), name
            if rank == 0:  # which has the mean of both
                assert found["values"] == pytest.approx(values, rel=1e-3, abs=1e-3), name
