"""Two ranks: few rows, half precision, second derivatives, what is sent, a NaN."""

import functools

import torch

import sparse_losses.functional as F
from tests.cases import FIRST, LOSSES, to_tensors
from tests.distributed.ranks import run_ranks
from tests.distributed.test_gather import part, whole
from tests.distributed.threads import _Group, run_threads

close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def small_batches(rank: int) -> None:
    torch.manual_seed(0)
    anchor, positive = torch.randn(2, 2, 5, dtype=torch.float64)
    mine = slice(rank, rank + 1)
    value = F.info_nce_loss(anchor[mine], positive[mine], gather=True)
    close(value, F.info_nce_loss(anchor, positive))
    x, unbiased = anchor.abs(), functools.partial(F.flops_loss, estimator="unbiased")
    close(unbiased(x[mine], gather=True), unbiased(x))
    # No row at all: 0, and part of the graph.
    empty = anchor[:0].clone().requires_grad_()
    value = F.info_nce_loss(empty, positive[:0], gather=True)
    assert value == 0
    assert torch.autograd.grad(value, empty)[0].shape == (0, 5)
    # Every text the same document: no row has a negative, none is valid.
    same = {"positive_ids": torch.zeros(1, dtype=torch.long), "decoupled": True}
    assert F.info_nce_loss(anchor[mine], positive[mine], **same, gather=True) == 0
    for dtype in (torch.float16, torch.bfloat16):
        half = anchor.to(dtype), positive.to(dtype)
        expected = F.info_nce_loss(*half)
        with torch.autocast("cpu", torch.bfloat16):
            value = F.info_nce_loss(half[0][mine], half[1][mine], gather=True)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_one_row_a_rank_none_and_half_precision():
    run_ranks(2, small_batches)


CURVED = ("info_nce", "n_pair", "nws", "flops", "distillation")


def derivatives(stem: str, arrays: dict, gather: bool, weight: float = 1.0, **impl):
    """The gradient of a loss by its first tensor, and one of the gradient's square."""
    case, tensors = FIRST[stem], to_tensors(arrays)
    leaf = tensors[case.differentiable[0]].requires_grad_()
    loss = weight * case.function()(**tensors, gather=gather, **impl)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), leaf)
    return gradient.detach(), second


def compare_derivatives(rank: int) -> None:
    for stem in CURVED:
        arrays = whole(FIRST[stem], 2, seed=7)
        mine = part(FIRST[stem], arrays, rank, 2)
        first, second = (x.chunk(2)[rank] for x in derivatives(stem, arrays, False))
        for impl in ("definition", "auto") if LOSSES[stem].implementations else (None,):
            options = {} if impl is None else {"impl": impl}
            # Every rank's gradient is twice that of one process, its square four times.
            close(derivatives(stem, mine, True, **options)[1] / 4, second)
            # A weight of each rank's own counts as their mean.
            gradient, _ = derivatives(stem, mine, True, 1.0 + rank, **options)
            close(gradient / 2, first * 1.5)


def test_second_derivatives():
    """And a weight of each rank's own."""
    run_ranks(2, compare_derivatives)


def test_regularisers_and_distillation_send_no_rows_and_csr_entries_alone(monkeypatch):
    """How many numbers each collective of a call takes from a rank, which is a thread here."""
    numbers: list[int] = []
    everyones = _Group.everyones

    def recording(group, x):
        if group.local.rank == 0:
            numbers.append(x.numel())
        return everyones(group, x)

    monkeypatch.setattr(_Group, "everyones", recording)
    x, penalty = torch.rand(6, 1000), torch.ones(1000)
    sparse = (x * (torch.rand(6, 1000) < 0.02)).to_sparse_csr()
    ids = torch.arange(48).reshape(6, 8)
    tokens = ids, torch.ones_like(ids)
    rows = x[:, :4].T
    for most, call in (
        (1000, lambda: F.flops_loss(x, gather=True)),  # [V]
        (2000, lambda: F.flops_loss(x, estimator="unbiased", gather=True)),  # sums, and of squares
        (1000, lambda: F.idf_flops_loss(x, penalty, gather=True)),
        (20, lambda: F.distillation_loss(x, x + 1, gather=True)),
        (20, lambda: F.margin_mse_loss(*rows, gather=True)),
        (20, lambda: F.min_activation_loss(x, gather=True)),
        (20, lambda: F.self_reconstruction_loss(x, *tokens, gather=True)),
        (20, lambda: F.positive_activation_loss(x, *tokens, gather=True)),
        (6000, lambda: F.info_nce_loss(x, x, gather=True)),  # the positives alone
        (len(sparse.values()), lambda: F.info_nce_loss(sparse, sparse, gather=True)),  # entries
        (1000, lambda: F.flops_loss(sparse, gather=True)),
        (20, lambda: F.min_activation_loss(sparse, gather=True)),
        (20, lambda: F.positive_activation_loss(sparse, *tokens, gather=True)),
    ):
        numbers.clear()
        run_threads(2, lambda own, call=call: call())
        largest, *others = sorted(numbers, reverse=True)
        assert largest == most or largest < most == 20
        assert most != 6000 or max(others) < 20


def nan_on_one(rank: int) -> list[str]:
    hidden = []
    for stem, case in FIRST.items():
        mine = to_tensors(part(case, whole(case, 2, seed=2), rank, 2))
        leaf = mine[case.differentiable[0]]
        leaf[:rank] = torch.nan
        mine |= {case.differentiable[0]: leaf.requires_grad_()}
        value = case.function()(**mine, gather=True)
        value.backward()
        if not value.isnan() or leaf.grad.shape != leaf.shape:
            hidden.append(stem)
    return hidden


def test_a_nan_on_one_rank_is_the_value_of_all_and_nobody_waits():
    assert run_ranks(2, nan_on_one) == [[], []]
