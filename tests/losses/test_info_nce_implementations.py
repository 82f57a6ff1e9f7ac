"""InfoNCE by its implementations: the same value and gradient, whatever multiplies."""

import functools
import itertools
from unittest import mock

import numpy as np
import pytest
import torch

from sparse_losses.fast import info_nce as fast
from sparse_losses.fast import sparse
from sparse_losses.functional import info_nce_from_scores, info_nce_loss
from tests.instruments import Recorder

B, V, N = 7, 26, 3


pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # what PyTorch says of every CSR tensor


def vectors(seed: int, rows: int = B, width: int = V, density: float = 0.3) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    values = rng.random((rows, width)) + 0.1
    return torch.from_numpy(values * (rng.random((rows, width)) < density))


NEGATIVES = {
    "none": {},
    "shared": {"negative": vectors(2, N)},
    "per_row": {"negative": vectors(2, B * N).view(B, N, V)},
}


def value_and_gradients(leaves: dict, csr: tuple[str, ...] = (), **options):
    leaves = {k: v.detach().clone().requires_grad_() for k, v in leaves.items()}
    call = leaves | options
    value = info_nce_loss(**call | {n: as_csr(call[n]) for n in csr if n in call})
    return value, dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


OPTIONS = [
    {"similarity": similarity, "symmetric": symmetric, "reduction": reduction}
    for similarity, symmetric, reduction in itertools.product(
        ("cosine", "dot"), (False, True), ("mean", "sum")
    )
]


# Only many thousand rows, or a few million entries, have several blocks by themselves.
def in_blocks_of(rows: int):
    """InfoNCE in blocks of so many rows, whatever the size of the scores."""

    def call(leaves: dict, **options):
        with mock.patch.object(fast, "rows_of_a_block", return_value=rows):
            return value_and_gradients(leaves, impl="blocks", **options)

    return call


def by_nonzeros(sides: tuple[str, ...], rows: int):
    """Products with CSR tensors, so many dense rows at a time; gradients at all entries."""

    def call(leaves: dict, **options):
        with mock.patch.object(sparse, "LARGEST", rows * V):
            return value_and_gradients(leaves, sides, impl="nonzeros", **options)

    return call


def as_csr(x: torch.Tensor) -> torch.Tensor:
    """All entries of ``x``, zeros too, so that the gradient has all of them."""
    starts = torch.arange(0, x.numel() + 1, x.shape[1])
    columns = torch.arange(x.shape[1]).repeat(len(x))
    return torch.sparse_csr_tensor(starts, columns, x.reshape(-1), x.shape)


IMPLEMENTATIONS = {
    "nonzeros": by_nonzeros(("anchor", "positive", "negative"), 99),
    "nonzeros_of_anchors": by_nonzeros(("anchor",), 2),
    "nonzeros_of_positives": by_nonzeros(("positive", "negative"), 2),
    "direct": functools.partial(value_and_gradients, impl="direct"),
    "blocks": functools.partial(value_and_gradients, impl="blocks"),
    "three_rows": in_blocks_of(3),
    "one_row": in_blocks_of(1),
}
over_implementations = pytest.mark.parametrize(
    ("implementation", "negative"),
    [
        x
        for x in itertools.product(IMPLEMENTATIONS, NEGATIVES)
        if x[1] != "per_row" or not x[0].startswith("nonzeros")
    ],
)


@over_implementations
def test_every_implementation_equals_the_definition_for_all_options(implementation, negative):
    temperature = torch.tensor(0.4, dtype=torch.float64)
    leaves = {"anchor": vectors(0), "positive": vectors(1), "temperature": temperature}
    leaves |= NEGATIVES[negative]
    leaves["anchor"][2] = 0  # an empty text
    mask = torch.from_numpy(np.random.default_rng(3).random((B, B)) < 0.6)
    mask[3, 3] = False  # a row that is not valid, and one without negatives
    mask[5] = torch.arange(B) == 5
    if negative != "none":
        mask = torch.cat([mask, torch.arange(B * N).view(B, N) % 4 != 1], dim=1)
    ids, mask = {"positive_ids": torch.arange(B) // 2}, {"candidate_mask": mask}
    bounds = {"false_negative_margin": -0.05, "false_negative_ratio": 1.4}
    hiding = ({}, ids, mask, {"false_negative_margin": 0.1}, bounds, {**ids, **mask, **bounds})
    for options, hidden in itertools.product(OPTIONS, hiding):
        expected = value_and_gradients(leaves, **options, **hidden, impl="definition")
        result = IMPLEMENTATIONS[implementation](leaves, **options, **hidden)
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)
        assert all(g.any() for g in result[1].values())


@pytest.mark.parametrize("symmetric", [False, True])
@over_implementations
def test_a_gradient_does_not_depend_on_which_others_are_needed(implementation, negative, symmetric):
    temperature = torch.tensor(0.4, dtype=torch.float64)
    inputs = {"anchor": vectors(0), "positive": vectors(1), "temperature": temperature}
    inputs |= NEGATIVES[negative]
    _, expected = IMPLEMENTATIONS[implementation](inputs, symmetric=symmetric)
    for size in range(1, len(inputs)):
        for needed in itertools.combinations(inputs, size):
            kept = {name: inputs[name] for name in needed}
            others = {name: x for name, x in inputs.items() if name not in needed}
            _, gradients = IMPLEMENTATIONS[implementation](kept, symmetric=symmetric, **others)
            torch.testing.assert_close(gradients, {name: expected[name] for name in needed})


def test_a_csr_tensor_may_have_indices_of_32_bits():
    leaves = {"anchor": vectors(0), "positive": vectors(1)}
    expected, wanted = value_and_gradients(leaves, impl="definition")
    stored = {}
    for name, x in leaves.items():
        csr = x.to_sparse_csr()
        index = csr.crow_indices().int(), csr.col_indices().int()
        stored[name] = torch.sparse_csr_tensor(*index, csr.values(), x.shape)
    value, gradients = value_and_gradients(stored)
    torch.testing.assert_close(value, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.values(), wanted[name][leaves[name] != 0])


def test_the_length_of_a_row_neither_overflows_nor_vanishes():
    """The squares of its entries would."""
    leaves = {"anchor": vectors(0).float(), "positive": -vectors(1).float()}
    expected, wanted = value_and_gradients(leaves, impl="definition")
    for scale in (1e-30, 1e30):
        factor = torch.where(torch.arange(B)[:, None] == 1, scale, 1.0)
        rows = {name: x * factor for name, x in leaves.items()}
        value, result = value_and_gradients(rows, impl="nonzeros")
        torch.testing.assert_close(value, expected)
        for name, gradient in result.items():  # the gradient of a cosine is of degree -1
            torch.testing.assert_close(gradient * factor, wanted[name])


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
    assert sizes[0] < rows * rows
    assert sizes[1] >= rows * rows, "the recorder sees"


@pytest.mark.parametrize("impl", ["definition", "direct", "blocks", "nonzeros"])
def test_an_infinite_negative_score_is_nan_as_in_cross_entropy(impl):
    negative = torch.tensor([[torch.inf, 1.0]])
    loss = info_nce_loss(torch.eye(2), torch.eye(2), negative, similarity="dot", impl=impl)
    assert loss.isnan()
    scores, first = torch.tensor([[1.0, torch.inf]]), torch.tensor([[1, 0]])
    assert info_nce_from_scores(scores, first).isnan()
    assert info_nce_from_scores(-scores, first) == 0  # its probability is 0
