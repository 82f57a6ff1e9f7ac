"""Two processes train as one: what the table of tests/integrations/test_loops.py lacks."""

import pytest
import torch
from sentence_transformers.sparse_encoder import losses as theirs

from sparse_losses import FlopsLoss, InfoNCELoss, NWSLoss
from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss
from sparse_losses.integrations.transformers import TrainingState
from tests.distributed.ranks import as_torchrun_would
from tests.integrations.sentence_transformers.runs import (
    MULTI_HOT,
    NAME,
    SIMILARITY,
    VOCABULARY,
    assert_moved,
    assert_same_weights,
    dataset,
    logged,
    sparse_encoder,
    splade,
    train,
)


def in_splade(folder, path, batch_size, **settings):
    """Their cache around our losses, of which one learns."""
    model = sparse_encoder(folder).double()
    temperature = torch.nn.Parameter(torch.tensor(0.5))
    base = SentenceTransformersLoss(model, InfoNCELoss(temperature=temperature, gather=True))
    cached = {"kind": theirs.CachedSpladeLoss, "mini_batch_size": 1}
    loss = splade(model, base, FlopsLoss(gather=True), **cached)
    trainer = train(
        model,
        loss,
        dataset(3).select(range(8)),
        f"{path}/splade",
        callbacks=[TrainingState(loss=loss)],
        per_device_train_batch_size=batch_size,
        num_train_epochs=1,
        **settings,
    )
    return model, temperature.item(), logged(trainer)


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
    return start, prototype.detach()


def on_device(rank, folder, path):
    """One of two processes, each with every other batch of two."""
    model, learned, values = in_splade(folder, path, 2, ddp_backend="gloo")
    splade_run = model.state_dict(), learned, values
    torch.save((splade_run, drawn(rank, folder, path)), f"{path}/{rank}.pt")


@pytest.fixture(scope="module")
def by_two(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("two")
    as_torchrun_would(on_device, folder, str(path))
    return [torch.load(path / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.works_with(NAME, "devices", "cached")
def test_their_cached_loss_on_two_devices_trains_as_one_on_the_global_batch(
    folder, by_two, sparse, tmp_path
):
    reference, learned, values = in_splade(folder, tmp_path, 4)
    assert_moved(reference, sparse())
    assert abs(learned - 0.5) > 1e-4
    for (weights, temperature, _), _ in by_two:
        model = sparse()
        model.load_state_dict(weights)
        assert_same_weights(model, reference)
        assert temperature == pytest.approx(learned, rel=1e-5)
    # The first process logs the mean of both.
    assert by_two[0][0][2] == pytest.approx(values, rel=1e-3, abs=1e-3)


def test_prototypes_of_several_devices_are_learned_as_one(by_two):
    (first, first_learned), (second, second_learned) = (prototypes for _, prototypes in by_two)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first_learned, second_learned, rtol=0.0, atol=0.0)
    assert 0.0 < (first_learned - first).abs().max() < (second_learned - second).abs().max()
