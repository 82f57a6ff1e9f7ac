"""The head's kernel, in Triton's interpreter: against loops over the formula, against PyTorch.

Tiles are made so small that every text straddles one.
"""

import functools
import importlib.util
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from sparse_losses.functional import splade_head
from sparse_losses.representation import head as head_module
from tests.representation import head_oracle

kernel = pytest.importorskip("sparse_losses.fast.triton_head", exc_type=ImportError)


def sample(dtype):
    """What `tools.compile_kernels` compiles: the real inner sizes, few rows."""
    hidden = torch.randn(4, 40, 768).to(dtype).requires_grad_()
    weight = (torch.randn(600, 768) * 0.02).to(dtype).requires_grad_()
    bias = torch.zeros(600, dtype=dtype, requires_grad=True)
    gate = torch.rand(4, 600).to(dtype).requires_grad_()
    mask = torch.ones(4, 40)
    mask[1:, 30:] = 0
    for options in ({}, {"gate": gate, "return_logits": True}):
        out = splade_head(hidden, weight, bias, mask, impl="triton", **options)
        out = out if isinstance(out, tuple) else (out,)
        sum(o.sum() for o in out).backward()


@pytest.fixture
def tiles(monkeypatch):
    """Make every tile tiny, and one program serve all texts."""
    for name in ("LARGE", "SMALL", "FULL_PRECISION"):
        monkeypatch.setattr(kernel, name, (16, 16, 16, 4, 1))
    for name in ("CHUNK", "ENTRIES", "WIDTH", "POSITIONS", "FULL_PRECISION_WIDTH", "OWN_WIDTH"):
        monkeypatch.setattr(kernel, name, 16)
    for name, value in (("PROGRAMS", 1), ("OWN_ROWS", 4), ("TEXTS", 2)):
        monkeypatch.setattr(kernel, name, value)


def _inputs(seed=0, sizes=(4, 19, 21, 24), dtype=torch.float32, empty=2):
    batch, length, vocab, width = sizes
    rng = np.random.default_rng(seed)
    arrays = {
        "hidden": head_oracle.grid(rng, (batch, length, width)),
        "weight": head_oracle.grid(rng, (vocab, width)),
        "bias": head_oracle.grid(rng, (vocab,)) * 8,
        "gate": rng.integers(0, 5, (batch, vocab)) / 4,
        "mask": rng.random((batch, length)) < 0.5,
    }
    if empty is not None:
        arrays["mask"][empty] = False
    tensors = {
        name: torch.tensor(x, dtype=dtype).requires_grad_()
        for name, x in arrays.items()
        if name != "mask"
    }
    return arrays, tensors, torch.tensor(arrays["mask"])


def _run(tensors, mask, impl, gated, return_logits, upstream):
    inputs = [tensors[k] for k in ("hidden", "weight", "bias")]
    gate = tensors["gate"] if gated else None
    options = {"gate": gate, "return_logits": return_logits, "impl": impl}
    found = splade_head(*inputs, mask, **options)
    found = found if return_logits else (found,)
    wanted = [*inputs, *([gate] if gated else [])]
    value = sum((f * u.to(f.dtype)).sum() for f, u in zip(found, upstream, strict=False))
    return [f.detach() for f in found], torch.autograd.grad(value, wanted)


def _close(found, wanted, rtol=1e-5, atol=1e-5):
    """Compare outputs and gradients of two calls of `_run`."""
    for one, other in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("gated", "return_logits"), [(False, False), (True, True)])
@pytest.mark.parametrize("programs", [1, 1 << 20], ids=["one for all texts", "one a text"])
def test_value_and_gradients_are_the_formula(tiles, programs, gated, return_logits, monkeypatch):
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    arrays, tensors, mask = _inputs()
    rng = np.random.default_rng(1)
    shape = arrays["gate"].shape
    upstream = [rng.standard_normal(shape), rng.standard_normal(shape)]
    found, gradients = _run(
        tensors, mask, "triton", gated, return_logits, [torch.tensor(u) for u in upstream]
    )
    assert head_oracle.is_exact(arrays["hidden"], arrays["weight"], 2.0**-12)
    gate = arrays["gate"] if gated else None
    parts = arrays["hidden"], arrays["weight"], arrays["bias"], arrays["mask"], gate
    logits = head_oracle.logits(*parts)
    wanted = [head_oracle.activations(logits), logits]
    for one, other in zip(found, wanted, strict=False):
        np.testing.assert_allclose(one.numpy(), other, rtol=3e-7, atol=0)
    wanted = head_oracle.gradients(*parts, upstream[0], upstream[1] if return_logits else None)
    names = ["hidden", "weight", "bias", *(["gate"] if gated else [])]
    for name, gradient in zip(names, gradients, strict=True):
        scale = np.abs(wanted[name]).max()
        np.testing.assert_allclose(
            gradient.numpy(), wanted[name], rtol=1e-5, atol=2e-6 * scale, err_msg=name
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_half_precision_is_as_near_as_pytorch(tiles, dtype, gated):
    _, tensors, mask = _inputs(sizes=(3, 9, 20, 16), dtype=dtype)
    upstream = [torch.randn(3, 20), torch.randn(3, 20)]
    found = _run(tensors, mask, "triton", gated, True, upstream)
    eager = _run(tensors, mask, "packed", gated, True, upstream)
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    exact = _run(exact, mask, "packed", gated, True, upstream)
    for ours, theirs, true in zip(*((*a, *b) for a, b in (found, eager, exact)), strict=True):
        assert ours.dtype == theirs.dtype
        allowed = (theirs - true).norm() + 2.0**-8 * true.norm()  # casts are cut off here
        assert (ours - true).norm() <= allowed


def test_log1p_keeps_the_digits_of_a_small_logit():
    small = torch.tensor([1e-30, 1e-9, 3e-8, 1e-4, 0.1, 1.0, 3.0, 1e20, torch.inf])
    weight = small[:, None].clone()
    found = splade_head(torch.ones(1, 1, 1), weight, impl="triton")[0]
    torch.testing.assert_close(found, small.double().log1p().float(), rtol=3e-7, atol=0)


@pytest.mark.parametrize("length", [1, 257])
def test_the_last_position_is_told_from_the_first_and_of_equals_the_first_attended_wins(
    tiles, length
):
    hidden = torch.zeros(1, length, 1)
    hidden[0, -1] = 1.0
    same = torch.ones(2, length, 1)
    mask = torch.ones(2, length)
    mask[0, : length // 2] = 0
    for states, attended, places in (
        (hidden, None, [length - 1]),
        (same, mask, [length // 2, 0]),
    ):
        states.requires_grad_()
        splade_head(states, torch.ones(1, 1), None, attended, impl="triton").sum().backward()
        assert states.grad[..., 0].nonzero()[:, 1].tolist() == places


@pytest.mark.parametrize("where", ["state", "weight", "bias", "gate", "masked", "infinite", "-inf"])
def test_a_nan_shows_where_it_belongs_and_nowhere_else(tiles, where):
    _, tensors, mask = _inputs(sizes=(4, 18, 20, 16), empty=None)
    mask[1, 3], mask[1, 4] = True, False
    with torch.no_grad():
        if where == "state":
            tensors["hidden"][1, 3, 2] = torch.nan
        elif where == "masked":
            tensors["hidden"][1, 4] = torch.nan
        elif where == "infinite":  # inf - inf
            tensors["hidden"][1, 3, :2] = torch.tensor([torch.inf, -torch.inf])
            tensors["weight"].abs_()
        elif where == "-inf":  # a forbidden token: 0 times its logit would be NaN in the gate
            tensors["bias"][3] = -torch.inf
            tensors["gate"].clamp_(min=0.25)
        else:
            index = (1, 5) if where == "gate" else (5, 2) if where == "weight" else 5
            tensors[where][index] = torch.nan
    upstream = [torch.randn(4, 20), torch.randn(4, 20)]
    logits = where != "-inf"
    found = _run(tensors, mask, "triton", True, logits, upstream)
    wanted = _run(tensors, mask, "packed", True, logits, upstream)
    if where == "weight":  # 0 times NaN: of a text's hidden states all get it, not one
        has, should = found[1][0].isnan(), wanted[1][0].isnan()
        assert has[should].all()
        assert not (has & ~should)[..., [0, 1, *range(3, 16)]].any()
        found[1][0].copy_(wanted[1][0])
    _close(found, wanted)
    assert any(x.isnan().any() for x in found[0]) == (where not in ("masked", "-inf"))


@pytest.mark.parametrize("return_logits", [False, True])
def test_a_text_without_tokens_hides_its_nan(tiles, return_logits):
    _, tensors, mask = _inputs(sizes=(4, 18, 20, 16), empty=2)
    upstream = [torch.randn(4, 20), torch.randn(4, 20)]
    wanted = _run(tensors, mask, "triton", True, return_logits, upstream)
    with torch.no_grad():
        tensors["gate"][2] = torch.nan
        tensors["hidden"][2] = torch.nan
    for x in upstream:
        x[2] = torch.nan
    found = _run(tensors, mask, "triton", True, return_logits, upstream)
    _close(found, wanted, 0, 0)


def test_every_output_is_written(tiles, monkeypatch):
    """Memory as it comes may hold anything: here it holds what would show."""
    _, tensors, mask = _inputs()
    upstream = [torch.randn(4, 21), torch.randn(4, 21)]
    wanted = _run(tensors, mask, "packed", True, True, upstream)

    def poisoned(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            x = function(*args, **kwargs)
            return x.fill_(torch.nan if x.is_floating_point() else 99)

        return wrapper

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    found = _run(tensors, mask, "triton", True, True, upstream)
    _close(found, wanted)


def test_two_runs_give_the_same_bits(tiles):
    _, tensors, mask = _inputs(sizes=(3, 9, 20, 16), dtype=torch.bfloat16)
    upstream = [torch.randn(3, 20)]
    _close(*(_run(tensors, mask, "triton", False, False, upstream) for _ in range(2)), 0, 0)


def test_strides_and_expanded_gradients(tiles):
    _, tensors, mask = _inputs(sizes=(3, 9, 20, 12))
    strided = {
        "hidden": tensors["hidden"].detach().transpose(0, 1).contiguous().transpose(0, 1),
        "weight": tensors["weight"].detach().T.contiguous().T,
        "bias": tensors["bias"].detach().repeat_interleave(2)[::2],
        "gate": tensors["gate"].detach().T.contiguous().T,
    }
    strided = {name: x.requires_grad_() for name, x in strided.items()}
    for upstream in (
        torch.ones(()).expand(3, 20),
        torch.randn(20, 3).T,
        torch.randn(20).expand(3, 20),
    ):
        wanted = _run(tensors, mask, "packed", True, True, [upstream] * 2)
        found = _run(strided, mask, "triton", True, True, [upstream] * 2)
        _close(found, wanted)


@pytest.mark.parametrize("width", [1, 7, 8])
def test_rows_that_no_copy_engine_takes(width):
    """It wants 16 bytes; a weight may begin anywhere, and have any width."""
    weight = torch.randn(5 * width + 1)[1:].view(5, width)
    hidden = torch.randn(2, 3, width)
    wanted = splade_head(hidden, weight, impl="packed")
    torch.testing.assert_close(splade_head(hidden, weight, impl="triton"), wanted)


def test_the_flops_gradient_of_one_row_is_read_as_one_row():
    """Its gradient is expanded, which no kernel needs written out."""
    seen = []
    backward = kernel._strided
    try:
        kernel._strided = lambda x: seen.append(x) or backward(x)
        _, tensors, mask = _inputs(sizes=(3, 5, 20, 8))
        x = splade_head(tensors["hidden"], tensors["weight"], None, mask, impl="triton")
        x.sum(0).square().sum().backward()
    finally:
        kernel._strided = backward
    assert seen[0].stride(0) == 0


@pytest.mark.parametrize("gated", [False, True])
def test_second_derivatives_are_those_of_pytorch(gated):
    _, tensors, mask = _inputs(sizes=(3, 5, 9, 8))
    wanted = ["hidden", "weight", "bias", *(["gate"] if gated else [])]
    found = []
    for impl in ("packed", "triton"):
        leaves = [tensors[name] for name in wanted]
        gate = tensors["gate"] if gated else None
        options = {"gate": gate, "return_logits": True, "impl": impl}
        x, logits = splade_head(*leaves[:3], mask, **options)
        value = x.square().sum() + logits.square().sum()
        gradients = torch.autograd.grad(value, leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_it_compiles_into_one_graph():
    _, tensors, mask = _inputs(sizes=(3, 5, 20, 8))

    def value(hidden, weight, bias, gate):
        options = {"gate": gate, "return_logits": True, "impl": "triton"}
        return sum(x.square().sum() for x in splade_head(hidden, weight, bias, mask, **options))

    compiled = torch.compile(value, fullgraph=True, backend="aot_eager")
    leaves = list(tensors.values())[:4]
    wanted = torch.autograd.grad(value(*leaves), leaves)
    for one, other in zip(torch.autograd.grad(compiled(*leaves), leaves), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_the_operators_keep_their_word():
    _, tensors, mask = _inputs(sizes=(2, 3, 5, 8), empty=None)
    inputs = [tensors[k].detach() for k in ("hidden", "weight", "bias", "gate")]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernel.forward, (*inputs, mask, True), test_utils=checks)
    activations, _, logits, position = kernel.forward(*inputs, mask, True)
    upstream = torch.randn(2, 5)
    arguments = [True] * 4, upstream, None, *inputs, activations, logits, position, mask
    torch.library.opcheck(kernel.backward, arguments, test_utils=checks)


def test_mixed_dtypes_multiply_in_the_wider():
    _, tensors, _ = _inputs(sizes=(3, 5, 20, 8))
    weight = tensors["weight"].detach().bfloat16().requires_grad_()
    for hidden, other in ((tensors["hidden"], weight), (weight[None, :6], tensors["weight"])):
        some = torch.ones(hidden.shape[:2])
        wanted = splade_head(hidden, other, None, some, impl="packed")
        found = splade_head(hidden, other, None, some, impl="triton")
        torch.testing.assert_close(found, wanted)
        (gradient,) = torch.autograd.grad(found.sum(), other)
        assert gradient.dtype == other.dtype


def test_what_the_kernel_cannot_do_is_said(monkeypatch):
    hidden, weight = torch.randn(2, 3, 4), torch.randn(5, 4)

    def says(words, *arguments, **options):
        with pytest.raises(ValueError, match=words):
            splade_head(*arguments, impl="triton", **options)

    says(r"expected sparse_grad=False with impl=\"triton\"", hidden, weight, sparse_grad=True)
    says(r"fp32, fp16 or bf16 tensors, got torch\.float64", hidden.double(), weight)
    says("expected at least one position", hidden[:0], weight)
    with pytest.raises(ValueError, match=r"expected no torch\.func transform"):
        torch.vmap(lambda w: splade_head(hidden, w, impl="triton"))(weight.expand(2, 5, 4))
    monkeypatch.setattr(head_module, "_IS_INTERPRETED", False)
    says(r"compute capability 8\.0 or newer, got cpu", hidden.cpu(), weight.cpu())
    monkeypatch.setattr(head_module, "_HAS_TRITON", False)
    says(r"pip install 'sparse-losses\[kernels\]'", hidden, weight)


def test_an_older_triton_is_as_good_as_none(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("triton", tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert not head_module._has_triton()  # of PyTorch 2.6, say
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "tensor_descriptor.py").touch()
    assert head_module._has_triton()


def test_the_extra_that_the_error_names_exists():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert extras["kernels"][0].startswith("triton")
