"""NWS in Triton: against its formula, against PyTorch, and at its edges."""

import pytest
import torch

import sparse_losses
from sparse_losses.functional import nws_loss
from sparse_losses.kernels import nws as kernel
from tests import oracles

OPTIONS = (
    {},
    {"decoupled": False},
    {"eps": 0.0},
    {"eps": 0.0, "decoupled": False},
    {"eps": 0.3, "alpha": 0.5, "beta": 2.0},
    {"eps": 2.0, "alpha": 3.0, "beta": 0.5, "decoupled": False, "reduction": "sum"},
    {"alpha": 0.0, "beta": 0.0},
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INSTANCES = ("key", "key_labels", "queue", "queue_labels", "queue_mask")


def problem(dtype, batch=7, keys=5, rows=9, labels=6, width=10, density=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def features(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    def hot(rows):
        return torch.rand(rows, labels, generator=generator) < density

    half = torch.rand(labels, labels, generator=generator)
    return {
        "query": features(batch, width),
        "query_labels": hot(batch),
        "prototype": features(labels, width),
        "label_similarity": (half + half.T) / 2,
        "key": features(keys, width),
        "key_labels": hot(keys).float(),
        "queue": features(rows, width),
        "queue_labels": hot(rows).long(),
        "queue_mask": torch.rand(rows, generator=generator) < 0.7,
        "temperature": torch.tensor(0.3),
    }


def follow(inputs, impl="triton", **options):
    """The value and the gradients by query, prototype and temperature."""
    names = ("query", "prototype", "temperature")
    leaves = [inputs[name].clone().requires_grad_() for name in names]
    value = nws_loss(**{**inputs, **dict(zip(names, leaves, strict=True))}, impl=impl, **options)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def exactly(inputs, **options):
    """The same by PyTorch in double precision."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return follow(wide, "torch", **options)


def sample(dtype):
    """A step at the width that encoders have, and one of labels and features that are wider."""
    inputs = problem(dtype, batch=130, keys=130, rows=257, labels=512, width=256, density=0.01)
    follow(inputs)
    follow(inputs, decoupled=False)
    follow(problem(dtype, labels=768, width=768))


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles and parts where a GPU would have one."""
    for name in vars(kernel):
        if name.startswith("TILE_"):
            monkeypatch.setattr(kernel, name, 16)
    monkeypatch.setattr(kernel, "INNER", 16)
    monkeypatch.setattr(kernel, "PROGRAMS", 6)


def agree(found, wanted, plain=None):
    """Equal but for rounding: of single precision, and of what is stored in half."""
    for actual, expected, ordinary in zip(found, wanted, plain or found, strict=True):
        rounding = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(actual.dtype, 3e-6)
        error = (actual.double() - expected).norm()
        allowed = rounding * expected.norm() + 1e-6
        assert error <= allowed + (ordinary.double() - expected).norm(), (error, expected.norm())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_is_the_formula(options, small_tiles):
    inputs = problem(torch.float32, batch=19, keys=18, rows=23)
    arrays = {k: v.numpy() for k, v in inputs.items() if k != "temperature"}
    reduction = options.get("reduction", "mean")
    settings = {"temperature": 0.3, **{k: v for k, v in options.items() if k != "reduction"}}
    wanted = oracles.reduce_rows(*oracles.nws(**arrays, **settings), reduction)
    found = nws_loss(**{**inputs, **settings}, reduction=reduction, impl="triton")
    assert found.item() == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_and_gradients_are_those_of_pytorch(dtype, options):
    inputs = problem(dtype)
    wanted = exactly(inputs, **options)
    assert wanted[0] != 0
    agree(follow(inputs, **options), wanted, follow(inputs, "torch", **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("references", ["prototypes", "key", "queue", "unmasked"])
def test_any_references(options, references, small_tiles):
    inputs = problem(torch.float32, batch=19, keys=33, rows=47, labels=21, width=20, density=0.2)
    if references == "unmasked":
        del inputs["queue_mask"]
    for name in INSTANCES:
        if references == "prototypes" or (references != "unmasked" and references not in name):
            inputs.pop(name, None)
    agree(follow(inputs, **options), exactly(inputs, **options))


def test_wide_rows_and_many_labels(monkeypatch):
    for name in vars(kernel):
        if name.startswith("MOST_"):
            monkeypatch.setattr(kernel, name, 64)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = problem(dtype, labels=150, width=140, density=0.05)
        agree(follow(inputs), exactly(inputs), follow(inputs, "torch"))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("temperature", [0.02, 1e4])
@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-8])
def test_an_easy_row_keeps_its_digits(temperature, eps, decoupled):
    inputs = problem(torch.float32, batch=4, labels=4, width=8, seed=3)
    for name in INSTANCES:
        del inputs[name]
    inputs["query_labels"] = torch.eye(4, dtype=torch.bool)
    inputs["query"] = inputs["prototype"] + 0.1 * inputs["query"]
    inputs["temperature"] = torch.tensor(temperature)
    options = {"eps": eps, "decoupled": decoupled}
    found, wanted = follow(inputs, **options), exactly(inputs, **options)
    assert found[0] != 0
    for actual, expected in list(zip(found, wanted, strict=True))[:3]:
        assert (actual.double() - expected).norm() <= 2e-4 * expected.norm() + 1e-30


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e38])
def test_the_length_of_a_row_does_not_matter(size):
    inputs = problem(torch.float32)
    plain = follow(inputs)
    for name in ("query", "prototype", "key", "queue"):
        largest = inputs[name].abs().amax()
        inputs[name] = inputs[name] / largest * size
    scaled = follow(inputs)
    torch.testing.assert_close(scaled[0], plain[0], rtol=1e-5, atol=0)
    assert scaled[1].isfinite().all()


def test_zero_rows_are_like_nothing():
    inputs = problem(torch.float32)
    for name in ("query", "prototype", "key", "queue"):
        inputs[name][1] = 0.0
    found = follow(inputs)
    agree(found, exactly(inputs))
    assert not found[1][1].any()
    assert not found[2][1].any()


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_equal_references_share_a_gradient(options):
    """The first of those that score highest takes the floor's part, as in PyTorch."""
    inputs = problem(torch.float32)
    inputs["prototype"] = inputs["prototype"][:1].expand(6, -1).clone()
    inputs["key"] = inputs["prototype"][:5].clone()
    found, wanted = follow(inputs, **options), exactly(inputs, **options)
    agree(found[:2], wanted[:2])
    torch.testing.assert_close(found[2].sum(0).double(), wanted[2].sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's of infinities
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_a_mask_hides_a_nan_and_nothing_else_does(options):
    inputs = problem(torch.float32)
    inputs["query_labels"][:, 0] = True
    inputs["query_labels"][:, 1] = False
    inputs["query_labels"][4] = False
    plain = follow(inputs, **options)
    spoilt = {k: v.clone() for k, v in inputs.items()}
    spoilt["query"][4] = torch.nan
    spoilt["queue"][~inputs["queue_mask"]] = torch.nan
    hidden = follow(spoilt, **options)
    for actual, expected in zip(hidden, plain, strict=True):
        assert torch.equal(actual, expected)
    assert not hidden[1][4].any()
    filled = inputs["queue_mask"].int().argmax()
    for bad in (torch.nan, torch.inf):
        for name, row in (("query", 1), ("key", 0), ("queue", filled), ("prototype", 3)):
            spoilt = {**inputs, name: inputs[name].clone()}
            spoilt[name][row, 2] = bad
            found = follow(spoilt, **options)
            assert found[0].isnan(), name
            assert found[1][1].isnan().any(), name


@pytest.mark.parametrize("decoupled", [True, False])
def test_rows_that_are_not_valid_hide_every_nan(decoupled):
    inputs = problem(torch.float32)
    for name in ("query_labels", "key_labels", "queue_labels"):
        inputs[name] = torch.full_like(inputs[name], decoupled)
    for name in ("query", "prototype", "key"):
        inputs[name] = torch.full_like(inputs[name], torch.nan)
    for tensor in follow(inputs, eps=0.0, decoupled=decoupled):
        assert not tensor.any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16])
def test_labels_of_any_type_and_strides(dtype):
    inputs = problem(torch.float32)
    wanted = follow(inputs)
    for name in ("query", "prototype", "key", "queue"):
        inputs[name] = inputs[name].repeat_interleave(2, 1).T.contiguous().T[:, ::2]
        assert not inputs[name].is_contiguous()
    for name in ("query_labels", "key_labels", "queue_labels"):
        inputs[name] = inputs[name].to(dtype).T.contiguous().T
    inputs["queue_mask"] = inputs["queue_mask"].to(dtype).repeat_interleave(3)[::3]
    for actual, expected in zip(follow(inputs), wanted, strict=True):
        assert torch.equal(actual, expected)


def test_mixed_types_are_computed_in_the_widest():
    inputs = problem(torch.bfloat16)
    inputs["prototype"] = inputs["prototype"].float()
    inputs["queue"] = inputs["queue"].half()
    found = follow(inputs)
    assert found[1].dtype == torch.bfloat16
    assert found[2].dtype == torch.float32
    agree(found, exactly(inputs), follow(inputs, "torch"))


def test_the_same_bits_twice_and_no_number_is_left_unwritten(monkeypatch, small_tiles):
    inputs = problem(torch.float32, batch=19, keys=33, rows=20)
    first = follow(inputs)
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *shape, **options):
        found = new_empty(self, *shape, **options)
        if found.dtype == torch.bool:  # the interpreter's own
            return found
        bad = torch.nan if found.is_floating_point() else torch.iinfo(found.dtype).max
        return found.fill_(bad)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    for actual, expected in zip(follow(inputs), first, strict=True):
        assert torch.equal(actual, expected)


def test_what_is_not_needed_is_not_there():
    inputs = problem(torch.float32)
    full = follow(inputs)
    names = ("query", "prototype", "temperature")
    for name, expected in zip(names, full[1:], strict=True):
        leaf = inputs[name].clone().requires_grad_()
        value = nws_loss(**{**inputs, name: leaf}, impl="triton")
        (found,) = torch.autograd.grad(3 * value, leaf)
        torch.testing.assert_close(found, 3 * expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(nws_loss(**inputs, impl="triton"), full[0])
    inputs["temperature"] = 0.3
    assert torch.equal(nws_loss(**inputs, impl="triton"), full[0])


def test_second_derivatives():
    inputs = problem(torch.float32)

    def second(impl):
        query = inputs["query"].clone().requires_grad_()
        value = nws_loss(**{**inputs, "query": query}, impl=impl)
        (slope,) = torch.autograd.grad(value, query, create_graph=True)
        return torch.autograd.grad(slope.square().sum() + value, query)[0]

    torch.testing.assert_close(second("triton"), second("torch"), rtol=1e-4, atol=1e-6)
    assert second("torch").any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_in_one_graph(dtype):
    inputs = problem(dtype)
    loss = sparse_losses.NWSLoss(inputs.pop("label_similarity"), temperature=0.3, impl="triton")
    del inputs["temperature"]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for function in (loss, compiled):
        leaves = {n: inputs[n].clone().requires_grad_() for n in ("query", "prototype")}
        value = function(**{**inputs, **leaves})
        (2 * value).backward()
        results.append([value.detach(), *(leaf.grad for leaf in leaves.values())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=2e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-6
        )


def test_the_operator_is_one(small_tiles):
    inputs = list(problem(torch.float32).values())
    arguments = [inputs[0], inputs[2], inputs[-1], inputs[1], *inputs[3:-1]]
    settings = [[True, True, True], 1.0, 1.0, True, 1e-8, "mean"]
    torch.library.opcheck(
        kernel._nws, (*arguments, *settings), test_utils=("test_schema", "test_faketensor")
    )
    settings[0] = [False, True, False]
    torch.library.opcheck(
        kernel._nws, (*arguments, *settings), test_utils=("test_schema", "test_faketensor")
    )


def test_autocast_changes_nothing():
    inputs = problem(torch.float32)
    plain = follow(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        for actual, expected in zip(follow(inputs), plain, strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aggregation": "max"}, '`aggregation` to be "mean"'),
        ({"reduction": "none"}, '`reduction` to be "mean" or "sum"'),
        ({"query": torch.zeros(0, 10), "query_labels": torch.zeros(0, 6)}, "queries with features"),
        ({"query": torch.zeros(7, 10).double()}, "fp32, fp16 or bf16 tensors"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_do_is_said(change, message, monkeypatch):
    inputs = {**problem(torch.float32), **change}
    with pytest.raises(ValueError, match=message):
        nws_loss(**inputs, impl="triton")
    monkeypatch.setattr("sparse_losses.kernels.is_ahead", lambda *_: True)
    assert torch.equal(nws_loss(**inputs), nws_loss(**inputs, impl="torch"))


def test_a_temperature_elsewhere_is_refused():
    inputs = {**problem(torch.float32), "temperature": torch.tensor(0.3, device="meta")}
    with pytest.raises(ValueError, match="a `temperature` on the device of `query`"):
        nws_loss(**inputs, impl="triton")


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="impl"):
        nws_loss(**problem(torch.float32), impl="cuda")
    with pytest.raises(ValueError, match="impl"):
        sparse_losses.NWSLoss(None, impl="cuda")


def test_a_split_of_the_references_changes_rounding_alone(monkeypatch, small_tiles):
    """And fewer queries, more splits: each says the same of its rows."""
    inputs = problem(torch.float32, batch=19, keys=40, rows=30)
    found = []
    for programs in (1, 50):
        monkeypatch.setattr(kernel, "PROGRAMS", programs)
        found.append(follow(inputs))
    for other in found[1:]:
        for actual, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert found[0][0].isfinite()


def test_where_terms_would_overflow_the_value_is_a_distance_over_the_temperature():
    inputs = problem(torch.float32)
    inputs["temperature"] = torch.tensor(1e-3)
    found, wanted = follow(inputs, eps=0.0), exactly(inputs, eps=0.0)
    assert found[0].item() == pytest.approx(wanted[0].item(), rel=1e-4)
    assert wanted[0].abs() > 100


def test_fp16_gradients_wait_for_their_scaler():
    generator = torch.Generator().manual_seed(0)
    query, prototype = torch.randn(2, 4, 8, generator=generator).half()
    found = []
    for impl in ("triton", "torch"):
        leaves = [x.clone().requires_grad_() for x in (query, prototype)]
        loss = nws_loss(leaves[0], torch.eye(4), leaves[1], None, temperature=1e5, impl=impl)
        loss.backward(torch.tensor(2.0**16))
        found.append([leaf.grad for leaf in leaves])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-7)


@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_easy_rows_keep_the_gradient_that_the_floor_leaves(eps):
    """The floor follows the highest score: what the two send there cancels but for little."""
    generator = torch.Generator().manual_seed(0)
    prototype = torch.randn(3, 16, generator=generator)
    query = prototype[:2] + 0.3 * torch.randn(2, 16, generator=generator)
    labels, found = torch.eye(3)[:2], []
    for impl, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaf = query.to(dtype, copy=True).requires_grad_()
        options = {"temperature": 0.02, "decoupled": False, "eps": eps, "impl": impl}
        nws_loss(leaf, labels, prototype.to(dtype), None, **options).backward()
        found.append(leaf.grad.double())
    ours, exact = found
    assert 0 < exact.abs().max() < 1e-10
    assert (ours - exact).abs().max() < 1e-2 * exact.abs().max()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16], ids=str
)
def test_labels_are_0_and_1_of_any_dtype(dtype):
    inputs = problem(torch.float32, batch=3, keys=3, rows=4)
    wanted = follow(inputs)
    for name in ("query_labels", "key_labels", "queue_labels"):
        inputs[name] = inputs[name].to(dtype)
    for one, other in zip(follow(inputs), wanted, strict=True):
        assert torch.equal(one, other)
