"""InfoNCE by its kernels: the numbers of the PyTorch path, whatever the tiles and the chunks."""

import itertools

import numpy as np
import pytest
import torch

from sparse_losses import InfoNCELoss
from sparse_losses.functional import info_nce_loss
from sparse_losses.kernels import info_nce as kernels
from tests import oracles

B, D, N = 11, 21, 9
IDS = torch.arange(B) // 2 * 2


@pytest.fixture
def _small(monkeypatch):
    """Tiles that even these shapes fill several of, sums in several parts."""
    for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "READ_M", "READ_N", "COLUMN_BLOCK", "DIM_BLOCK"):
        monkeypatch.setattr(kernels, name, 8 if name[-1] in "MN" else 16)
    monkeypatch.setattr(kernels, "ROW_BLOCK", 4)
    monkeypatch.setattr(kernels, "FEWEST_COLUMNS", 5)


pytestmark = pytest.mark.usefixtures("_small")


def sample(dtype):
    """Every kernel at a real width, few rows: what `tools.compile_kernels` compiles."""
    ids = torch.arange(300)
    for options in (
        {},
        {"symmetric": True},
        {"similarity": "dot", "positive_ids": ids},
        {"symmetric": True, "decoupled": True},
        {"symmetric": True, "positive_ids": ids},
    ):
        leaves = [torch.randn(300, 768).to(dtype).requires_grad_() for _ in range(3)]
        if "symmetric" in options:
            leaves.pop()
        temperature = torch.tensor(0.05, requires_grad=True)
        loss = info_nce_loss(*leaves, temperature=temperature, impl="triton", **options)
        loss.backward()


def inputs(dtype=torch.float32, negatives=0, scale=1.0, batch=B):
    generator = torch.Generator().manual_seed(0)
    sizes = (batch, batch, negatives)[: 3 if negatives else 2]
    return [(torch.randn(n, D, generator=generator) * scale).to(dtype) for n in sizes]


def run(tensors, impl="triton", temperature=0.2, upstream=1.0, **options):
    """Value and gradients, the temperature's last."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    dtype = torch.float64 if leaves[0].dtype == torch.float64 else torch.float32
    leaves.append(torch.tensor(temperature, dtype=dtype, requires_grad=True))
    *data, t = leaves
    value = info_nce_loss(*data, temperature=t, impl=impl, **options)
    return [value.detach(), *torch.autograd.grad(value * upstream, leaves)]


def exact(tensors, **options):
    return run([x.double() for x in tensors], impl="torch", **options)


def error(found, wanted):
    errors = [
        (f.double() - w).abs().max() / w.abs().max().clamp(min=1e-300)
        for f, w in zip(found, wanted, strict=True)
    ]
    return torch.stack(errors).max().item()  # Python's maximum may leave out a NaN


EVERY = [
    dict(zip(("similarity", "symmetric", "decoupled", "positive_ids"), values, strict=True))
    for values in itertools.product(("cosine", "dot"), (False, True), (False, True), (None, IDS))
]


@pytest.mark.parametrize("options", EVERY, ids=str)
@pytest.mark.parametrize("negatives", [0, N])
def test_every_option_is_that_of_the_pytorch_path(options, negatives):
    if options["decoupled"] and options["positive_ids"] is not None and not negatives:
        pytest.skip("may leave a row without a negative")
    options = {**options, "temperature": 0.2 if options["similarity"] == "cosine" else 4.0}
    tensors = inputs(negatives=negatives)
    assert error(run(tensors, chunk_size=7, **options), exact(tensors, **options)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_half_precision_rounds_gradients_alone(dtype, similarity, symmetric):
    tensors = inputs(dtype)
    options = {"similarity": similarity, "symmetric": symmetric, "temperature": 1.0}
    found = run(tensors, chunk_size=8, **options)
    wanted = exact(tensors, **options)
    assert error(found, wanted) < {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    # The value and the temperature's gradient meet no half precision.
    assert error([found[0], found[-1]], [wanted[0], wanted[-1]]) < 3e-6
    assert all(f.dtype == x.dtype for f, x in zip(found[1:], tensors, strict=False))


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_value_is_the_formula(symmetric):
    anchor, positive = inputs()
    found = info_nce_loss(anchor, positive, symmetric=symmetric, impl="triton")
    wanted = oracles.info_nce(
        anchor.double().numpy(), positive.double().numpy(), temperature=0.07, symmetric=symmetric
    )
    assert found.item() == pytest.approx(float(np.mean(wanted[0])), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
def test_easy_rows_keep_their_digits(dtype, symmetric):
    anchor, _ = inputs(dtype)
    positive = (anchor.float() + 0.1 * inputs()[1]).to(dtype)
    digits = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    options = {"temperature": 0.02, "symmetric": symmetric, "reduction": "sum", "chunk_size": 8}
    # fp16 gradients of 1e-15 need the scaler that such a training has.
    options["upstream"] = 2.0**40
    found, wanted = run([anchor, positive], **options), exact([anchor, positive], **options)
    assert 0 < wanted[0] < 1e-8
    assert error(found, wanted) < digits


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("temperature", [1 / 75, 1 / 82, 1 / 87])
def test_rows_that_are_all_solved_have_a_finite_gradient_in_fp16(symmetric, temperature):
    """Their factors, 1e-33 and less, are lifted into fp16's range: not beyond that of fp32."""
    anchor = torch.eye(4, 8, dtype=torch.float16)
    options = {"temperature": temperature, "symmetric": symmetric, "upstream": 2.0**110}
    found, wanted = run([anchor, anchor], **options), exact([anchor, anchor], **options)
    assert error(found, wanted) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
def test_negatives_may_be_none(dtype, symmetric):
    tensors = inputs(dtype)
    wanted = run(tensors, symmetric=symmetric)
    found = run([*tensors, tensors[0][:0]], symmetric=symmetric)
    assert found.pop(3).shape == (0, D)
    assert error(found, wanted) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tiles_far_apart_are_brought_to_one_offset(dtype):
    """Scores that rise along the columns by hundreds: no tile can use the first one's reference."""
    anchor, positive, negative = inputs(dtype, N)
    anchor[:] = anchor[:1]
    rise = torch.arange(1, B + 1)[:, None] / B
    positive = (anchor * rise).to(dtype)
    options = {"similarity": "dot", "temperature": 0.1, "chunk_size": 5}
    tensors = [anchor, positive, negative]
    digits = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    found, wanted = run(tensors, **options), exact(tensors, **options)
    # The negatives' gradient is 1e-100.
    del found[3], wanted[3]
    assert error(found, wanted) < digits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("power", [-100, 100])
def test_cosine_does_not_see_the_length(dtype, power):
    tensors = inputs(dtype)
    stretched = [tensors[0] * 2.0**power, tensors[1] * 2.0**-power]
    found, wanted = run(stretched), run(tensors)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1] * 2.0**power, wanted[1])
    assert torch.equal(found[2] * 2.0**-power, wanted[2])
    assert wanted[1].any()


@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"positive_ids": IDS}], ids=str)
def test_zero_rows_have_no_similarity_and_no_gradient(options):
    tensors = inputs()
    tensors[0][2] = tensors[1][5] = 0.0
    found, wanted = run(tensors, **options), exact(tensors, **options)
    assert error(found, wanted) < 2e-6
    assert not found[1][2].any()
    assert not found[2][5].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_nan_in_nan_out(bad, where):
    tensors = inputs(negatives=N)
    tensors[where][3, 1] = bad
    assert run(tensors)[0].isnan()
    if where < 2:
        assert run(tensors[:2], symmetric=True)[0].isnan()


def test_inputs_need_not_be_contiguous():
    tensors = inputs(negatives=N)
    strided = [x.T.contiguous().T for x in tensors]
    for found, wanted in zip(run(strided), run(tensors), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("symmetric", [False, True])
def test_twice_the_same_bits_and_nothing_unwritten(symmetric, monkeypatch):
    wanted = run(inputs(torch.bfloat16), symmetric=symmetric, chunk_size=8)
    empty = torch.empty

    def poisoned(*size, **options):
        return empty(*size, **options).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: empty(
        x.shape, dtype=options.get("dtype", x.dtype)).fill_(torch.nan))  # fmt: skip
    found = run(inputs(torch.bfloat16), symmetric=symmetric, chunk_size=8)
    assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("symmetric", [False, True])
def test_only_what_is_needed(symmetric):
    anchor, positive = inputs()
    wanted = run([anchor, positive], symmetric=symmetric)
    value = info_nce_loss(anchor, positive, temperature=0.2, symmetric=symmetric, impl="triton")
    torch.testing.assert_close(value, wanted[0])
    for number in range(2):
        leaves = [anchor, positive]
        leaves[number] = leaves[number].clone().requires_grad_()
        info_nce_loss(*leaves, temperature=0.2, symmetric=symmetric, impl="triton").backward()
        torch.testing.assert_close(leaves[number].grad, wanted[1 + number])


def test_second_derivatives():
    def of_gradient(impl):
        leaves = [x[:5].clone().requires_grad_() for x in inputs()]
        value = info_nce_loss(*leaves, temperature=0.5, impl=impl)
        gradients = torch.autograd.grad(value, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)

    for found, wanted in zip(of_gradient("triton"), of_gradient("torch"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_compiles_whole(dtype):
    def value(anchor, positive, temperature):
        return 3 * info_nce_loss(anchor, positive, temperature=temperature, impl="triton")

    compiled = torch.compile(value, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_() for x in inputs(dtype)]
    leaves.append(torch.tensor(0.2, requires_grad=True))
    compiled(*leaves).backward()
    wanted = run(inputs(dtype), upstream=3.0)
    for leaf, w in zip(leaves, wanted[1:], strict=True):
        # Scaled before it is rounded, or after.
        torch.testing.assert_close(leaf.grad, w, rtol=2.0**-6, atol=0)


def test_a_compiled_kernel_says_that_it_has_no_second_derivative():
    def value(anchor, positive):
        return info_nce_loss(anchor, positive, impl="triton")

    compiled = torch.compile(value, fullgraph=True, backend="eager")
    anchor, positive = (x.requires_grad_() for x in inputs())
    (gradient,) = torch.autograd.grad(compiled(anchor, positive), anchor)
    assert gradient.any()
    with pytest.raises(RuntimeError, match="expected first derivatives alone"):
        torch.autograd.grad(compiled(anchor, positive), anchor, create_graph=True)


def test_the_operator_is_sound():
    anchor, positive, negative = inputs(torch.float16, N)
    given = [True, False, True, True], True, False, False, 8, True, 0
    tensors = anchor.requires_grad_(), positive, negative, torch.tensor(0.2), IDS
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.sparse_losses.info_nce, (*tensors, *given), test_utils=tests)


def test_autocast_changes_nothing():
    tensors = inputs()
    wanted = run(tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(tensors)
    assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


def test_mixed_precision_is_computed_in_fp32():
    anchor, positive = inputs()
    found = run([anchor, positive.bfloat16()])
    wanted = run([anchor, positive.bfloat16().float()])
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize(
    ("missing", "options"),
    [
        ("in_batch=True", {"in_batch": False, "negative": torch.ones(N, D)}),
        ("no `positive_mask`", {"positive_mask": torch.eye(B)}),
        ("a `reduction`", {"reduction": "none"}),
        ("no negatives per row", {"negative": torch.ones(B, 2, D)}),
        ("a negative in every row", {"decoupled": True, "positive_ids": IDS}),
        ("sparse=False", {"sparse": True}),
        ("a `temperature` on the device", {"temperature": torch.tensor(0.2, device="meta")}),
    ],
)
def test_what_it_cannot_do_is_said(missing, options):
    with pytest.raises(ValueError, match=f'expected {missing}.* with impl="triton"'):
        info_nce_loss(*inputs(), impl="triton", **options)


def test_the_module_hands_it_on():
    loss = InfoNCELoss(impl="triton", temperature=0.2)
    assert "impl='triton'" in repr(loss)
    tensors = inputs()
    assert torch.equal(loss(*tensors), info_nce_loss(*tensors, temperature=0.2, impl="triton"))
