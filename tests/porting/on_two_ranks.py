"""What each of two ranks computes for test_sentence_transformers.py; both have the same weights."""

import torch
import torch.distributed as dist
from sentence_transformers.sparse_encoder.losses import FlopsLoss as TheirFlopsLoss
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss

from sparse_losses import FlopsLoss, InfoNCELoss
from tests.porting.compare import Q, V, activations


def vectors(weights, rows):
    """Queries, positives and a negative each, of an encoder with these weights."""
    columns = [activations(2 * Q, V, seed=seed).detach() for seed in range(3)]
    return [column[rows] @ weights for column in columns]


def their_losses(columns, gather):
    """Their FLOPS gathers nothing."""
    info_nce = SparseMultipleNegativesRankingLoss(None, gather_across_devices=gather)
    flops = TheirFlopsLoss(None).compute_loss_from_embeddings(torch.cat(columns[1:]))
    return {"info_nce": info_nce.compute_loss_from_embeddings(columns, None), "flops": flops}


def our_losses(columns, gather):
    info_nce = InfoNCELoss(temperature=1.0, similarity="dot", gather=gather)
    flops = FlopsLoss(gather=gather)(torch.cat(columns[1:]))
    return {"info_nce": info_nce(*columns), "flops": flops}


def values_and_gradients(rank, losses, gather):
    """Gradients are averaged over the ranks, as DistributedDataParallel does."""
    weights = torch.eye(V, dtype=torch.float64).add(0.1).requires_grad_()
    rows = slice(None) if rank is None else slice(rank * Q, (rank + 1) * Q)
    results = {}
    for name, loss in losses(vectors(weights, rows), gather).items():
        (gradient,) = torch.autograd.grad(loss, weights, retain_graph=True)
        if rank is not None:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        results[name] = loss.item(), gradient
    return results


def on_rank(rank):
    return {
        "theirs": values_and_gradients(rank, their_losses, True),
        "ours": values_and_gradients(rank, our_losses, True),
        "ours alone": values_and_gradients(rank, our_losses, False),
    }
