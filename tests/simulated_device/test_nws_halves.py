"""NWS on a device that returns products of halves in fp32."""

import itertools

import pytest
import torch

from benchmarks.losses import nws as benchmark
from benchmarks.schema import Maker
from sparse_losses._core import products
from sparse_losses.functional import nws_loss
from tools import simulated_device

if reason := simulated_device.why_not():
    pytest.skip(reason, allow_module_level=True)
simulated_device.start()
EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
FEATURES = ("query", "prototype", "key", "queue")


@pytest.fixture(params=EPS, ids=str)
def dtype(request):
    """The device is asked once a process whether it returns fp32: not in what is counted."""
    device = torch.empty(0, device="sim").device  # with its index, as of any tensor there
    assert products.returns_fp32(device, request.param)
    return request.param


def inputs(dtype, **sizes):
    sizes = {"B": 7, "K": 5, "Q": 9, "F": 16, "L": 6, **sizes}
    made = benchmark.inputs(sizes, Maker(torch.device("cpu"), torch.float32))
    return {name: x.to(dtype) if name in FEATURES else x for name, x in made.items()}


def value_and_gradients(call, tensors, device, dtype, **options):
    tensors = {
        name: x.to(device, dtype if name in FEATURES or dtype == torch.float64 else None)
        for name, x in tensors.items()
    }
    leaves = [tensors[name].requires_grad_() for name in ("query", "prototype")]
    value = call(**tensors, **options)
    value.backward(torch.full_like(value, 256.0))
    return [x.detach().cpu().double() for x in (value, *(leaf.grad for leaf in leaves))]


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("aggregation", ["mean", "max"])
def test_halves_are_rounded_once(dtype, aggregation, monkeypatch):
    monkeypatch.setattr("sparse_losses.fast.nws.most_scores", lambda device: 300)
    tensors = inputs(dtype)
    tensors["queue"][2] = torch.nan
    mask = torch.arange(9) != 2
    for decoupled, eps in itertools.product([True, False], [0.0, 1e-8]):
        options = {"decoupled": decoupled, "eps": eps, "aggregation": aggregation}
        wanted = value_and_gradients(
            nws_loss, tensors, "cpu", torch.float64, queue_mask=mask, **options
        )
        found = value_and_gradients(
            nws_loss, tensors, "sim", dtype, queue_mask=mask.to("sim"), impl="direct", **options
        )
        assert distance(found[0], wanted[0]) < 3e-6
        for by_ours, by_double in zip(found[1:], wanted[1:], strict=True):
            assert distance(by_ours, by_double) < 2 * EPS[dtype]


def test_no_further_from_fp64_than_the_plain_formula_in_bf16():
    """In fp16 the plain formula is NaN: its eps of 1e-8 is 0 there."""
    tensors = inputs(torch.bfloat16)
    halves = {name: x.bfloat16() for name, x in tensors.items()}
    wanted = value_and_gradients(benchmark.plain, tensors, "cpu", torch.float64)
    plain = value_and_gradients(benchmark.plain, halves, "sim", torch.bfloat16)
    ours = value_and_gradients(nws_loss, tensors, "sim", torch.bfloat16)
    for a, b, exact in zip(ours, plain, wanted, strict=True):
        assert distance(a, exact) <= distance(b, exact) + EPS[torch.bfloat16]


def test_products_of_features_are_of_halves(dtype):
    sizes = {"B": 7, "K": 5, "Q": 9, "F": 16, "L": 6}
    tensors = {name: x.to("sim") for name, x in inputs(dtype).items()}
    for name in ("query", "prototype"):
        tensors[name].requires_grad_()
    with simulated_device.counting() as counts:
        nws_loss(**tensors).backward()
    references = sizes["K"] + sizes["Q"] + sizes["L"]
    forward = 2 * sizes["B"] * references * sizes["F"]
    backward = forward + 2 * sizes["B"] * sizes["L"] * sizes["F"]
    assert counts.flops[dtype] == forward + (backward if dtype == torch.bfloat16 else 0)
    assert counts.waits == 0


@pytest.mark.parametrize("kind", ["mean", "max", "coupled", "exact", "masked", "learned"])
def test_it_never_waits(kind):
    tensors = {name: x.to("sim") for name, x in inputs(torch.float32).items()}
    options = {
        "mean": {},
        "max": {"aggregation": "max"},
        "coupled": {"decoupled": False},
        "exact": {"eps": 0.0},
        "masked": {"queue_mask": torch.ones(9).to("sim")},
        "learned": {"temperature": torch.tensor(0.1).to("sim").requires_grad_()},
    }[kind]
    for name in ("query", "prototype"):
        tensors[name].requires_grad_()
    with simulated_device.counting() as counts:
        nws_loss(**tensors, **options).backward()
    assert tensors["query"].grad.cpu().any()
    assert counts.launches > 50
    assert counts.waits == 0


def test_the_definition_takes_halves_too(dtype):
    everything = inputs(dtype)
    alone = {k: x for k, x in everything.items() if not k.startswith(("key", "queue"))}
    for tensors in (everything, alone):
        wanted = value_and_gradients(nws_loss, tensors, "cpu", torch.float64)
        for options in ({"impl": "definition"}, {"reduction": "none"}):
            found = value_and_gradients(
                lambda options=options, **x: nws_loss(**x, **options).mean(), tensors, "sim", dtype
            )
            assert distance(found[0], wanted[0]) < 3e-6
            for rounded, exact in zip(found[1:], wanted[1:], strict=True):
                assert distance(rounded, exact) < 2 * EPS[dtype]
