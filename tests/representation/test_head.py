"""The head: from hidden states to sparse vectors, without the logits in between.

What it has in common with the losses is in the contract (tests/losses/test_contract.py), its
launches are counted in tests/test_launches.py.
"""

import copy
import functools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.run.launches import Launches
from sparse_losses import SpladeHead
from sparse_losses._core.loss import _as_layer
from sparse_losses.fast import head as packed_head
from sparse_losses.fast import head_tiles
from sparse_losses.functional import splade_head
from tests.representation import head_oracle as oracle
from tests.strategies import seeds

RAGGED = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]])
PACKED = ["packed", "packed, 7 columns a tile"]
TILES = ["tiles", "tiles, 7 columns a tile"]
EXACT = functools.partial(splade_head, impl="definition", return_logits=True)


@pytest.fixture(params=["definition", *PACKED, *TILES])
def head(request, monkeypatch):
    """Every implementation, also with tiles that are small enough for an oracle's vocabulary."""
    impl, *small = request.param.split(", ")
    if small:
        for module in (packed_head, head_tiles):
            monkeypatch.setattr(module, "_tile_height", lambda *_: 7)
    return functools.partial(splade_head, impl=impl)


def only(*names):
    return pytest.mark.parametrize("head", names, indirect=True)


def to_tensors(arrays: dict, dtype: torch.dtype) -> dict:
    tensors = {}
    for name, array in arrays.items():
        tensor = None if array is None else torch.from_numpy(np.asarray(array))
        floating = tensor is not None and tensor.is_floating_point()
        tensors[name] = tensor.to(dtype) if floating else tensor
    return tensors


NAMES = ("hidden", "weight", "bias", "attention_mask", "gate")


def pooled_by_oracle(tensors: dict) -> np.ndarray:
    arguments = (tensors.get(name) for name in NAMES)
    return oracle.logits(*(None if x is None else x.detach().double().numpy() for x in arguments))


def example(dtype=torch.float64, vocab=23, width=8, **others) -> dict:
    """Build a call whose logits are exact in fp32, with ragged masks that have holes."""
    rng = np.random.default_rng(7)
    batch, length = RAGGED.shape
    bits = 7 if dtype == torch.bfloat16 else 9
    arrays = {
        "hidden": oracle.grid(rng, (batch, length, width), bits),
        "weight": oracle.grid(rng, (vocab, width), bits),
        "bias": oracle.grid(rng, vocab, bits),
        "attention_mask": RAGGED.numpy(),
    }
    return {**to_tensors(arrays, dtype), **others}


def with_gate(tensors: dict) -> dict:
    batch, vocab = len(tensors["hidden"]), len(tensors["weight"])
    steps = torch.arange(batch * vocab).reshape(batch, vocab)
    return {**tensors, "gate": (steps * 3 % 5).to(tensors["hidden"].dtype) / 4}


def watch(tensors: dict, *names: str) -> dict:
    """Make the named tensors (or all floating ones) leaves that want a gradient; return them."""
    leaves = {}
    for name, tensor in tensors.items():
        if tensor is None or not tensor.is_floating_point() or (names and name not in names):
            continue
        leaves[name] = tensors[name] = tensor.detach().clone().requires_grad_()
    return leaves


def weigh(out: torch.Tensor) -> torch.Tensor:
    """Weigh all entries differently, so that a misplaced gradient shows."""
    return (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()


def weigh_all(out) -> torch.Tensor:
    """Weigh the activations and, where they were returned, the logits."""
    return sum(map(weigh, out)) if isinstance(out, tuple) else weigh(out)


def gradients(value: torch.Tensor, leaves: dict, **options) -> dict:
    return dict(
        zip(leaves, torch.autograd.grad(value, list(leaves.values()), **options), strict=True)
    )


def close(actual: dict, expected: dict, rtol: float = 1e-5, atol: float = 2e-5) -> None:
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], rtol=rtol, atol=atol, msg=name)


# The formula


@given(oracle.problems(), st.sampled_from([torch.float32, torch.float64]))
def test_values_are_those_of_the_formula(head, arrays, dtype):
    tensors = to_tensors(arrays, dtype)
    expected = pooled_by_oracle(tensors)
    activations, pooled = head(**tensors, return_logits=True)
    assert activations.dtype == pooled.dtype == dtype
    np.testing.assert_array_equal(pooled.double().numpy(), expected)
    rtol = 1e-6 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(activations, oracle.activations(expected), rtol=rtol, atol=0.0)
    np.testing.assert_array_equal((activations > 0).numpy(), expected > 0)
    torch.testing.assert_close(head(**tensors), activations, rtol=rtol, atol=0.0)


@given(oracle.problems(), st.sampled_from([torch.float32, torch.float64]), st.booleans(), seeds)
def test_gradients_are_those_of_the_formula(head, arrays, dtype, return_logits, seed):
    tensors = to_tensors(arrays, dtype)
    leaves = watch(tensors)
    rng = np.random.default_rng(seed)
    shape = (len(arrays["hidden"]), len(arrays["weight"]))
    upstream = rng.normal(size=shape)
    upstream_logits = rng.normal(size=shape) if return_logits else None
    expected = oracle.gradients(*(arrays[name] for name in NAMES), upstream, upstream_logits)
    out = head(**tensors, return_logits=return_logits)
    activations, pooled = out if return_logits else (out, None)
    value = (activations * torch.from_numpy(upstream)).sum()
    if return_logits:
        value = value + (pooled * torch.from_numpy(upstream_logits)).sum()
    tolerance = 16 * torch.finfo(dtype).eps
    for name, gradient in gradients(value, leaves).items():
        assert gradient.dtype == dtype
        total, size = expected[name]
        assert (np.abs(gradient.double().numpy() - total) <= tolerance * size).all(), name


# Which position, and what has a gradient


def test_first_of_equal_scores_gets_the_gradient(head):
    row = torch.tensor([0.5, 1.25, -3.0])
    hidden = torch.stack([row, row, -row, row]).expand(2, 4, 3).clone().requires_grad_()
    weight = torch.eye(3).repeat(4, 1).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    head(hidden, weight, None, mask).sum().backward()
    one = torch.tensor([4 / 1.5, 4 / 2.25, 0.0])
    minus = torch.tensor([0.0, 0.0, 4 / 4.0])
    nothing = torch.zeros(3)
    torch.testing.assert_close(hidden.grad[0], torch.stack([one, nothing, minus, nothing]))
    torch.testing.assert_close(hidden.grad[1], torch.stack([nothing, one, minus, nothing]))


def test_pooled_logits_have_a_gradient_where_activations_have_none(head):
    tensors = example(bias=torch.full((23,), -1000.0, dtype=torch.float64))
    leaves = watch(tensors)
    out, pooled = head(**tensors, return_logits=True)
    assert (pooled < 0).all()
    for gradient in gradients(out.sum(), leaves, retain_graph=True).values():
        assert not gradient.any()
    alive = gradients(weigh(pooled), leaves)
    close(alive, gradients(weigh(EXACT(**tensors)[1]), leaves), 1e-12, 1e-12)
    assert all(gradient.any() for gradient in alive.values())


# Masks


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_masked_position_hides_everything(head, bad):
    tensors = example(torch.float32)
    expected_leaves = watch(expected_tensors := dict(tensors))
    clean = head(**expected_tensors)
    expected = gradients(weigh(clean), expected_leaves)
    tensors["hidden"] = tensors["hidden"].masked_fill(RAGGED[..., None] == 0, bad)
    leaves = watch(tensors)
    out = head(**tensors)
    assert torch.equal(out, clean)
    actual = gradients(weigh(out), leaves)
    close(actual, expected, 1e-6, 1e-6)
    assert not actual["hidden"][RAGGED == 0].any()
    assert actual["hidden"][RAGGED == 1].any()


@pytest.mark.parametrize("return_logits", [False, True])
def test_fully_masked_text_is_zero_without_gradient(head, return_logits):
    tensors = with_gate(example())
    tensors["attention_mask"] = RAGGED * torch.tensor([[1], [0], [1]])
    tensors["bias"] = tensors["bias"].abs() + 1
    others = {k: v[[0, 2]] if len(v) == 3 else v for k, v in tensors.items()}
    for name in ("hidden", "gate"):
        tensors[name][1] = torch.nan
    leaves, other_leaves = watch(tensors), watch(others)
    out = head(**tensors, return_logits=return_logits)
    expected = head(**others, return_logits=return_logits)
    if return_logits:
        assert not out[0][1].any()
        out, expected = out[1], expected[1]
    assert not out[1].any()
    assert torch.equal(out[[0, 2]], expected)
    others_gradients = gradients(expected.sum(), other_leaves)
    for name, gradient in gradients(out.sum(), leaves).items():
        if name in ("hidden", "gate"):
            assert not gradient[1].any()
            gradient = gradient[[0, 2]]
        torch.testing.assert_close(gradient, others_gradients[name], rtol=1e-12, atol=1e-12)
        assert gradient.any()


# Shapes and layouts


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("create_graph", [False, True])
@only("definition", *PACKED)
def test_no_texts_or_no_positions_give_zeros(head, shape, gated, create_graph):
    tensors = {
        "hidden": torch.zeros(*shape, 3, requires_grad=True),
        "weight": torch.ones(9, 3, requires_grad=True),
        "bias": torch.ones(9, requires_grad=True),
    }
    gate = torch.ones(shape[0], 9) if gated else None
    for mask in (None, torch.ones(shape)):
        out, pooled = head(**tensors, attention_mask=mask, gate=gate, return_logits=True)
        assert out.shape == pooled.shape == (shape[0], 9)
        assert not out.any()
        assert not pooled.any()
        assert head(**tensors, attention_mask=mask, gate=gate).shape == (shape[0], 9)
        first = gradients(out.sum() + pooled.sum(), tensors, create_graph=create_graph)
        assert not any(gradient.any() for gradient in first.values())
        if create_graph:
            sum(gradient.square().sum() for gradient in first.values()).backward()


def test_padding_and_the_order_of_positions_change_nothing(head):
    tensors = example(torch.float32)
    hidden, rest = tensors.pop("hidden"), tensors
    rest.pop("attention_mask")
    clean = head(hidden, attention_mask=RAGGED, **rest)
    order = torch.tensor([3, 1, 4, 0, 2])
    moved = head(hidden[:, order], attention_mask=RAGGED[:, order], **rest)
    longer = torch.cat([hidden, torch.full((3, 4, 8), 50.0)], 1)
    padded = head(longer, attention_mask=torch.cat([RAGGED, RAGGED[:, :4] * 0], 1), **rest)
    assert clean.any(1).all()
    assert torch.equal(moved, clean)
    assert torch.equal(padded, clean)


def test_many_long_texts(head):
    """The packed head rounds up their lengths to multiples of 8, not 4."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(20, 130, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    mask = torch.arange(130) < torch.randint(1, 131, (20, 1), generator=generator)
    expected = EXACT(hidden, weight, None, mask)[0]
    torch.testing.assert_close(head(hidden, weight, None, mask), expected, rtol=1e-12, atol=0)


# Gradients of some inputs, and of none


@pytest.mark.parametrize("return_logits", [False, True])
@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias", "gate", "hidden bias"])
def test_only_inputs_that_require_a_gradient_get_one(head, wanted, return_logits):
    everything = with_gate(example(torch.float32))
    some, nothing = dict(everything), dict(everything)
    all_leaves, leaves = watch(everything), watch(some, *wanted.split())
    expected, actual = (
        gradients(weigh_all(head(**tensors, return_logits=return_logits)), wants)
        for tensors, wants in ((everything, all_leaves), (some, leaves))
    )
    for name, gradient in actual.items():
        assert gradient.any()
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-6)
    quiet = head(**nothing)
    with torch.inference_mode():
        inside, pooled = head(**some, return_logits=True)
    assert not any(x.requires_grad for x in (quiet, inside, pooled))
    assert torch.equal(inside, quiet)


def test_two_runs_and_two_backward_passes_give_the_same_bits(head):
    generator = torch.Generator().manual_seed(5)
    sizes = {"hidden": (4, 9, 24), "weight": (211, 24), "bias": (211,), "gate": (4, 211)}
    tensors = {n: torch.rand(size, generator=generator) for n, size in sizes.items()}
    tensors["weight"] -= 0.5
    leaves = watch(tensors)
    runs = []
    for _ in range(2):
        value = weigh(head(**tensors))
        for _ in range(2):
            runs.append(
                {n: x.clone() for n, x in gradients(value, leaves, retain_graph=True).items()}
            )
    for name in leaves:
        assert runs[0][name].any()
        assert all(torch.equal(run[name], runs[0][name]) for run in runs)


def test_no_gradient_from_above_gives_none(head):
    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, upstream):
            return None

    tensors = example()
    leaves = watch(tensors)
    Silent.apply(head(**tensors)).sum().backward()
    assert all(leaf.grad is None for leaf in leaves.values())


# Sparse gradients


@only(*PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("return_logits", [False, True])
@pytest.mark.parametrize("silent", ["half", "all"])
def test_sparse_gradient_has_the_rows_with_active_entries(head, dtype, return_logits, silent):
    tensors = example(dtype)
    tensors["bias"] -= 80 * (torch.arange(23) % 2 == 0) if silent == "half" else 1e4
    leaves = watch(tensors)
    out = head(**tensors, return_logits=return_logits, sparse_grad=True)
    dense = gradients(weigh_all(head(**tensors, return_logits=return_logits)), leaves)
    sparse = gradients(weigh_all(out), leaves)
    gradient = sparse["weight"]
    assert gradient.layout == torch.sparse_coo
    assert gradient.is_coalesced()
    assert gradient.dtype == dtype
    assert gradient.shape == (23, 8)
    active = (out[0] if return_logits else out).any(0) | torch.tensor(return_logits)
    assert return_logits or 0 < active.sum() < 23 or (silent == "all" and not active.any())
    assert torch.equal(gradient.indices()[0], active.nonzero()[:, 0])
    close({name: g.to_dense() for name, g in sparse.items()}, dense, 1e-2, 1e-6)


@only(*PACKED)
@pytest.mark.parametrize("sparse", [False, True])
def test_tied_embeddings_get_both_gradients(head, sparse):
    embedding = nn.Embedding(23, 8, sparse=sparse, dtype=torch.float64)
    ids = torch.randint(0, 23, RAGGED.shape)
    reference, _ = EXACT(embedding(ids).tanh(), embedding.weight, None, RAGGED)
    weigh(reference).backward()
    expected, embedding.weight.grad = embedding.weight.grad.to_dense(), None
    out = head(embedding(ids).tanh(), embedding.weight, None, RAGGED, sparse_grad=sparse)
    weigh(out).backward()
    assert embedding.weight.grad.is_sparse == sparse
    assert expected.any()
    torch.testing.assert_close(embedding.weight.grad.to_dense(), expected, rtol=1e-11, atol=1e-12)


# Precision


@pytest.mark.cpu_only
def test_dot_product_beyond_fp16_is_finite(head):
    hidden = torch.full((1, 2, 4), 6e4, dtype=torch.float16)
    weight = torch.full((3, 4), 100.0, dtype=torch.float16)
    weight[1] *= -1
    out, pooled = head(hidden, weight, return_logits=True)
    value = 4 * hidden[0, 0, 0].item() * 100
    assert pooled[0].tolist() == [value, -value, value]
    assert out[0].tolist() == pytest.approx([np.log1p(value), 0, np.log1p(value)], rel=1e-6)


def test_half_precision_gradients_are_summed_in_fp32(head):
    hidden = torch.ones(300, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    head(hidden, weight, bias).sum().backward()
    assert weight.grad.item() == bias.grad.item() == 150.0  # in bf16, 128 + 1/2 is 128
    one, many = hidden.detach()[:1].requires_grad_(), weight.detach().repeat(300, 1)
    head(one, many).sum().backward()
    assert one.grad.item() == 150.0


def test_layer_is_cast_to_the_dtype_of_autocast_except_on_the_cpu(monkeypatch):
    """With a stand-in for a tensor on a GPU, where the tests have none."""
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _as_layer(x).dtype == torch.float32
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float16)
    for dtype, expected in ((torch.float32, torch.float16), (torch.float64, torch.float64)):
        there = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, to=lambda dtype: dtype)
        assert (_as_layer(there) if dtype == torch.float32 else _as_layer(there).dtype) == expected


# Second derivatives, transforms


def generic(seed: int = 0, sizes=(2, 4, 9, 3)) -> dict:
    batch, length, vocab, width = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "hidden": (batch, length, width),
        "weight": (vocab, width),
        "bias": (vocab,),
        "gate": (batch, vocab),
    }
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    tensors["gate"] = tensors["gate"].sigmoid()
    tensors["attention_mask"] = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    return tensors


@pytest.mark.parametrize("through", ["weight", "gate"])
def test_second_derivatives_where_one_input_depends_on_another(head, through):
    """Tied embeddings: the hidden states come from the weight; or the gate from the states."""
    start = generic(4)
    ids = torch.tensor([[1, 5, 2, 0], [3, 3, 8, 1]])

    def penalty(function, weight):
        hidden = weight[ids].tanh()
        gate = (hidden.mean(1) @ weight.mT).sigmoid() if through == "gate" else None
        scores = weight.detach() if through == "gate" else weight
        value = weigh(function(hidden, scores, start["bias"], start["attention_mask"], gate=gate))
        (first,) = torch.autograd.grad(value, weight, create_graph=True)
        return first, torch.autograd.grad(weigh(first.square()), weight)[0]

    weight = start["weight"].requires_grad_()
    expected = penalty(lambda *args, **kwargs: EXACT(*args, **kwargs)[0], weight)
    for actual, wanted in zip(penalty(head, weight), expected, strict=True):
        assert wanted.any()
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)


@only(*TILES)
def test_third_derivatives_of_the_tiles_are_those_of_the_definition(head):
    results = []
    for function in (functools.partial(splade_head, impl="definition"), head):
        tensors = generic(5)
        leaves = watch(tensors)
        gradient = gradients(weigh(function(**tensors)), leaves, create_graph=True)
        for _ in range(2):
            value = sum(each.square().sum() for each in gradient.values())
            gradient = gradients(value, leaves, create_graph=True)
        results.append(gradient)
    assert all(each.any() for each in results[1].values())
    close(results[1], results[0], 1e-9, 1e-9)


# The choice


@pytest.mark.cpu_only
def test_auto_is_packed_on_the_cpu_and_tiles_elsewhere():
    tensors = example(torch.float32)
    there = {name: x.to("meta") for name, x in tensors.items()}
    for inputs, impl, expected in (
        (tensors, "definition", set()),
        (tensors, "packed", {"head_packed"}),
        (tensors, "tiles", {"head_maxima"}),
        (tensors, "auto", {"head_packed"}),
        (there, "auto", {"head_maxima"}),
    ):
        with Launches() as seen:
            splade_head(**inputs, impl=impl)
        assert seen.custom == expected


def test_implementation_that_cannot_take_the_call_says_why():
    tensors = example(torch.float32)
    for impl in ("tiles", "definition"):
        with pytest.raises(ValueError, match=f'expected sparse_grad=False with impl="{impl}"'):
            splade_head(**tensors, sparse_grad=True, impl=impl)
    with pytest.raises(ValueError, match=r"expected at least one position, got \[3, 0\], with"):
        splade_head(torch.ones(3, 0, 8), tensors["weight"], impl="tiles")
    for make in (
        lambda: splade_head(**tensors, impl="torch"),
        lambda: SpladeHead(tensors["weight"], impl="torch"),
    ):
        with pytest.raises(ValueError, match="'definition', 'packed', 'tiles', got 'torch'"):
            make()


# One graph


COMPILED = {
    "gate and logits": {"gate": True, "return_logits": True},
    "sparse_grad": {"sparse_grad": True},
}


@pytest.mark.parametrize(
    ("options", "backend", "dtype"),
    [
        ("sparse_grad", "aot_eager", torch.float32),
        ("gate and logits", "inductor", torch.bfloat16),
    ],
    ids=str,
)
def test_options_compile_into_one_graph(options, backend, dtype):
    torch._dynamo.reset()
    flags = dict(COMPILED[options])
    tensors = example(dtype)
    if flags.pop("gate", False):
        tensors = with_gate(tensors)
    leaves = watch(tensors)
    out = torch.compile(splade_head, fullgraph=True, backend=backend)(**tensors, **flags)
    expected = splade_head(**tensors, **(flags | {"sparse_grad": False}))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    actual = gradients(weigh_all(out), leaves)
    assert all(not gradient.is_sparse and gradient.any() for gradient in actual.values())
    rtol = max(torch.finfo(dtype).eps, 1e-5)
    close(actual, gradients(weigh_all(expected), leaves), rtol=rtol, atol=rtol)


def test_one_graph_serves_every_batch_size():
    torch._dynamo.reset()
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(splade_head, fullgraph=True, dynamic=True, backend=count)
    leaves = {"weight": torch.randn(23, 8), "bias": torch.randn(23)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    for batch, length in ((2, 5), (3, 5), (4, 7), (5, 6), (6, 3)):
        leaves["hidden"] = torch.randn(batch, length, 8, requires_grad=True)
        mask = (torch.rand(batch, length) < 0.7).long()
        expected = splade_head(**leaves, attention_mask=mask)
        out = compiled(**leaves, attention_mask=mask)
        torch.testing.assert_close(out, expected)
        close(gradients(weigh(out), leaves), gradients(weigh(expected), leaves))
        assert expected.any()
    assert len(graphs) == 1


@pytest.mark.parametrize("operator", ["head_maxima", "head_picked", "head_spread"])
@pytest.mark.parametrize("masked", [False, True])
def test_operators_of_the_tiles_pass_opcheck(operator, masked, monkeypatch):
    """With fp32 states and fp64 results, and two tiles."""
    tensors = generic(6)
    hidden = tensors["hidden"].float().requires_grad_()
    weight = tensors["weight"].float().requires_grad_()
    around = head_tiles.sources(tensors["attention_mask"].bool() if masked else None)
    place = torch.randint(0, 4, (2, 9), dtype=torch.uint8)
    upstream = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    f64 = torch.float64
    arguments = {
        "head_maxima": (hidden, weight, *around, f64, f64, True),
        "head_picked": (place, hidden, weight, *around, f64, f64),
        "head_spread": (upstream, place, hidden, weight, *around, f64, [True, True]),
    }
    monkeypatch.setattr(head_tiles, "_tile_height", lambda *_: 5)
    torch.library.opcheck(getattr(torch.ops.sparse_losses, operator).default, arguments[operator])


@pytest.mark.parametrize("biased", [False, True])
def test_operators_of_the_packed_head_pass_opcheck(biased, monkeypatch):
    """With fp32 states, fp64 results and two tiles."""
    monkeypatch.setattr(packed_head, "_tile_height", lambda *_: 5)
    tensors = generic(6)
    for name in ("hidden", "weight"):
        tensors[name] = tensors[name].float()
    leaves = watch(tensors, "hidden", "weight", "bias")
    if not biased:
        leaves["bias"] = None
    attended, f64 = tensors["attention_mask"].bool(), torch.float64
    operators = torch.ops.sparse_losses
    forward = (*leaves.values(), tensors["gate"], attended, f64, False, False)
    torch.library.opcheck(operators.head_packed.default, forward)
    place = torch.randint(0, 4, (2, 9), dtype=torch.uint8)
    backward = (torch.randn(2, 9, dtype=f64), place, *leaves.values(), [True, True, biased])
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in backward]
    torch.library.opcheck(operators.head_packed_backward.default, detached)


# Memory


@pytest.mark.parametrize(
    ("impl", "options", "order"),
    [
        ("packed", {}, 2),
        ("packed", {"return_logits": True, "gate": True}, 1),
        ("packed", {"sparse_grad": True}, 1),
        ("tiles", {}, 1),
        ("tiles", {"return_logits": True, "gate": True}, 2),
        ("definition", {}, 1),
    ],
    ids=str,
)
def test_only_the_definition_holds_the_logits_of_every_position(impl, options, order, monkeypatch):
    monkeypatch.setattr(head_tiles, "BYTES", 1 << 24)  # a tile as large as these logits otherwise
    batch, length, width, vocab = 16, 64, 8, 20000
    flags = {**options, "impl": impl}
    tensors = {
        "hidden": torch.randn(batch, length, width),
        "weight": torch.randn(vocab, width),
        "bias": torch.randn(vocab) - 6,
    }
    if flags.pop("gate", False):
        tensors["gate"] = torch.rand(batch, vocab)
    leaves = watch(tensors)
    tensors["attention_mask"] = torch.ones(batch, length)
    saved = {}

    def keep(tensor):
        saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        Launches("cpu") as seen,
    ):
        out = splade_head(**tensors, **flags)
        value = sum(each.sum() for each in out) if flags.get("return_logits") else out.sum()
        results = gradients(value, leaves, create_graph=order == 2)
        if order == 2:
            squares = sum(each.to_dense().square().sum() for each in results.values())
            results = gradients(squares, leaves)
    assert all(each.to_dense().any() for each in results.values())
    assert seen.largest >= batch * vocab
    is_held = seen.largest >= batch * length * vocab / 2
    assert is_held == (impl == "definition")
    if impl != "definition" and order == 1:
        assert sum(saved.values()) < batch * length * vocab / 2


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "int16"), (1 << 15, "int16"), ((1 << 15) + 1, "int32")],
)
def test_position_is_kept_in_the_smallest_integer_that_holds_it(length, dtype):
    hidden = torch.zeros(1, length, 1)
    hidden[0, -1] = 1.0
    around = head_tiles.sources(None)
    hidden.requires_grad_()
    f32 = torch.float32
    _, place = head_tiles.maxima(hidden, torch.ones(1, 1), *around, f32, f32, True)
    assert place.dtype == getattr(torch, dtype)
    splade_head(hidden, torch.ones(1, 1), impl="tiles").sum().backward()
    assert hidden.grad[0, :, 0].nonzero().flatten().tolist() == [length - 1]


def test_gradients_that_are_not_needed_are_not_computed():
    """Autograd drops them without a trace, so the operators are called themselves."""
    tensors = generic(8)
    inputs = {name: tensors[name] for name in ("hidden", "weight", "bias")}
    upstream, place = torch.ones(2, 9).double(), torch.zeros(2, 9, dtype=torch.uint8)
    for needed in inputs:
        needs = [name == needed for name in inputs]
        sizes = [x.numel() if need else 0 for x, need in zip(inputs.values(), needs, strict=True)]
        from_packed = packed_head.packed_gradients(upstream, place, *inputs.values(), needs)
        assert [each.numel() for each in from_packed] == sizes
        both = tensors["hidden"], tensors["weight"], None, None, torch.float64
        from_tiles = head_tiles.spread(upstream, place, *both, needs[:2])
        assert [each.numel() for each in from_tiles] == sizes[:2]


def test_tile_has_a_row_even_if_its_scores_exceed_the_budget():
    states, weight = torch.empty(1 << 29, 1, device="meta"), torch.empty(3, 1, device="meta")
    assert [len(rows) for _, rows in head_tiles._tiles(weight, states, 4)] == [1, 1, 1]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("tokens", "width"), [(1, 1), (16384, 768), (1 << 21, 1), (1, 1 << 21)], ids=str
)
def test_scores_and_rows_of_a_tile_stay_within_the_budget(tokens, width, size):
    states = torch.empty(tokens, width, device="meta")
    weight = torch.empty(20000, width, device="meta")
    part, rows = next(head_tiles._tiles(weight, states, size))
    assert part.start == 0
    is_all = len(rows) == len(weight)
    assert len(rows) * max(tokens, width) * size <= head_tiles.BYTES
    assert is_all or (len(rows) + 1) * max(tokens, width) * size > head_tiles.BYTES


def test_half_precision_weight_is_cast_in_blocks():
    """The gradient of the states is summed in fp32, without an fp32 copy of the weight."""
    block, width = packed_head.BLOCK, 64
    weight = torch.ones(3 * block, width, dtype=torch.bfloat16)
    hidden = torch.ones(1, 1, width, dtype=torch.bfloat16)
    upstream = torch.ones(1, len(weight))
    place = torch.zeros(1, len(weight), dtype=torch.uint8)
    inputs = upstream, place, hidden, weight, None
    with Launches("cpu") as seen:
        grad_hidden, _, _ = packed_head.packed_gradients(*inputs, [True, False, False])
    assert seen.largest == block * width
    assert (grad_hidden == len(weight)).all()
    _, grad_weight, _ = packed_head.packed_gradients(*inputs, [False, True, False])
    assert (grad_weight == 1).all()


# NaN in, NaN out


@pytest.mark.parametrize("where", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("return_logits", [False, True])
def test_nan_shows_where_it_belongs_and_nowhere_else(head, where, dtype, return_logits):
    """That of a state in its text, that of a token in its column of texts that attend to any."""

    def run(tensors):
        out = head(**tensors, return_logits=return_logits)
        return out[1] if return_logits else out

    tensors = example(dtype)
    tensors["attention_mask"] = RAGGED * torch.tensor([[1], [1], [0]])
    clean = run(tensors)
    index = {"hidden": (0, 2, 5), "weight": (9, 3), "bias": 9}[where]
    tensors[where][index] = torch.nan
    out = run(tensors)
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[(0, slice(None)) if where == "hidden" else (slice(2), 9)] = True
    assert torch.equal(out.isnan(), expected)
    assert torch.equal(out[~expected], clean[~expected])
    hidden = watch(tensors, "hidden")["hidden"]
    run(tensors)[~expected].sum().backward()
    if where == "hidden":
        assert hidden.grad[1:].isfinite().all()
        assert hidden.grad[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nan_of_the_gate_shows(head, dtype):
    tensors = example(dtype)
    clean, pooled = head(**tensors, return_logits=True)
    tensors["gate"] = torch.ones_like(clean)
    silent, active = (pooled[0] < 0).nonzero()[0].item(), (pooled[0] > 0).nonzero()[0].item()
    tensors["gate"][0, [silent, active]] = torch.nan
    out = head(**tensors)
    expected = clean.clone()
    expected[0, [silent, active]] = torch.nan
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_closed_gate_hides_no_nan_and_forbidden_token_makes_none(head):
    hidden = torch.ones(1, 2, 3)
    gate = torch.zeros(1, 4, requires_grad=True)
    bias = torch.tensor([0.0, -torch.inf, 1.0, 0.0])
    out, logits = head(hidden, torch.ones(4, 3), bias, gate=gate, return_logits=True)
    assert not out.any()
    assert logits[0, 1] == -torch.inf
    for value in (out.sum(), out.sum() + logits[:, [0, 2, 3]].sum()):
        (gradient,) = torch.autograd.grad(value, gate, retain_graph=True)
        assert gradient.isfinite().all()
        assert gradient[0, 1] == 0
    hidden[0, 1, 0] = torch.nan
    assert head(hidden, torch.ones(4, 3), gate=gate).isnan().all()


def test_nan_of_the_bias_shows_in_its_gradient_under_a_gate(head):
    bias = torch.tensor([0, torch.nan, 0, 0]).requires_grad_()
    head(torch.ones(1, 3, 2), torch.ones(4, 2), bias, gate=torch.full((1, 4), 0.5)).sum().backward()
    assert bias.grad.isnan().tolist() == [False, True, False, False]


# Errors


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": [[[1.0] * 8] * 5] * 3}, TypeError, ["hidden", "list"]),
        ({"weight": torch.ones(23, 7)}, ValueError, ["weight", "[23, 7]", "8"]),
        ({"bias": 0.5}, TypeError, ["bias", "float"]),
        ({"attention_mask": (1.0 - RAGGED) * -1e4}, ValueError, ["attention_mask", "-10000"]),
        ({"gate": torch.ones(1, 23)}, ValueError, ["gate", "[1, 23]", "3"]),
        ({"gate": torch.full((3, 23), 1.5)}, ValueError, ["gate", "1.5"]),
        ({"gate": torch.full((3, 23), -0.25)}, ValueError, ["gate", "-0.25"]),
        ({"return_logits": "False"}, TypeError, ["return_logits", "'False'"]),
        ({"sparse_grad": 1}, TypeError, ["sparse_grad"]),
        ({"weight": torch.ones(0, 8), "bias": None}, ValueError, ["weight", "V = 0"]),
    ],
)
def test_error_names_the_argument_and_what_was_received(change, error, words):
    with pytest.raises(error) as caught:
        splade_head(**{**example(torch.float32), **change})
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.index(words[0]) < 40, "the argument comes first"


# The module


def module_and_rest(kind: str) -> tuple[SpladeHead, dict]:
    tensors = example()
    make = nn.Parameter if kind == "parameter" else torch.clone
    module = SpladeHead(make(tensors.pop("weight")), make(tensors.pop("bias")))
    return module, tensors


kinds = pytest.mark.parametrize("kind", ["parameter", "plain"])


@kinds
def test_module_equals_the_function_also_copied_pickled_and_loaded(kind):
    module, rest = module_and_rest(kind)
    options = {"return_logits": True, "gate": with_gate(example())["gate"]}
    make = nn.Parameter if kind == "parameter" else torch.clone
    fresh = SpladeHead(make(torch.zeros(23, 8).double()), make(torch.zeros(23).double()))
    assert not fresh(**rest).any()
    assert set(module.state_dict()) == {"weight", "bias"}
    fresh.load_state_dict(module.state_dict())
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        assert type(twin.weight) is type(module.weight)
        for flags in ({}, options):
            actual, expected = twin(**rest, **flags), splade_head(**example(), **flags)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
            assert expected[0].any()
    expected = splade_head(**example(attention_mask=None))
    assert torch.equal(module(rest["hidden"]), expected)


def test_module_keeps_the_parameter_itself():
    embedding, bias = nn.Embedding(23, 8), nn.Parameter(torch.zeros(23))
    module = SpladeHead(embedding.weight, bias)
    assert module.weight is embedding.weight
    assert module.bias is bias
    assert dict(module.named_parameters()) == {"weight": embedding.weight, "bias": bias}
    assert not list(module.buffers())
    model = nn.ModuleDict({"embedding": embedding, "head": module})
    assert len(list(model.parameters())) == 2
    ids = torch.randint(0, 23, (2, 5))
    module(embedding(ids)).sum().backward()
    assert embedding.weight.grad.any()
    twin = copy.deepcopy(model)
    assert twin["head"].weight is twin["embedding"].weight
    assert twin["head"].weight is not embedding.weight
    with torch.no_grad():
        embedding.weight.mul_(2)
    assert torch.equal(module.weight, embedding.weight)
    model.double()
    assert module.weight is embedding.weight


def test_plain_tensor_becomes_a_frozen_buffer():
    module, rest = module_and_rest("plain")
    assert not list(module.parameters())
    assert set(dict(module.named_buffers())) == {"weight", "bias"}
    hidden = rest["hidden"].requires_grad_()
    module(**rest).sum().backward()
    assert hidden.grad.any()
    assert module.weight.grad is None
    single = module.float()(hidden.float(), rest["attention_mask"])
    assert single.dtype == torch.float32
    mixed = SpladeHead(nn.Parameter(torch.ones(23, 8)), torch.ones(23))
    assert set(dict(mixed.named_parameters())) == {"weight"}
    assert set(dict(mixed.named_buffers())) == {"bias"}


def test_hidden_states_of_width_0_leave_the_bias():
    bias = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
    activations = splade_head(torch.ones(2, 3, 0), torch.ones(3, 0), bias)
    activations.sum().backward()
    torch.testing.assert_close(activations[1].detach(), torch.log1p(torch.tensor([0.0, 0.0, 1.0])))
    torch.testing.assert_close(bias.grad, torch.tensor([0.0, 0.0, 1.0]))
