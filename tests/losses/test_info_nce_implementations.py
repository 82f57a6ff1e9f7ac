"""InfoNCE by its implementations, where the contract's calls do not go: blocks, CSR, NaN."""

import itertools

import numpy as np
import pytest
import torch

from sparse_losses.fast import info_nce as fast
from sparse_losses.fast import sparse
from sparse_losses.functional import info_nce_from_scores, info_nce_loss
from tests.cases import BASE_CASES
from tests.instruments import Recorder

B, V, N = 7, 26, 3
T = torch.tensor(0.4, dtype=torch.float64)


def vectors(seed: int, rows: int = B) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.random((rows, V)) + 0.1) * (rng.random((rows, V)) < 0.3))


def as_csr(x: torch.Tensor) -> torch.Tensor:
    """All entries of ``x``, zeros too, so that the gradient has all of them."""
    starts = torch.arange(0, x.numel() + 1, x.shape[1])
    columns = torch.arange(x.shape[1]).repeat(len(x))
    return torch.sparse_csr_tensor(starts, columns, x.reshape(-1), x.shape, check_invariants=True)


def value_and_gradients(leaves: dict, csr: tuple[str, ...] = (), **options):
    leaves = {k: v.detach().clone().requires_grad_() for k, v in leaves.items()}
    call = leaves | options
    value = info_nce_loss(**call | {n: as_csr(call[n]) for n in csr if n in call})
    return value, dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


SUPPORTED = [case for case in BASE_CASES if case.stem == "info_nce" and case.implementations]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: case.id)
def test_some_rows_at_a_time_have_the_value_and_gradient_of_all(case, reduction, monkeypatch):
    """Only many thousand rows, or a few million entries, have several blocks by themselves."""
    tensors = {**case.tensors(batch=B), "temperature": T, "reduction": reduction}
    tensors["anchor"][2] = 0  # an empty text
    if "candidate_mask" in tensors:  # a row without its positive, and one with nothing else
        tensors["candidate_mask"][3, 3] = False
        tensors["candidate_mask"][5] = torch.arange(tensors["candidate_mask"].shape[1]) == 5
    leaves = {n: tensors.pop(n) for n in (*case.differentiable, "temperature")}
    options = {n: x for n, x in (case.kwargs | tensors).items() if n not in leaves}
    expected = value_and_gradients(leaves, **options, impl="definition")
    assert all(gradient.any() for gradient in expected[1].values())
    sides = [(), ("anchor",), ("positive", "negative"), ("anchor", "positive", "negative")]
    for rows, csr in [(1, ()), (3, ()), *((2, side) for side in sides)]:
        impl = "nonzeros" if csr else "blocks"
        if impl in case.implementations:
            monkeypatch.setattr(fast, "rows_of_a_block", lambda _, rows=rows: rows)
            monkeypatch.setattr(sparse, "LARGEST", rows * leaves["anchor"].shape[1])
            found = value_and_gradients(leaves, csr, **options, impl=impl)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shape", [(), (N,), (B, N)], ids=str)
@pytest.mark.parametrize(("impl", "csr"), [("direct", ()), ("nonzeros", ("anchor", "positive"))])
def test_a_gradient_does_not_depend_on_which_others_are_needed(impl, csr, shape, symmetric):
    inputs = {"anchor": vectors(0), "positive": vectors(1), "temperature": T}
    if shape:
        inputs["negative"] = vectors(2, int(np.prod(shape))).view(*shape, V)
    if len(shape) == 2 and csr:
        return
    _, expected = value_and_gradients(inputs, csr, symmetric=symmetric, impl=impl)
    for size in range(1, len(inputs)):
        for needed in itertools.combinations(inputs, size):
            kept = {name: inputs[name] for name in needed}
            others = {name: x for name, x in inputs.items() if name not in needed}
            _, found = value_and_gradients(kept, csr, symmetric=symmetric, impl=impl, **others)
            torch.testing.assert_close(found, {name: expected[name] for name in needed})


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("impl", ["definition", "direct", "nonzeros"])
def test_a_nan_that_ids_hide_reaches_no_gradient_of_the_rows_that_share_the_id(impl, similarity):
    positive = vectors(1)
    positive[1, 3] = torch.nan
    leaf, ids = vectors(0).requires_grad_(), torch.tensor([0, 5, 5, 1, 2, 3, 4])
    value = info_nce_loss(leaf, positive, positive_ids=ids, impl=impl, similarity=similarity)
    (gradient,) = torch.autograd.grad(value, leaf)
    assert gradient[2].isfinite().all()
    assert gradient[2].any()
    assert gradient[0].isnan().any()


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("poisoned", ["anchor", "positive", "negative"])
def test_a_nan_that_meets_no_other_entry_shows(similarity, poisoned):
    leaves = {"anchor": vectors(0), "positive": vectors(1), "negative": vectors(2, N)}
    for x in leaves.values():
        x[:, 5] = 0
    leaves[poisoned][1, 5] = torch.nan
    assert info_nce_loss(**leaves, similarity=similarity, impl="nonzeros").isnan()


def test_the_score_matrix_of_a_large_batch_is_never_held_whole():
    rows = 2200
    anchor, positive = (torch.randn(rows, 8, requires_grad=True) for _ in range(2))
    sizes = []
    for impl in ("auto", "direct"):
        with Recorder() as seen:
            info_nce_loss(anchor, positive, impl=impl).backward()
        sizes.append(seen.largest)
    assert anchor.grad.any()
    assert sizes[0] < rows * rows <= sizes[1]


@pytest.mark.parametrize("impl", ["definition", "direct", "blocks", "nonzeros"])
def test_an_infinite_negative_score_is_nan_as_in_cross_entropy(impl):
    negative = torch.tensor([[torch.inf, 1.0]])
    loss = info_nce_loss(torch.eye(2), torch.eye(2), negative, similarity="dot", impl=impl)
    assert loss.isnan()
    scores, first = torch.tensor([[1.0, torch.inf]]), torch.tensor([[1, 0]])
    assert info_nce_from_scores(scores, first).isnan()
    assert info_nce_from_scores(-scores, first) == 0  # its probability is 0
