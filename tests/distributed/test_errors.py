"""Ranks that disagree: an error on every one of them, and none is left waiting."""

import functools
from collections.abc import Callable

import pytest
import torch

from sparse_losses import (
    FlopsLoss,
    InfoNCELoss,
    LabelQueue,
    MinActivationLoss,
    SpladeBatch,
    SpladeObjective,
    Texts,
)
from tests.distributed.ranks import run_ranks

V = 12


def flops(rank: int) -> None:
    FlopsLoss(gather=True)(torch.rand(3 + rank, V))


def info_nce(rank: int, gather: bool | str) -> None:
    InfoNCELoss(gather=gather)(torch.rand(3 + rank, V), torch.rand(3 + rank, V))


def negatives(rank: int) -> None:
    x = torch.rand(4, V)
    InfoNCELoss(gather=True)(x, x, torch.rand(4, V) if rank else None)


def dtypes(rank: int) -> None:
    FlopsLoss(gather=True)(torch.rand(3, V, dtype=torch.float64 if rank else torch.float32))


def queue(rank: int) -> None:
    LabelQueue(8, 4, 2, gather=True).enqueue(torch.rand(2 + rank, 4), torch.ones(2 + rank, 2))


def batch(rows: int) -> SpladeBatch:
    return SpladeBatch(Texts(torch.rand(rows, V)), Texts(torch.rand(rows, V)))


def objective(rank: int) -> None:
    SpladeObjective({"info_nce": 1.0}, gather=True)(batch(3 + rank))


def terms(rank: int) -> None:
    weights = {"info_nce": 1.0, "query_flops": float(rank)}
    SpladeObjective(weights, gather=True)(batch(3))


def said(rank: int, call: Callable[..., None], *args: object) -> str:
    try:
        call(rank, *args)
    except ValueError as error:
        return str(error)
    return "no error"


SIZES = "for {call}(gather=True), got 3 on rank 0, 4 on rank 1; the last batch of an epoch?"


DISAGREEMENTS = [
    ((flops,), "expected the same B on every rank " + SIZES.format(call="flops_loss")),
    ((info_nce, True), "the same B on every rank " + SIZES.format(call="info_nce_loss")),
    ((info_nce, "ring"), "the same B on every rank " + SIZES.format(call="info_nce_loss")),
    ((objective,), "the same B on every rank " + SIZES.format(call="SpladeObjective")),
    ((negatives,), "expected the same N on every rank"),
    ((dtypes,), "expected the same bytes a number on every rank"),
    ((queue,), "got 2 on rank 0, 3 on rank 1"),
    ((terms,), "expected the same number of active terms on every rank"),
]


def all_said(rank: int) -> list[str]:
    return [said(rank, *call) for call, _ in DISAGREEMENTS]


@functools.cache
def results() -> list[list[str]]:
    return run_ranks(2, all_said, timeout_s=20)


@pytest.mark.parametrize("number", range(len(DISAGREEMENTS)))
def test_sizes_that_differ_are_named_on_every_rank(number):
    _, expected = DISAGREEMENTS[number]
    for found in results():
        assert expected in found[number]


def another_loss(rank: int) -> str:
    loss = MinActivationLoss(top_k=2, threshold=1.0, gather=True) if rank == 1 else flops_of_all
    return said(rank, lambda _: loss(torch.rand(3, V)))


def flops_of_all(x: torch.Tensor) -> torch.Tensor:
    return FlopsLoss(gather=True)(x)


def test_a_rank_in_another_loss_is_named_on_every_rank():
    found = run_ranks(3, another_loss, timeout_s=20)
    for rank in (0, 2):
        assert (
            f"expected every rank to be in flops_loss(gather=True), as rank {rank} is"
            in found[rank]
        )
        assert "got ranks [1] in another loss" in found[rank]
    assert "to be in min_activation_loss(gather=True), as rank 1 is" in found[1]
    assert "got ranks [0, 2] in another loss" in found[1]
