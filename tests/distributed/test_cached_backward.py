"""Gradient caching on several ranks: gradients are reduced once, and are those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from sparse_losses import InfoNCELoss, SpladeBatch
from sparse_losses.functional import cached_backward, info_nce_loss
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import needs_sharding_on_cpu
from tests.objective.cached import (
    Encoder,
    V,
    close,
    full_objective,
    gradients,
    plain,
    tokens,
    twins,
)

WORLD, ROWS = 2, 6


def own(columns, rank):
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    return [
        column[rows]
        if isinstance(column, torch.Tensor)
        else {k: x[rows] for k, x in column.items()}
        for column in columns
    ]


def mean_over_ranks(encoder, columns, loss):
    """The reference where every rank's loss sees its own rows alone: by one process."""
    for rank in range(WORLD):
        plain(encoder, own(columns, rank), lambda *r: loss(*r) / WORLD)
    return gradients(*(encoder if isinstance(encoder, list) else [encoder]))


def count_reductions(wrapped):
    reductions = []

    def hook(state, bucket):
        reductions.append(bucket.index())
        return allreduce_hook(None, bucket)

    wrapped.register_comm_hook(None, hook)
    return reductions


def data_parallel(rank):
    torch.manual_seed(0)
    loss = InfoNCELoss()
    columns = [tokens(WORLD * ROWS)["input_ids"] for _ in range(2)]
    mine = own(columns, rank)
    (ours,), (theirs,) = twins(Encoder().double())
    wrapped = DistributedDataParallel(ours)
    reductions = count_reductions(wrapped)

    # One encoder: one reduction, after the last mini-batch of the last column.
    cached_backward(wrapped, mine, loss, mini_batch_size=4)
    assert reductions == [0]
    once = mean_over_ranks(theirs, columns, loss)
    close(gradients(ours), once)

    # Accumulation: the first call reduces nothing, the second all that is there. Ranks may have
    # different numbers of mini-batches.
    ours.zero_grad()
    reductions.clear()
    with wrapped.no_sync():
        cached_backward(wrapped, mine, loss, mini_batch_size=4)
    assert reductions == []
    cached_backward(wrapped, mine, loss, mini_batch_size=2 + rank)
    assert reductions == [0]
    close(gradients(ours), [2 * x for x in once])

    # Inside a function: a reduction a mini-batch, and the same gradient.
    ours.zero_grad()
    reductions.clear()
    cached_backward(lambda x: wrapped(x), mine, loss, mini_batch_size=4)
    assert reductions == [0] * 4
    close(gradients(ours), once)

    # An encoder for each column: one reduction each.
    ours, theirs = twins(Encoder().double(), Encoder().double())
    wrapped = [DistributedDataParallel(module) for module in ours]
    counts = [count_reductions(module) for module in wrapped]
    cached_backward(wrapped, mine, loss, mini_batch_size=4)
    assert counts == [[0], [0]]
    close(gradients(*ours), mean_over_ranks(list(theirs), columns, loss))


@pytest.mark.works_with("PyTorch", "cached", "devices")
def test_data_parallel_encoders_reduce_their_gradients_once():
    run_ranks(WORLD, data_parallel)


def whole_batch(rank):
    """With gather=True it is the batch of one process: value, gradients, terms, temperature."""
    torch.manual_seed(0)
    columns = [tokens(WORLD * ROWS) for _ in range(3)]
    (ours,), (theirs,) = twins(Encoder(texts=True).double())
    penalty = torch.rand(V)
    objective, everyone = full_objective(penalty, gather=True), full_objective(penalty)
    total, terms = cached_backward(
        DistributedDataParallel(ours),
        own(columns, rank),
        lambda *texts: objective(SpladeBatch(*texts)),
        mini_batch_size=4,
    )
    expected = plain(theirs, columns, lambda *texts: everyone(SpladeBatch(*texts)))
    torch.testing.assert_close(total, expected.total.detach())
    torch.testing.assert_close(terms, expected.terms)
    close(gradients(ours), gradients(theirs))

    (ours, our_t), (theirs, their_t) = twins(
        Encoder().double(), nn.ParameterList([nn.Parameter(torch.tensor(-2.0).double())])
    )
    columns = [column["input_ids"] for column in columns]

    def loss(t, gather):
        return lambda *r: info_nce_loss(*r, temperature=t[0].exp(), gather=gather)

    cached_backward(
        DistributedDataParallel(ours), own(columns, rank), loss(our_t, True), mini_batch_size=4
    )
    plain(theirs, columns, loss(their_t, False))
    dist.all_reduce(our_t[0].grad)
    our_t[0].grad /= WORLD
    close(gradients(ours, our_t), gradients(theirs, their_t))


@pytest.mark.works_with("PyTorch", "cached", "devices")
def test_gathered_losses_have_the_gradient_of_one_process():
    run_ranks(WORLD, whole_batch)


def sharded(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    columns = [tokens(WORLD * ROWS)["input_ids"] for _ in range(2)]
    (ours,), (theirs,) = twins(Encoder().double())
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(ours.layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    cached_backward(ours, own(columns, rank), InfoNCELoss(gather=True), mini_batch_size=4)
    plain(theirs, columns, InfoNCELoss())
    close([gradient.full_tensor() for gradient in gradients(ours)], gradients(theirs))


@pytest.mark.works_with("PyTorch", "cached", "sharded")
@needs_sharding_on_cpu
def test_a_sharded_encoder():
    run_ranks(WORLD, sharded)
