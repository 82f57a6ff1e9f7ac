"""Digits: easy rows keep them, hard rows keep their gradient, extremes stay finite.

The references are closed forms in float64 of the same rounded inputs, written here: the loss of a
row with one positive is ``log1p(sum_j exp(d_j))`` with ``d_j = (s_j - s_positive) / t``, in which
nothing cancels.
"""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparse_losses.functional as F
from tests import cases
from tests.cases import CASES, FIRST, B
from tests.instruments import assert_keeps_digits, in_double, value_and_gradients
from tests.strategies import MAGNITUDES, seeds

HALF = (torch.float16, torch.bfloat16)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
over_precisions = pytest.mark.parametrize("dtype", CLOSE, ids=str)


def pairs(cosine: float, dtype: torch.dtype, rows: int = 64, width: int = 384, seed: int = 0):
    """Return anchors and positives with about this cosine; the other rows are nearly orthogonal."""
    generator = torch.Generator().manual_seed(seed)
    anchor, noise = torch.randn(2, rows, width, generator=generator)
    anchor, noise = (torch.nn.functional.normalize(v) for v in (anchor, noise))
    positive = cosine * anchor + math.sqrt(1 - cosine**2) * noise
    return anchor.to(dtype), positive.to(dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def odds(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """Loss of each row of a square score matrix whose positives are on the diagonal."""
    gaps = (scores - scores.diagonal()[:, None]) / temperature
    others = ~torch.eye(len(scores), dtype=torch.bool)
    return torch.log1p((gaps.exp() * others).sum(1))


VARIANTS = {
    "plain": {},
    "identity_positive_mask": {"positive_mask": torch.eye(64)},
    "symmetric": {"symmetric": True},
    "definition": {"impl": "definition"},
    "symmetric_positive_mask": {"symmetric": True, "positive_mask": torch.eye(64)},
    "distinct_ids": {"positive_ids": torch.arange(64)},
}


def cosine_odds(a, p, temperature, symmetric=False, **_):
    scores = unit(a) @ unit(p).T
    rows = odds(scores, temperature)
    return (rows.mean() + odds(scores.T, temperature).mean()) / 2 if symmetric else rows.mean()


def _decoupled_odds(a, p, temperature):
    scores = unit(a) @ unit(p).T / temperature
    others = scores.exp() * ~torch.eye(64, dtype=torch.bool)
    return -(scores.diagonal() - others.sum(1).log()).mean()


def _nws(a, p, temperature, eps=0.0):
    labels = torch.eye(64, dtype=torch.long)
    return F.nws_loss(a, labels, p, None, temperature=temperature, decoupled=False, eps=eps)


EASY = {  # the loss, and its closed form
    name: (partial(F.info_nce_loss, **options), partial(cosine_odds, **options))
    for name, options in VARIANTS.items()
} | {
    "decoupled": (partial(F.info_nce_loss, decoupled=True), _decoupled_odds),
    "n_pair": (
        lambda a, p, temperature: F.n_pair_loss(4 * a, 8 * p),
        lambda a, p, temperature: odds(32 * a @ p.T, 1.0).mean(),
    ),
    "nws": (_nws, cosine_odds),
    "nws_eps": (partial(_nws, eps=1e-30), cosine_odds),
}


@over_precisions
@pytest.mark.parametrize("name", EASY)
@pytest.mark.parametrize(("cosine", "temperature"), [(0.3, 0.05), (0.7, 0.02)])
def test_an_easy_row_keeps_its_digits(dtype, name, cosine, temperature):
    loss, exact = (partial(f, temperature=temperature) for f in EASY[name])
    digits = {"of_value": 1e-5, "of_gradients": CLOSE[dtype], "exact": exact}
    reference = assert_keeps_digits(loss, *pairs(cosine, dtype), **digits)
    if name in VARIANTS and cosine == 0.7:
        assert reference < 1e-9  # far below what `softmax - onehot` can hold


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_hard_row_at_a_low_temperature_keeps_its_loss_and_gradient(dtype, options):
    a, p = pairs(0.9, dtype)

    def closed_form(a, p):
        scores = unit(a) @ unit(p).T / 0.01
        sides = (scores, scores.T) if options.get("symmetric") else (scores,)
        cross_entropy = torch.nn.functional.cross_entropy
        return sum(cross_entropy(side, torch.arange(64)) for side in sides) / len(sides)

    loss = partial(F.info_nce_loss, temperature=0.01, **options)
    digits = {"of_value": 1e-5, "of_gradients": 5e-3, "exact": closed_form}
    # The hardest negative leads by 90 temperatures.
    assert 80 < assert_keeps_digits(loss, a, p.roll(1, 0), **digits) < 100


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("positives", [1, 3])
@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize("size", [1e3, 1e5, 1e7])
def test_large_scores_that_differ_little_keep_their_digits(size, spread, positives, decoupled):
    torch.manual_seed(0)
    scores = size + spread * torch.randn(8, 16)
    mask = torch.eye(8, 16, dtype=torch.bool)
    for shift in range(1, positives):
        mask |= mask.roll(3 * shift, 1)
    call = partial(F.info_nce_from_scores, positive_mask=mask, decoupled=decoupled)
    assert_keeps_digits(call, scores, of_value=1e-6, of_gradients=1e-6, absolute=1e-6)


@pytest.mark.parametrize("impl", ["definition", "direct", "blocks", "nonzeros"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-9])
def test_a_batch_of_equal_vectors_has_the_value_and_gradient_of_equal_scores(
    temperature, symmetric, impl
):
    options = {"temperature": temperature, "symmetric": symmetric, "impl": impl}
    loss, *gradients = value_and_gradients(
        lambda a, p: F.info_nce_loss(a, p, **options), *torch.full((2, 8, 16), 0.5)
    )
    assert loss.item() == pytest.approx(math.log(8), rel=1e-6)
    for gradient in gradients:
        # A unit in the last place of the sum of a row's probabilities, over the temperature.
        assert gradient.abs().max() <= 1e-7 / temperature


TEMPERED = [case for case in CASES if "temperature" in case.loss.hyperparameters]


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("case", TEMPERED, ids=lambda case: case.id)
def test_extreme_temperatures_stay_finite_and_close(dtype, temperature, case):
    tensors = case.tensors(dtype=dtype)
    leaves = {name: tensors.pop(name) for name in case.differentiable}

    def call(*values):
        values = dict(zip(leaves, values, strict=True))
        return case.function()(**tensors | values, temperature=temperature)

    # 1e-4 turns a rounding of 1e-7 in a cosine into 1e-3 of a logit
    digits = {"of_value": 1e-3, "of_gradients": 2e-2, "absolute": 1e-6}
    assert_keeps_digits(call, *leaves.values(), **digits)


LARGE = [stem for stem, case in FIRST.items() if case.loss.those("csr")]
LARGE += ["self_reconstruction", "masked_logit_mse", "triplet_margin", "pairwise_contrastive"]


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("stem", LARGE)
def test_large_vocabularies_stay_finite_and_close(stem, dtype, monkeypatch):
    case = FIRST[stem]
    leaf = case.differentiable[0]
    monkeypatch.setattr(cases, "V", 250_002)
    monkeypatch.setattr(cases, "D", 250_002)
    tensors = case.tensors(dtype=dtype)

    def call(x):
        return case.function()(**tensors | {leaf: x})

    loss, gradient = value_and_gradients(call, tensors[leaf])
    reference, truth = in_double(call, tensors[leaf])
    assert reference != 0
    # The difference of two fp32 sums of 250,000 products keeps fewer digits than each.
    assert loss.item() == pytest.approx(reference.item(), rel=1e-3 if stem == "n_pair" else 1e-4)
    assert gradient.isfinite().all()
    error = (gradient.double() - truth).norm() / truth.norm()
    # A gradient below the smallest half number is the caller's: loss scaling exists for it.
    is_tiny = dtype == torch.float16 and truth.abs().max() < 1e-4
    assert is_tiny or error <= 2 * torch.finfo(dtype).eps + 1e-4


@pytest.mark.parametrize(
    ("call", "expected", "other"),  # of a row of a token and another
    [
        (F.self_reconstruction_loss, math.log1p(math.exp(-30.0)), 0.5),
        (partial(F.positive_activation_loss, saturating=True), math.exp(-30.0), 0.0),
    ],
)
def test_an_easy_token_keeps_its_digits(call, expected, other):
    loss, gradient = value_and_gradients(
        lambda x: call(x, torch.tensor([[0]]), torch.ones(1, 1)), torch.tensor([[30.0, -30.0]])
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=0)
    slopes = [-expected * (1 - other), expected * other]
    assert gradient.tolist()[0] == pytest.approx(slopes, rel=1e-4, abs=0)


def test_the_temperature_has_a_gradient_beside_a_row_that_is_nearly_nothing():
    """That of the row itself is infinite: its length is below the smallest normal number."""
    anchor = torch.tensor([[1e-40, 0.0, 2e-40]], requires_grad=True)
    others = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 3.0, 0.0], [2.0, 0.0, 2.0]])
    results = []
    for impl in ("definition", "nonzeros"):
        temperature = torch.tensor(0.3, requires_grad=True)
        loss = 1e5 * F.info_nce_loss(anchor, *others, temperature=temperature, impl=impl)
        results.append(torch.autograd.grad(loss, temperature)[0])
    assert results[0].isfinite()
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=0)


# Cosines do not see a magnitude; temperatures are those of the table.
ANY_MAGNITUDE = {
    "triplet_margin": ("anchor", "positive", "negative"),
    "nws": ("query", "prototype"),
    "positive_activation": ("activations",),
}
IMPLS = ("definition", *FIRST["info_nce"].implementations)
ANY_MAGNITUDE |= {f"info_nce {impl}": ("anchor", "positive") for impl in IMPLS}


@pytest.mark.parametrize("name", ANY_MAGNITUDE)
@given(seed=seeds, data=st.data())
def test_rows_of_any_magnitude_in_fp32_are_as_in_fp64(name, seed, data):
    names, (stem, *impl) = ANY_MAGNITUDE[name], name.split()
    case = FIRST[stem]
    tensors = case.tensors(seed=seed, dtype=torch.float32)
    some = []
    for each in names:
        scales = st.lists(st.sampled_from((0.0, *MAGNITUDES)), min_size=B, max_size=B)
        some.append(tensors[each] * torch.tensor(data.draw(scales, label=each))[:, None])
    if stem == "positive_activation":  # whose sum may cancel
        some[0] = some[0].abs()

    def call(*some):
        some = [x.to_sparse_csr() for x in some] if impl == ["nonzeros"] else some
        options = dict(zip(names, some, strict=True)) | ({"impl": impl[0]} if impl else {})
        return case.function()(**tensors | options)

    value, *gradients = value_and_gradients(call, *some)
    expected, *wanted = in_double(call, *some)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    for each, gradient, truth in zip(names, gradients, wanted, strict=True):
        size = truth.abs().amax(-1, keepdim=True)  # what a row's sums are made of
        assert ((gradient.double() - truth).abs() <= 1e-4 * size + 1e-37).all(), each
