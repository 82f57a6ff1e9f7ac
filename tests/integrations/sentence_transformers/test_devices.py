"""Two processes train as one does."""

import os
import socket

import pytest
import torch

from sparse_losses import (
    InfoNCELoss,
    SpladeObjective,
)
from sparse_losses.integrations.sentence_transformers import LossState, SentenceTransformersLoss
from tests.integrations.sentence_transformers.runs import (
    ALONE,
    NAME,
    assert_moved,
    assert_same_weights,
    dataset,
    learning,
    logged,
    plain_loop,
    sparse_encoder,
    train,
)

DEVICES = ("triplet_margin", "margin_mse", "learned temperature")


def of_devices(name):
    if name == "learned temperature":
        return SpladeObjective({"info_nce": 1.0}, info_nce=learning()), 2, None
    return ALONE[name][:3]


def on_device(rank, folder, path, port):
    """One of two processes, each with every other batch of two."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    for name in DEVICES:
        model = sparse_encoder(folder)
        loss, columns, labels = of_devices(name)
        ours = SentenceTransformersLoss(model, loss)
        trainer = train(
            model,
            ours,
            dataset(columns, labels).select(range(8)),
            f"{path}/{name}",
            callbacks=[LossState],
            per_device_train_batch_size=2,
            num_train_epochs=1,
            ddp_backend="gloo",
        )
        state = {"model": model.state_dict(), "learned": [*ours.loss.parameters()]}
        torch.save(state | {"values": logged(trainer)}, f"{path}/{name}-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.works_with(NAME, "devices")
def test_two_devices_train_as_one_on_the_global_batch(folder, sparse, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(on_device, (folder, str(tmp_path), port), nprocs=2)
    for name in DEVICES:
        reference, temperature = sparse(), torch.nn.Parameter(torch.tensor(0.5))
        settings = {"epochs": 1, "count": 8, "batch": 4}
        if name == "learned temperature":  # of a device's own batch
            settings |= {"learned": [temperature], "batch": 2, "every": 2}
            plain = InfoNCELoss(temperature=temperature)
            columns, labels = 2, None

            def function(t, _, plain=plain):
                return plain(t[0].activations, t[1].activations)
        else:
            _, columns, labels, function = ALONE[name]
        values = plain_loop(reference, function, columns, labels, **settings)
        every = settings.get("every", 1)
        means = [sum(values[i : i + every]) / every for i in range(0, len(values), every)]
        for rank in (0, 1):
            found = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
            model = sparse()
            model.load_state_dict(found["model"])
            assert_same_weights(model, reference)
            assert_moved(model, sparse())
            if name == "learned temperature":
                assert found["learned"][0].item() == pytest.approx(temperature.item(), rel=1e-5)
                assert abs(temperature.item() - 0.5) > 1e-4
            if rank == 0:
                assert found["values"] == pytest.approx(means, rel=1e-3, abs=1e-3)
