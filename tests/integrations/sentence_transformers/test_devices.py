"""Two processes train as one: what the table of tests/integrations/test_loops.py lacks."""

import torch

from sparse_losses import NWSLoss
from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss
from sparse_losses.integrations.transformers import TrainingState
from tests.distributed.ranks import as_torchrun_would
from tests.integrations.sentence_transformers.runs import (
    MULTI_HOT,
    SIMILARITY,
    VOCABULARY,
    dataset,
    sparse_encoder,
    train,
)


def drawn(rank, folder, path):
    """Prototypes that every process draws for itself: as drawn, and as learned."""
    torch.manual_seed(rank)
    prototype = torch.nn.Parameter(torch.randn(5, VOCABULARY))
    start = prototype.detach().clone()
    model = sparse_encoder(folder)
    loss = SentenceTransformersLoss(model, NWSLoss(SIMILARITY), prototype=prototype)
    train(
        model,
        loss,
        dataset(1, MULTI_HOT).select(range(8)),
        f"{path}/drawn",
        callbacks=[TrainingState(loss=loss)],
        per_device_train_batch_size=2,
        max_steps=2,
        ddp_backend="gloo",
    )
    torch.save((start, prototype.detach()), f"{path}/{rank}.pt")


def test_prototypes_of_several_devices_are_learned_as_one(folder, tmp_path):
    as_torchrun_would(drawn, folder, str(tmp_path))
    (first, first_learned), (second, second_learned) = (
        torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)
    )
    assert not torch.equal(first, second)
    torch.testing.assert_close(first_learned, second_learned, rtol=0.0, atol=0.0)
    assert 0.0 < (first_learned - first).abs().max() < (second_learned - second).abs().max()
