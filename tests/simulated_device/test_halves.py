"""Products of halves, where the device returns them in fp32."""

import itertools

import pytest
import torch

from benchmarks.losses import info_nce as benchmark
from sparse_losses._core import products
from sparse_losses.fast.scores import candidate_scores
from sparse_losses.functional import info_nce_loss, n_pair_loss
from tools import simulated_device

if reason := simulated_device.why_not():
    pytest.skip(reason, allow_module_level=True)
simulated_device.start()
HALVES = [torch.bfloat16, torch.float16]
EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True, params=HALVES, ids=str)
def dtype(request):
    """The device is asked once a process whether it returns fp32: not in what is counted."""
    device = torch.empty(0, device="sim").device  # with its index, as of every tensor
    assert products.returns_fp32(device, request.param)
    return request.param


def inputs(dtype, negatives):
    anchor = torch.randn(7, 16)
    positive = 0.7 * anchor + 0.6 * torch.randn(7, 16)
    shape = {"none": None, "shared": (3, 16), "each": (7, 3, 16)}[negatives]
    negative = None if shape is None else torch.randn(shape)
    return [None if x is None else x.to(dtype) for x in (anchor, positive, negative)]


def value_and_gradients(loss, tensors, device, dtype, **options):
    leaves = [None if x is None else x.to(device, dtype).requires_grad_() for x in tensors]
    value = loss(*leaves, **options)
    value.backward(torch.full_like(value, 4096.0))  # as a scaler does: fp16 ends at 6e-8
    found = [value.detach(), *(x.grad for x in leaves if x is not None)]
    return [x.cpu().double() for x in found]


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("negatives", ["none", "shared", "each"])
@pytest.mark.parametrize("impl", ["direct", "blocks"])
def test_info_nce_is_rounded_once(dtype, similarity, negatives, impl, monkeypatch):
    monkeypatch.setattr("sparse_losses.fast.info_nce.most_scores", lambda device: 50)
    tensors = inputs(dtype, negatives)
    temperature = 0.05 if similarity == "cosine" else 2.0
    for symmetric, decoupled, ids in itertools.product([False, True], repeat=3):
        if decoupled and ids and negatives == "none":
            continue  # a row may be left without a negative, which the definition takes
        options = {"temperature": temperature, "similarity": similarity}
        options |= {"symmetric": symmetric, "decoupled": decoupled}
        same = torch.tensor([0, 1, 2, 3, 4, 0, 1]) if ids else None
        wanted = value_and_gradients(
            info_nce_loss, tensors, "cpu", torch.float64, positive_ids=same, **options
        )
        same = None if same is None else same.to("sim")
        found = value_and_gradients(
            info_nce_loss, tensors, "sim", dtype, positive_ids=same, impl=impl, **options
        )
        assert distance(found[0], wanted[0]) < 3e-6
        for by_ours, by_double in zip(found[1:], wanted[1:], strict=True):
            assert distance(by_ours, by_double) < 2 * EPS[dtype]


def test_no_further_from_fp64_than_the_plain_formula_in_halves(dtype):
    tensors = inputs(dtype, "none")
    wanted = value_and_gradients(benchmark.plain, tensors, "cpu", torch.float64)
    plain = value_and_gradients(benchmark.plain, tensors, "sim", dtype)
    ours = value_and_gradients(info_nce_loss, tensors, "sim", dtype)
    for a, b, exact in zip(ours, plain, wanted, strict=True):
        assert distance(a, exact) <= distance(b, exact) + EPS[dtype]


def test_easy_rows_keep_their_digits(dtype):
    anchor = torch.eye(4, 16, dtype=dtype)
    wanted = value_and_gradients(info_nce_loss, [anchor] * 2, "cpu", torch.float64)
    found = value_and_gradients(info_nce_loss, [anchor] * 2, "sim", dtype)
    assert wanted[0] < 1e-5
    assert distance(found[0], wanted[0]) < 3e-6
    assert distance(found[1], wanted[1]) < 2 * EPS[dtype]


def test_rows_of_zero_and_of_any_length(dtype):
    largest = 2.0**100 if dtype == torch.bfloat16 else 2.0**11
    anchor, positive, _ = inputs(dtype, "none")
    anchor[0] *= largest
    positive[1] /= largest
    anchor[3] = 0
    wanted = value_and_gradients(info_nce_loss, [anchor, positive], "cpu", torch.float64)
    found = value_and_gradients(info_nce_loss, [anchor, positive], "sim", dtype)
    assert distance(found[0], wanted[0]) < 3e-6
    assert torch.equal(found[1][3], torch.zeros(16).double())
    for row_found, row_wanted in zip(found[1], wanted[1], strict=True):
        assert distance(row_found, row_wanted) < 4 * EPS[dtype] or not row_wanted.any()


def test_every_product_is_of_halves_but_the_gradient_in_fp16(dtype):
    anchor, positive, _ = (
        None if x is None else x.to("sim").requires_grad_() for x in inputs(dtype, "none")
    )

    def of_shared_scores(anchor, positive):
        return candidate_scores(anchor, positive, None, cosine=True).sum()

    for loss in (info_nce_loss, n_pair_loss, of_shared_scores):
        with simulated_device.counting() as counts:
            loss(anchor, positive).backward()
        share = 1 if dtype == torch.bfloat16 else 1 / 3  # the scores; their gradient stays in fp32
        assert counts.flops[dtype] == share * sum(counts.flops.values())


def test_shared_scores_have_the_gradient_of_their_definition(dtype):
    for cosine, negatives in itertools.product([False, True], ["none", "shared", "each"]):
        query, key, negative = inputs(dtype, negatives)
        tensors = query, key[:5], negative  # each query is scored with all keys
        found = {}
        for device, kind in (("cpu", torch.float64), ("sim", dtype)):
            leaves = [None if x is None else x.to(device, kind).requires_grad_() for x in tensors]
            scores = candidate_scores(*leaves, cosine=cosine)
            upstream = torch.linspace(-1, 1, scores.numel()).view_as(scores)
            upstream = upstream.to(scores.device, scores.dtype)
            for _ in range(2):  # a second time from the same graph
                wanted = [x for x in leaves if x is not None]
                by_inputs = torch.autograd.grad(scores, wanted, upstream, retain_graph=True)
            found[device] = [x.detach().cpu().double() for x in (scores, *by_inputs)]
        for exact, rounded in zip(found["cpu"], found["sim"], strict=True):
            assert distance(rounded, exact) < 2 * EPS[dtype]


def test_second_derivatives_are_those_of_the_definition():
    query, key, _ = inputs(torch.bfloat16, "none")
    found = []
    for device, kind in (("cpu", torch.float64), ("sim", torch.bfloat16)):
        leaves = [x.to(device, kind).requires_grad_() for x in (query, key)]
        scores = candidate_scores(*leaves, None, cosine=True)
        (by_query,) = torch.autograd.grad(scores.square().sum(), leaves[0], create_graph=True)
        (again,) = torch.autograd.grad(by_query.square().sum(), leaves[1])
        found.append(again.cpu().double())
    assert distance(found[1], found[0]) < 0.05


@pytest.mark.parametrize("cosine", [False, True])
def test_a_nan_shows_in_shared_scores_and_their_gradient(dtype, cosine):
    query, key, _ = inputs(dtype, "none")
    key[1, 2] = torch.nan
    query = query.to("sim").requires_grad_()
    scores = candidate_scores(query, key.to("sim"), None, cosine=cosine)
    (gradient,) = torch.autograd.grad(scores.sum(), query)
    assert scores.detach().cpu().isnan().all(0).tolist() == [n == 1 for n in range(7)]
    assert gradient.cpu().isnan().any(1).all()
