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
from sparse_losses.fast import head_entries, head_packed, head_tiles
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
        for module in (head_packed, head_tiles):
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
    """Make the named tensors, or all floating ones, leaves that want a gradient; return them."""
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


@st.composite
def problems(draw) -> dict:
    """Arrays whose logits fp32 holds exactly: of any size, or small whole numbers, which tie."""
    rng = np.random.default_rng(draw(seeds))
    batch, length, vocab, width = (draw(st.integers(1, most)) for most in (4, 9, 40, 12))
    bits, scale = draw(st.sampled_from([(9, 2.0**-6), (1, 1.0)]))
    arrays = {
        "hidden": oracle.grid(rng, (batch, length, width), bits, scale),
        "weight": oracle.grid(rng, (vocab, width), bits, scale),
    }
    if draw(st.booleans()):
        arrays["bias"] = oracle.grid(rng, vocab, bits, scale)
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.0, 0.4, 0.8]))
        arrays["attention_mask"] = rng.random((batch, length)) < share
    if draw(st.booleans()):
        arrays["gate"] = rng.choice([0.0, 0.5, 1.0], size=(batch, vocab))
    return arrays


def picked(hidden, weight, bias=None, attention_mask=None, gate=None):
    """The formula at the first of the largest attended scores, which NumPy finds."""
    scores = (hidden.detach() @ weight.detach().T).numpy()
    mask = np.ones(hidden.shape[:2], bool) if attention_mask is None else attention_mask.numpy()
    place = torch.from_numpy(np.where(mask[..., None], scores, -np.inf).argmax(1))
    logits = (hidden[torch.arange(len(hidden))[:, None], place] * weight).sum(2)
    logits = logits if bias is None else logits + bias
    logits = logits * torch.from_numpy(mask.any(1, keepdims=True))
    logits = logits if gate is None else logits * gate
    return logits.relu().log1p(), logits


@given(problems(), st.sampled_from([torch.float32, torch.float64]), st.booleans(), seeds)
def test_values_and_gradients_are_those_of_the_formula(head, arrays, dtype, return_logits, seed):
    """Of equal scores the first has the gradient; inactive entries have that of their logits."""
    tensors, exact = to_tensors(arrays, dtype), to_tensors(arrays, torch.float64)
    leaves, exact_leaves = watch(tensors), watch(exact)
    activations, logits = head(**tensors, return_logits=True)
    assert activations.dtype == logits.dtype == dtype
    named = {"mask" if name == "attention_mask" else name: x for name, x in arrays.items()}
    np.testing.assert_array_equal(logits.detach().numpy(), oracle.logits(**named))
    rounding = 16 * torch.finfo(dtype).eps
    expected = picked(**exact)
    np.testing.assert_allclose(activations.detach(), expected[0].detach(), rtol=rounding)
    np.testing.assert_array_equal(activations.detach() > 0, logits.detach() > 0)
    alone = head(**tensors)
    torch.testing.assert_close(alone, activations, rtol=rounding, atol=0.0)
    outputs = [activations, logits] if return_logits else [alone]
    upstream = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, *logits.shape)))
    sums = [
        sum((x * y).sum() for x, y in zip(some, upstream, strict=False))
        for some in (outputs, expected[: len(outputs)])
    ]
    wanted = gradients(sums[1], exact_leaves)
    sizes = {name: x.abs().max().item() for name, x in exact_leaves.items()}
    largest = 4 * 40 * max(1.0, *sizes.values()) * upstream.abs().max().item()
    for name, gradient in gradients(sums[0], leaves).items():
        assert gradient.dtype == dtype
        torch.testing.assert_close(
            gradient.double(), wanted[name], rtol=rounding, atol=rounding * largest, msg=name
        )


# Masks


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_masked_position_hides_everything(head, bad):
    tensors = example(torch.float32)
    leaves = watch(tensors)
    clean = head(**tensors)
    expected = gradients(weigh(clean), leaves)
    tensors["hidden"] = tensors["hidden"].masked_fill(RAGGED[..., None] == 0, bad)
    leaves = watch(tensors)
    out = head(**tensors)
    assert torch.equal(out, clean)
    actual = gradients(weigh(out), leaves)
    close(actual, expected, 1e-6, 1e-6)
    assert not actual["hidden"][RAGGED == 0].any()
    assert actual["hidden"][RAGGED == 1].any()


# Shapes


@pytest.mark.parametrize("gated", [False, True])
@only("definition", *PACKED)
def test_texts_without_positions_are_zeros_twice_differentiable(head, gated):
    tensors = {
        "hidden": torch.zeros(2, 0, 3, requires_grad=True),
        "weight": torch.ones(9, 3, requires_grad=True),
        "bias": torch.ones(9, requires_grad=True),
    }
    gate = torch.ones(2, 9) if gated else None
    for mask in (None, torch.ones(2, 0)):
        for flags in ({}, {"return_logits": True}):
            out = head(**tensors, attention_mask=mask, gate=gate, **flags)
            out = torch.stack(out) if flags else out
            assert out.shape[-2:] == (2, 9)
            assert not out.any()
            first = gradients(out.sum(), tensors, create_graph=True)
            assert not any(gradient.any() for gradient in first.values())
            sum(gradient.square().sum() for gradient in first.values()).backward()


@pytest.mark.parametrize("length", [130, 300])  # a byte holds the positions of the first
def test_many_long_texts(head, length):
    """The packed head rounds up their lengths to multiples of 8, not 4."""
    tensors = {"hidden": torch.randn(20, length, 4), "weight": torch.randn(10, 4)}
    tensors = {name: x.double() for name, x in tensors.items()}
    leaves = watch(tensors)
    mask = torch.arange(length) < torch.randint(1, length + 1, (20, 1))
    expected, actual = (
        each(**tensors, attention_mask=mask)
        for each in (functools.partial(splade_head, impl="definition"), head)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    close(gradients(weigh(actual), leaves), gradients(weigh(expected), leaves), 1e-11, 1e-12)


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
def test_tied_embeddings_get_both_sparse_gradients(head):
    embedding = nn.Embedding(23, 8, sparse=True, dtype=torch.float64)
    ids = torch.randint(0, 23, RAGGED.shape)
    reference, _ = EXACT(embedding(ids).tanh(), embedding.weight, None, RAGGED)
    weigh(reference).backward()
    expected, embedding.weight.grad = embedding.weight.grad.to_dense(), None
    weigh(head(embedding(ids).tanh(), embedding.weight, None, RAGGED, sparse_grad=True)).backward()
    assert embedding.weight.grad.is_sparse
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


def generic() -> dict:
    """Normal numbers, whose logits are of both signs and near 0."""
    tensors = with_gate(example())
    drawn = {name: torch.randn_like(x) for name, x in tensors.items() if x.is_floating_point()}
    return {**tensors, **drawn, "gate": drawn["gate"].sigmoid()}


# The choice


@pytest.mark.cpu_only
def test_auto_is_packed_on_the_cpu_but_for_few_logits_and_tiles_elsewhere():
    small, large = example(torch.float32), example(torch.float32, vocab=(1 << 17) // 15 + 1)
    there = {name: x.to("meta") for name, x in small.items()}
    for inputs, options, expected in (
        (small, {}, "definition"),
        (small, {"impl": "packed"}, "packed"),
        (small, {"impl": "tiles"}, "tiles"),
        (small, {"sparse_grad": True}, "packed"),
        (large, {}, "packed"),
        (large, {"impl": "definition"}, "definition"),
        (there, {}, "tiles"),
    ):
        with Launches(inputs["hidden"].device.type) as seen:
            splade_head(**inputs, **options)
        ours = "packed" if seen.names["nonzero"] else "tiles"
        assert (ours if seen.custom else "definition") == expected


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


@pytest.mark.parametrize(
    ("flags", "backend", "dtype"),
    [
        ({"sparse_grad": True}, "aot_eager", torch.float32),
        ({"return_logits": True}, "inductor", torch.bfloat16),
    ],
    ids=str,
)
def test_options_compile_into_one_graph(flags, backend, dtype):
    torch._dynamo.reset()
    tensors = with_gate(example(dtype))
    leaves = watch(tensors)
    out = torch.compile(splade_head, fullgraph=True, backend=backend)(**tensors, **flags)
    expected = splade_head(**tensors, **(flags | {"sparse_grad": False}))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    actual = gradients(weigh_all(out), leaves)
    assert all(not gradient.is_sparse and gradient.any() for gradient in actual.values())
    rtol = max(torch.finfo(dtype).eps, 1e-5)
    close(actual, gradients(weigh_all(expected), leaves), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("operator", ["packed", "tiles", "head_spread"])
@pytest.mark.parametrize("bare", [False, True])
def test_operators_pass_opcheck(operator, bare, monkeypatch):
    """With fp32 states, fp64 results and five tiles; bare without mask or bias."""
    for module in (head_packed, head_tiles):
        monkeypatch.setattr(module, "_tile_height", lambda *_: 5)
    tensors = generic()
    for name in ("hidden", "weight"):
        tensors[name] = tensors[name].float()
    leaves = watch(tensors, "hidden", "weight", "bias")
    both, attended, f64 = list(leaves.values())[:2], RAGGED.bool(), torch.float64
    bias, attended = (None, None) if bare else (leaves["bias"], attended)
    if operator == "head_spread":
        place = torch.randint(0, 5, (3, 23), dtype=torch.uint8)
        upstream = torch.randn(3, 23, dtype=f64, requires_grad=True)
        arguments = upstream, place, *both, attended, f64, [True, True], -1
    else:
        flags = operator, bare, True, False
        arguments = *both, bias, attended, tensors["gate"], f64, f64, *flags
        operator = "head_logits"
    torch.library.opcheck(getattr(torch.ops.sparse_losses, operator).default, arguments)


# Memory


@pytest.mark.parametrize(
    ("impl", "flags", "order"),
    [
        ("packed", {}, 2),
        ("packed", {"return_logits": True}, 1),
        ("packed", {"sparse_grad": True}, 1),
        ("tiles", {}, 1),
        ("tiles", {"return_logits": True}, 2),
        ("definition", {}, 1),
    ],
    ids=str,
)
def test_only_the_definition_holds_the_logits_of_every_position(impl, flags, order, monkeypatch):
    monkeypatch.setattr(head_tiles, "BYTES", 1 << 24)  # a tile as large as these logits otherwise
    batch, length, width, vocab = 16, 64, 8, 20000
    tensors = {
        "hidden": torch.randn(batch, length, width),
        "weight": torch.randn(vocab, width),
        "bias": torch.randn(vocab) - 6,
    }
    if "return_logits" in flags:
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
        value = weigh_all(splade_head(**tensors, **flags, impl=impl))
        results = gradients(value, leaves, create_graph=order == 2)
        if order == 2:
            results = gradients(sum(x.square().sum() for x in results.values()), leaves)
    assert all(each.to_dense().any() for each in results.values())
    assert seen.largest >= batch * vocab
    is_held = seen.largest >= batch * length * vocab / 2
    assert is_held == (impl == "definition")
    if impl != "definition" and order == 1:
        assert sum(saved.values()) < batch * length * vocab / 2


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("tokens", "width"), [(1, 1), (16384, 768), (1 << 21, 1), (1, 1 << 21), (1 << 29, 1)], ids=str
)
def test_scores_and_rows_of_a_tile_stay_within_the_budget_or_are_one_row(tokens, width, size):
    states = torch.empty(tokens, width, device="meta")
    weight = torch.empty(20000, width, device="meta")
    _, rows = next(head_tiles._tiles(weight, states, size))
    of_a_row = max(tokens, width) * size
    assert len(rows) == min(max(head_tiles.BYTES // of_a_row, 1), len(weight))


def test_half_precision_weight_is_cast_where_it_has_entries():
    """The gradient of the states is summed in fp32, without an fp32 copy of the weight."""
    rows, width = 300, 64
    weight = torch.ones(3 * rows, width, dtype=torch.bfloat16)
    hidden = torch.ones(1, 1, width, dtype=torch.bfloat16)
    column = torch.arange(0, 3 * rows, 3, dtype=torch.int32)
    entries = head_entries.Entries(column, torch.zeros_like(column), torch.ones(rows))
    with Launches("cpu") as seen:
        grad_hidden, _ = head_entries.gradients_at(entries, hidden, weight, [True, False])
    assert seen.largest == rows * width
    assert (grad_hidden == rows).all()
    _, grad_weight = head_entries.gradients_at(entries, hidden, weight, [False, True])
    assert grad_weight.sum(1).tolist() == [width, 0, 0] * rows


# NaN in, NaN out


NAN_AT = {  # and where the result has it: the third text attends to nothing
    "hidden": ((0, 2, 5), (0, slice(None))),
    "weight": ((9, 3), (slice(2), 9)),
    "bias": (9, (slice(2), 9)),
    "gate": (0, (0, slice(None))),
}


@pytest.mark.parametrize("where", NAN_AT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("return_logits", [False, True])
def test_nan_shows_where_it_belongs_and_nowhere_else(head, where, dtype, return_logits):
    def run(tensors):
        out = head(**tensors, return_logits=return_logits)
        return out[1] if return_logits else out

    tensors = example(dtype, gate=torch.ones(3, 23, dtype=dtype))
    tensors["attention_mask"] = RAGGED * torch.tensor([[1], [1], [0]])
    clean = run(tensors)
    index, shows = NAN_AT[where]
    tensors[where][index] = torch.nan
    hidden = watch(tensors, "hidden")["hidden"]
    out = run(tensors)
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[shows] = True
    assert torch.equal(out.isnan(), expected)
    assert torch.equal(out[~expected], clean[~expected])
    if where == "hidden":
        out[~expected].sum().backward()
        assert hidden.grad[1:].isfinite().all()
        assert hidden.grad[1].any()


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
def test_gate_outside_its_range_and_empty_vocabulary_are_errors():
    tensors = example(torch.float32)
    for value in (1.5, -0.25):
        with pytest.raises(ValueError, match=rf"expected `gate` in \[0, 1\], got .*{value}"):
            splade_head(**tensors, gate=torch.full((3, 23), value))
    with pytest.raises(ValueError, match="expected `weight` of at least one token, got V = 0"):
        splade_head(tensors["hidden"], torch.ones(0, 8))


# The module


@pytest.mark.parametrize("make", [nn.Parameter, torch.clone], ids=["parameter", "plain"])
def test_module_equals_the_function_also_copied_pickled_and_loaded(make):
    rest = example()
    module = SpladeHead(make(rest.pop("weight")), make(rest.pop("bias")))
    gated = {"return_logits": True, "gate": with_gate(example())["gate"]}
    fresh = SpladeHead(make(torch.zeros(23, 8).double()), make(torch.zeros(23).double()))
    assert not fresh(**rest).any()
    assert set(module.state_dict()) == {"weight", "bias"}
    fresh.load_state_dict(module.state_dict())
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        assert type(twin.weight) is type(module.weight)
        for flags in ({}, gated):
            actual, expected = twin(**rest, **flags), splade_head(**example(), **flags)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
            assert expected[0].any()
    expected = splade_head(**example(attention_mask=None))
    assert torch.equal(module(rest["hidden"]), expected)


def test_module_keeps_a_parameter_and_makes_a_plain_tensor_a_frozen_buffer():
    embedding = nn.Embedding(23, 8)
    module = SpladeHead(embedding.weight, torch.ones(23))
    assert dict(module.named_parameters()) == {"weight": embedding.weight}
    assert set(dict(module.named_buffers())) == {"bias"}
    model = nn.ModuleDict({"embedding": embedding, "head": module})
    assert len(list(model.parameters())) == 1
    module(embedding(torch.randint(0, 23, (2, 5)))).sum().backward()
    assert embedding.weight.grad.any()
    assert module.bias.grad is None
    twin = copy.deepcopy(model)
    assert twin["head"].weight is twin["embedding"].weight is not embedding.weight
    assert model.double()["head"].weight is embedding.weight
    assert module(torch.ones(2, 3, 8).double()).dtype == torch.float64


def test_hidden_states_of_width_0_leave_the_bias():
    bias = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
    activations = splade_head(torch.ones(2, 3, 0), torch.ones(3, 0), bias)
    activations.sum().backward()
    torch.testing.assert_close(activations[1].detach(), torch.log1p(torch.tensor([0.0, 0.0, 1.0])))
    torch.testing.assert_close(bias.grad, torch.tensor([0.0, 0.0, 1.0]))
