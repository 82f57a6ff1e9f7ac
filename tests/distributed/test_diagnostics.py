"""What all ranks saw, added up: the report of one process that saw it all."""

import pytest
import torch

from sparse_losses import Diagnostics
from tests.distributed.ranks import run_ranks

V = 12


def batch(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.rand(4 + rank, V, generator=generator)  # ranks need not see equally many
    return torch.where(x > 0.6, x, 0.0)


def diagnostics() -> Diagnostics:
    return Diagnostics(V, special_token_ids=[0], stopword_ids=[1, 2], top_k=3)


def two_windows(rank: int, world: int) -> tuple:
    seen = diagnostics()
    nothing = dict(seen.all_reduce().report())
    if rank < world - 1:  # the last one sees nothing
        seen.update(batch(rank))
    first = dict(seen.all_reduce().report()), seen.top_tokens(4)
    seen.reset()
    seen.update(batch(rank))
    return nothing, first, dict(seen.all_reduce().report())


def test_all_reduce_gives_the_report_of_all_texts():
    world = 2
    expected = diagnostics()
    for rank in range(world - 1):
        expected.update(batch(rank))
    first = dict(expected.report()), expected.top_tokens(4)
    expected.update(batch(world - 1))
    for nothing, (report, top), last in run_ranks(world, two_windows, world):
        assert nothing == {}
        assert (report, top) == (pytest.approx(first[0]), first[1])
        assert last == pytest.approx(dict(expected.report()))
