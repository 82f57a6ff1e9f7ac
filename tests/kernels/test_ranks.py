"""Kernels on several ranks: what one rank's kernel makes of all ranks' rows."""

import pytest
import torch

from sparse_losses.functional import info_nce_loss
from tests.distributed.ranks import run_ranks

OPTIONS = (
    {},
    {"symmetric": True},
    {"negative": True, "similarity": "dot"},
    {"decoupled": True, "reduction": "sum"},
    {"positive_ids": True},
)


def _inputs():
    generator = torch.Generator().manual_seed(3)
    anchor, positive, negative = torch.randn(3, 6, 12, generator=generator)
    return anchor, positive, negative, torch.tensor([1, 2, 1, 3, 4, 2])


def _value_and_gradients(rows, impl, gather, options):
    anchor, positive, negative, ids = (x[rows] for x in _inputs())
    leaves = [anchor.requires_grad_(), positive.requires_grad_()]
    options = dict(options)
    if options.pop("negative", False):
        leaves.append(negative.requires_grad_())
    if options.pop("positive_ids", False):
        options["positive_ids"] = ids
    value = info_nce_loss(*leaves, temperature=0.3, impl=impl, gather=gather, **options)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def gathered(rank: int, world: int) -> list[list[torch.Tensor]]:
    rows = slice(rank * 6 // world, (rank + 1) * 6 // world)
    return [_value_and_gradients(rows, "triton", True, options) for options in OPTIONS]


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo's ranks share one interpreter's CPU")
def test_gathered_info_nce_is_that_of_the_whole_batch():
    ranks = run_ranks(2, gathered, 2)
    for number, options in enumerate(OPTIONS):
        value, *gradients = _value_and_gradients(slice(None), "torch", False, options)
        for rank, found in enumerate(ranks):
            torch.testing.assert_close(found[number][0], value, rtol=1e-5, atol=1e-6)
            for one, whole in zip(found[number][1:], gradients, strict=True):
                # DDP divides what both ranks add up by two.
                own = whole[3 * rank : 3 * rank + 3]
                torch.testing.assert_close(one / 2, own, rtol=1e-4, atol=1e-6)
