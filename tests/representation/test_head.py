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
from sparse_losses import SpladeHead, explain
from sparse_losses._core.loss import _as_layer
from sparse_losses.fast import head_entries, head_packed, head_tiles
from sparse_losses.functional import splade_head
from tests import oracles
from tests.cases import to_tensors
from tests.instruments import gradients, weigh
from tests.strategies import seeds

RAGGED = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]])
PACKED = ["packed", "packed, 7 columns a tile"]
TILES = ["tiles", "tiles, 7 columns a tile"]
WHOLE, CSR = {"return_logits": True}, {"layout": torch.sparse_csr}
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


def example(dtype=torch.float64, vocab=23, width=8, **others) -> dict:
    """Build a call whose logits are exact in fp32, with ragged masks that have holes."""
    rng = np.random.default_rng(7)
    batch, length = RAGGED.shape
    bits = 7 if dtype == torch.bfloat16 else 9
    arrays = {
        "hidden": oracles.grid(rng, (batch, length, width), bits),
        "weight": oracles.grid(rng, (vocab, width), bits),
        "bias": oracles.grid(rng, vocab, bits),
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


def weigh_all(out) -> torch.Tensor:
    return sum(map(weigh, out)) if isinstance(out, tuple) else weigh(out)


def close(actual, expected, rtol: float, atol: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@st.composite
def problems(draw) -> dict:
    """Arrays whose logits fp32 holds exactly: of any size, or small whole numbers, which tie."""
    rng = np.random.default_rng(draw(seeds))
    batch, length, vocab, width = (draw(st.integers(1, most)) for most in (4, 9, 40, 12))
    bits, scale = draw(st.sampled_from([(9, 2.0**-6), (1, 1.0)]))
    arrays = {
        "hidden": oracles.grid(rng, (batch, length, width), bits, scale),
        "weight": oracles.grid(rng, (vocab, width), bits, scale),
    }
    if draw(st.booleans()):
        arrays["bias"] = oracles.grid(rng, vocab, bits, scale)
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
    np.testing.assert_array_equal(logits.detach().numpy(), oracles.head_logits(**named))
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
    sizes = [x.abs().max().item() for x in exact_leaves.values()]
    largest = 4 * 40 * max(1.0, *sizes) * upstream.abs().max().item()
    found = gradients(sums[0], leaves)
    assert {gradient.dtype for gradient in found.values()} == {dtype}
    found = {name: gradient.double() for name, gradient in found.items()}
    close(found, wanted, rounding, rounding * largest)


def test_masked_position_hides_everything(head):
    results = []
    for bad in (1.0, torch.nan, torch.inf, -torch.inf):
        tensors = example(torch.float32)
        tensors["hidden"] = tensors["hidden"].masked_fill(RAGGED[..., None] == 0, bad)
        leaves = watch(tensors)
        results.append((head(**tensors), gradients(weigh(head(**tensors)), leaves)))
    for out, actual in results:
        assert torch.equal(out, results[0][0])
        close(actual, results[0][1], 1e-6, 1e-6)
        assert (actual["hidden"].any(2) == RAGGED).all()


@only("definition", *PACKED)
def test_texts_without_positions_are_zeros_twice_differentiable(head):
    sizes = {"hidden": (2, 0, 3), "weight": (9, 3), "bias": (9,), "gate": (2, 9)}
    tensors = {name: torch.ones(size, requires_grad=True) for name, size in sizes.items()}
    for mask in (None, torch.ones(2, 0)):
        out = torch.stack(head(**tensors, attention_mask=mask, **WHOLE))
        assert out.shape == (2, 2, 9)
        assert not out.any()
        first = gradients(out.sum(), tensors, create_graph=True)
        assert not any(gradient.any() for gradient in first.values())
        sum(gradient.square().sum() for gradient in first.values()).backward()


@pytest.mark.parametrize("length", [130, 300])  # a byte holds the positions of the first
def test_many_long_texts(head, length):
    """The packed head rounds up their lengths to multiples of 8, not 4."""
    tensors = {"hidden": torch.randn(20, length, 4).double(), "weight": torch.randn(10, 4).double()}
    leaves, mask = watch(tensors), torch.arange(length) < torch.randint(1, length + 1, (20, 1))
    expected, actual = (each(**tensors, attention_mask=mask) for each in (EXACT, head))
    expected, _ = expected
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    close(gradients(weigh(actual), leaves), gradients(weigh(expected), leaves), 1e-11, 1e-12)


@pytest.mark.parametrize("flags", [{}, {"return_logits": True}], ids=str)
@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias", "gate", "hidden bias"])
def test_only_inputs_that_require_a_gradient_get_one(head, wanted, flags):
    everything, some = (with_gate(example(torch.float32)) for _ in range(2))
    all_leaves, leaves = watch(everything), watch(some, *wanted.split())
    expected = gradients(weigh_all(head(**everything, **flags)), all_leaves)
    actual = gradients(weigh_all(head(**some, **flags)), leaves)
    assert all(gradient.any() for gradient in actual.values())
    close(actual, {name: expected[name] for name in actual}, 1e-6, 1e-6)


@only(*PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("silent", [80.0 * (torch.arange(23) % 2 == 0), 1e4], ids=["half", "all"])
def test_sparse_gradient_has_the_rows_with_active_entries(head, dtype, silent):
    tensors = example(dtype)
    tensors["bias"] -= silent
    leaves = watch(tensors)
    for flags in ({}, {"return_logits": True}):
        dense = gradients(weigh_all(head(**tensors, **flags)), leaves)
        sparse = gradients(weigh_all(head(**tensors, **flags, sparse_grad=True)), leaves)
        gradient = sparse["weight"]
        assert gradient.layout == torch.sparse_coo
        assert gradient.is_coalesced()
        active = head(**tensors).any(0) if not flags else torch.ones(23)
        assert torch.equal(gradient.indices()[0], active.nonzero()[:, 0])
        close({name: g.to_dense() for name, g in sparse.items()}, dense, 1e-2, 1e-6)


def at_entries(matrix, dense):
    """The numbers of ``dense`` at the entries of a CSR matrix."""
    places = matrix.detach().to_sparse_coo().indices().unbind()
    values = dense[places]
    return torch.sparse_csr_tensor(matrix.crow_indices(), places[1], values, matrix.shape)


OPTIONS = {
    "plain": {},
    "threshold": {"attention_mask": None, "threshold": 40.0},
    "nothing": {"threshold": 1e4},
    "all": {"softcap": 2.0, "activation": "log1p_relu", "threshold": torch.arange(23) / 20},
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@only(*PACKED, *TILES)
def test_csr_has_the_values_and_gradients_of_the_dense_activations(head, dtype, name):
    """The second text has no entries, where there is a gate; the third has no positions."""
    tensors = example(dtype, attention_mask=RAGGED * torch.tensor([[1], [1], [0]]))
    tensors = with_gate(tensors) if name == "all" else tensors
    if name == "all":
        tensors["gate"][1] = 0
    leaves, calls = watch(tensors), functools.partial(head, **(tensors | OPTIONS[name]))
    dense, sparse = calls(), calls(layout=torch.sparse_csr)
    assert torch.equal(sparse.to_dense(), dense)
    assert sparse.values().numel() == dense.count_nonzero() < dense.numel()
    upstream = torch.randn(dense.shape, dtype=dense.dtype)
    expected = gradients(dense, leaves, grad_outputs=upstream)
    for incoming in (at_entries(sparse, upstream), upstream):
        actual = gradients(sparse, leaves, grad_outputs=incoming, retain_graph=True)
        largest = max(each.abs().max().item() for each in expected.values())
        close(actual, expected, rtol=0, atol=8 * torch.finfo(dtype).eps * largest)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_csr_goes_with_sparse_grad_keeps_a_nan_and_takes_texts_without_positions():
    leaves = watch(example(torch.float32, attention_mask=None))
    options = {**CSR, "sparse_grad": True}
    leaves["hidden"].data[0, 0, 0] = torch.nan
    sparse = splade_head(**leaves, **options)
    assert sparse.to_dense().isnan().sum(1).tolist() == [23, 0, 0]
    assert gradients(sparse, leaves, grad_outputs=sparse.detach())["weight"].is_sparse
    assert splade_head(torch.ones(2, 0, 8), leaves["weight"], **options).values().numel() == 0


def test_csr_holds_no_dense_activations():
    vocab, options = 70_000, {"bias": torch.full((70_000,), -6.0), "layout": torch.sparse_csr}
    leaves = watch({"hidden": torch.randn(16, 1, 4), "weight": torch.randn(vocab, 4)})
    with Launches("cpu") as seen:
        sparse = splade_head(**leaves, **options)
        gradients(sparse, leaves, grad_outputs=sparse.detach())
    assert 0 < sparse.values().numel() < 16 * vocab / 50
    assert seen.largest < 16 * vocab / 2


def test_transforms_and_second_derivatives_of_csr_are_refused_with_a_sentence():
    tensors = example()
    csr = functools.partial(splade_head, **tensors, **CSR)
    with pytest.raises(ValueError, match="eager mode and impl="):
        torch.func.grad(lambda x: csr(weight=x).values().sum())(tensors["weight"])
    sparse = csr(weight=tensors["weight"].requires_grad_())
    with pytest.raises(NotImplementedError, match="expected create_graph=False with layout"):
        torch.autograd.grad(sparse, tensors["weight"], sparse.detach(), create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("more", [None, 0, 5])
def test_gradient_at_the_entries_is_the_dense_one(dtype, more):
    """Also with room for more entries than there are, as without a wait on an accelerator."""
    hidden, weight, *_ = example(dtype).values()
    upstream = torch.where(torch.rand(3, 23) < 0.2, torch.randn(3, 23), 1.0).to(dtype) - 1
    place = torch.randint(5, (3, 23), dtype=torch.uint8)
    both = [True, True]
    expected = head_tiles.dense_gradients(upstream, place, hidden, weight, None, dtype, both)
    size = -1 if more is None else int(upstream.count_nonzero()) + more
    entries = head_entries.entries_of(upstream, place, 5, size)
    actual = head_entries.gradients_at(entries, hidden, weight, both)
    torch.testing.assert_close(actual, expected)


@pytest.mark.cpu_only
def test_half_precision_is_multiplied_and_summed_in_fp32(head):
    _, logits = head(torch.tensor([[[6e4]]]).half(), torch.tensor([[100.0]]).half(), **WHOLE)
    assert logits.item() == 100 * torch.tensor(6e4).half().item()
    one = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    many = torch.ones(300, 1, dtype=torch.bfloat16)
    many_texts, many_tokens = head(many[:, None], one, bias), head(one[None], many)
    for out, leaves in ((many_texts, [one, bias]), (many_tokens, [one])):
        for gradient in torch.autograd.grad(out.sum(), leaves):
            assert gradient.item() == 150.0  # in bf16, 128 + 1/2 is 128


def test_layer_is_cast_to_the_dtype_of_autocast_except_on_the_cpu(monkeypatch):
    """With a stand-in for a tensor on a GPU, where the tests have none."""
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _as_layer(x).dtype == torch.float32
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float16)
    there = {"device": torch.device("cuda"), "to": lambda dtype: dtype}
    assert _as_layer(SimpleNamespace(**there, dtype=torch.float32)) == torch.float16
    assert _as_layer(SimpleNamespace(**there, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.cpu_only
def test_auto_is_packed_on_the_cpu_but_for_few_logits_and_tiles_elsewhere():
    small, large = example(torch.float32), example(torch.float32, vocab=(1 << 16) // 15 + 1)
    there = {name: x.to("meta") for name, x in small.items()}
    for inputs, expected in ((small, "definition"), (large, "packed"), (there, "tiles")):
        assert f'takes "{expected}"' in explain(splade_head, **inputs)
    assert 'takes "packed"' in explain(splade_head, **small, sparse_grad=True)


@pytest.mark.cpu_only
def test_what_it_cannot_take_is_refused_with_a_sentence():
    tensors = example(torch.float32) | {"attention_mask": None}
    for options, message in [
        ({"sparse_grad": True, "impl": "tiles"}, 'expected sparse_grad=False with impl="tiles"'),
        ({"sparse_grad": True, "impl": "definition"}, "expected sparse_grad=False with impl="),
        ({"hidden": torch.ones(3, 0, 8), "impl": "tiles"}, r"at least one position, got \[3, 0\]"),
        ({"impl": "torch"}, "'definition', 'packed', 'tiles', got 'torch'"),
        ({"gate": torch.full((3, 23), 1.5)}, r"expected `gate` in \[0, 1\], got .*1.5"),
        ({"gate": torch.full((3, 23), -0.25)}, r"expected `gate` in \[0, 1\], got .*-0.25"),
        ({"weight": torch.ones(0, 8), "bias": None}, "`weight` of at least one token, got V = 0"),
        ({"layout": torch.sparse_coo}, "`layout` to be one of torch"),
        ({**CSR, "return_logits": True}, "expected return_logits=False with layout="),
        ({**CSR, "impl": "definition"}, "eager mode and impl="),
    ]:
        with pytest.raises(ValueError, match=message):
            splade_head(**(tensors | options))


@pytest.mark.parametrize(
    ("flag", "backend", "dtype"),
    [("sparse_grad", "aot_eager", torch.float32), ("return_logits", "inductor", torch.bfloat16)],
)
def test_options_compile_into_one_graph(flag, backend, dtype):
    torch._dynamo.reset()
    tensors = with_gate(example(dtype))
    leaves = watch(tensors)
    out = torch.compile(splade_head, fullgraph=True, backend=backend)(**tensors, **{flag: True})
    expected = splade_head(**tensors, return_logits=flag == "return_logits")
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
    tensors = with_gate(example())
    for name in ("hidden", "weight"):
        tensors[name] = torch.randn_like(tensors[name]).float()
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
    with Launches("cpu") as seen:
        value = weigh_all(splade_head(**tensors, **flags, impl=impl))
        results = gradients(value, leaves, create_graph=order == 2)
        if order == 2:
            results = gradients(sum(x.square().sum() for x in results.values()), leaves)
    assert all(each.to_dense().any() for each in results.values())
    assert seen.largest >= batch * vocab
    assert (seen.largest >= batch * length * vocab / 2) == (impl == "definition")


NAN_AT = {  # and where the result has it: the third text attends to nothing
    "hidden": ((0, 2, 5), (0, slice(None))),
    "weight": ((9, 3), (slice(2), 9)),
    "bias": (9, (slice(2), 9)),
    "gate": (0, (0, slice(None))),
}


@pytest.mark.parametrize("where", NAN_AT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_shows_where_it_belongs_and_nowhere_else(head, where, dtype):
    tensors = example(dtype, gate=torch.ones(3, 23, dtype=dtype))
    tensors["attention_mask"] = RAGGED * torch.tensor([[1], [1], [0]])
    clean = head(**tensors), *head(**tensors, **WHOLE)
    index, shows = NAN_AT[where]
    tensors[where][index] = torch.nan
    hidden = watch(tensors, "hidden")["hidden"]
    expected = torch.zeros(3, 23, dtype=torch.bool)
    expected[shows] = True
    for out, before in zip((head(**tensors), *head(**tensors, **WHOLE)), clean, strict=True):
        assert torch.equal(out.isnan(), expected)
        assert torch.equal(out[~expected], before[~expected])
        if where == "hidden":
            (gradient,) = torch.autograd.grad(out[~expected].sum(), hidden, retain_graph=True)
            assert gradient[1:].isfinite().all()
            assert gradient[1].any()


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


@pytest.mark.parametrize("make", [nn.Parameter, torch.clone], ids=["parameter", "plain"])
def test_module_equals_the_function_also_copied_pickled_and_loaded(make):
    rest, expected = example(), EXACT(**example())
    module = SpladeHead(make(rest.pop("weight")), make(rest.pop("bias")), impl="definition")
    fresh = SpladeHead(make(torch.zeros(23, 8).double()), make(torch.zeros(23).double()))
    fresh.load_state_dict(module.state_dict())
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        assert type(twin.weight) is type(module.weight)
        torch.testing.assert_close(twin(**rest, **WHOLE), expected, rtol=1e-12, atol=0)
    sparse = fresh(**rest, layout=torch.sparse_csr)
    assert torch.equal(sparse.to_dense(), fresh(**rest))


def test_module_keeps_a_parameter_and_makes_a_plain_tensor_a_frozen_buffer():
    embedding = nn.Embedding(23, 8)
    module = SpladeHead(embedding.weight, torch.ones(23))
    assert dict(module.named_parameters()) == {"weight": embedding.weight}
    assert set(dict(module.named_buffers())) == {"bias"}
    module(embedding(torch.randint(0, 23, (2, 5)))).sum().backward()
    assert embedding.weight.grad.any()
    assert module.bias.grad is None
    twin = copy.deepcopy(nn.ModuleDict({"embedding": embedding, "head": module}))
    assert twin["head"].weight is twin["embedding"].weight is not embedding.weight
    assert twin.double()["head"](torch.ones(2, 3, 8).double()).dtype == torch.float64
