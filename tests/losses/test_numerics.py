"""Digits: easy rows keep them, hard rows keep their gradient, extremes stay finite.

The references are closed forms in float64 of the same rounded inputs, written here: the loss of a
row with one positive is ``log1p(sum_j exp(d_j))`` with ``d_j = (s_j - s_positive) / t``, in which
nothing cancels.
"""

import math

import pytest
import torch

import sparse_losses.functional as F

HALF = (torch.float16, torch.bfloat16)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
over_precisions = pytest.mark.parametrize("dtype", CLOSE, ids=str)


def pairs(cosine: float, dtype: torch.dtype, rows: int = 64, width: int = 384, seed: int = 0):
    """Return anchors and positives with about this cosine; the other rows are nearly orthogonal."""
    generator = torch.Generator().manual_seed(seed)
    anchor, noise = torch.randn(2, rows, width, generator=generator)
    anchor, noise = (torch.nn.functional.normalize(v) for v in (anchor, noise))
    positive = cosine * anchor + math.sqrt(1 - cosine**2) * noise
    return anchor.to(dtype).requires_grad_(), positive.to(dtype).requires_grad_()


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def odds(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """Loss of each row of a square score matrix whose positives are on the diagonal."""
    gaps = (scores - scores.diagonal()[:, None]) / temperature
    others = ~torch.eye(len(scores), dtype=torch.bool)
    return torch.log1p((gaps.exp() * others).sum(1))


def compare(loss, leaves, closed_form, tolerance) -> torch.Tensor:
    """Compare value and gradients with the closed form on the same rounded inputs."""
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    reference = closed_form(*exact)
    assert reference.item() != 0
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5, abs=0)
    expected = torch.autograd.grad(reference, exact)
    for gradient, truth in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert truth.norm() > 0
        assert (gradient.double() - truth).norm() <= tolerance * truth.norm()
    return reference


VARIANTS = {
    "plain": {},
    "identity_positive_mask": {"positive_mask": torch.eye(64)},
    "symmetric": {"symmetric": True},
    "definition": {"impl": "definition"},
    "symmetric_positive_mask": {"symmetric": True, "positive_mask": torch.eye(64)},
    "distinct_ids": {"positive_ids": torch.arange(64)},
}


@over_precisions
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize(("cosine", "temperature"), [(0.3, 0.05), (0.7, 0.05), (0.7, 0.02)])
def test_an_easy_row_of_info_nce_keeps_its_digits(dtype, options, cosine, temperature):
    a, p = pairs(cosine, dtype)

    def closed_form(a, p):
        scores = unit(a) @ unit(p).T
        rows = odds(scores, temperature)
        if options.get("symmetric"):
            rows = (rows + odds(scores.T, temperature)) / 2
        return rows.mean()

    loss = F.info_nce_loss(a, p, temperature=temperature, **options)
    reference = compare(loss, (a, p), closed_form, CLOSE[dtype])
    if (cosine, temperature) == (0.7, 0.02):
        assert reference < 1e-9  # far below what `softmax - onehot` can hold


@over_precisions
def test_a_decoupled_easy_row_keeps_its_digits(dtype):
    a, p = pairs(0.7, dtype)

    def closed_form(a, p):
        scores = unit(a) @ unit(p).T / 0.02
        others = scores.exp() * ~torch.eye(64, dtype=torch.bool)
        return -(scores.diagonal() - others.sum(1).log()).mean()

    loss = F.info_nce_loss(a, p, temperature=0.02, decoupled=True)
    compare(loss, (a, p), closed_form, CLOSE[dtype])


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_hard_row_at_a_low_temperature_keeps_its_loss_and_gradient(dtype, options):
    a, p = pairs(0.9, dtype)
    p = p.detach().roll(1, 0).requires_grad_()  # the hardest negative leads by 90 temperatures

    def closed_form(a, p):
        scores = unit(a) @ unit(p).T / 0.01
        sides = (scores, scores.T) if options.get("symmetric") else (scores,)
        cross_entropy = torch.nn.functional.cross_entropy
        return sum(cross_entropy(side, torch.arange(64)) for side in sides) / len(sides)

    loss = F.info_nce_loss(a, p, temperature=0.01, **options)
    assert 80 < compare(loss, (a, p), closed_form, 5e-3).item() < 100


@over_precisions
def test_an_easy_row_of_n_pair_keeps_its_digits(dtype):
    a, p = pairs(0.7, dtype)
    with torch.no_grad():
        a *= 6.0
        p *= 6.0

    loss = F.n_pair_loss(a, p)
    reference = compare(loss, (a, p), lambda a, p: odds(a @ p.T, 1.0).mean(), CLOSE[dtype])
    assert reference < 1e-6


LARGE_SCORES = {
    "one": {},
    "several": {"positives": 3},
    "decoupled": {"decoupled": True},
    "several_decoupled": {"positives": 3, "decoupled": True},
}


@pytest.mark.parametrize("options", LARGE_SCORES.values(), ids=LARGE_SCORES)
@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize("size", [1e3, 1e5, 1e7])
def test_large_scores_that_differ_little_keep_their_digits(size, spread, options):
    torch.manual_seed(0)
    scores = size + spread * torch.randn(8, 16)
    options, mask = dict(options), torch.eye(8, 16, dtype=torch.bool)
    for shift in range(1, options.pop("positives", 1)):
        mask |= mask.roll(3 * shift, 1)
    leaf, exact = scores.requires_grad_(), scores.detach().double().requires_grad_()
    value, expected = (F.info_nce_from_scores(x, mask, **options) for x in (leaf, exact))
    assert value.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    (gradient,), (wanted,) = torch.autograd.grad(value, leaf), torch.autograd.grad(expected, exact)
    assert (gradient.double() - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("impl", ["definition", "direct", "blocks", "nonzeros"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-9])
def test_a_batch_of_equal_vectors_has_the_value_and_gradient_of_equal_scores(
    temperature, symmetric, impl
):
    a, p = (torch.full((8, 16), 0.5, requires_grad=True) for _ in range(2))
    loss = F.info_nce_loss(a, p, temperature=temperature, symmetric=symmetric, impl=impl)
    assert loss.item() == pytest.approx(math.log(8), rel=1e-6)
    for gradient in torch.autograd.grad(loss, (a, p)):
        # A unit in the last place of the sum of a row's probabilities, over the temperature.
        assert gradient.abs().max() <= 1e-7 / temperature


def test_n_pair_of_large_dots_keeps_the_digits_of_cross_entropy():
    torch.manual_seed(0)
    a, p = torch.full((8, 1), 300.0), 300 + torch.randint(-3, 4, (8, 1)) / 256
    a, p = a.requires_grad_(), p.requires_grad_()  # the dots are exact
    expected = torch.nn.functional.cross_entropy(a @ p.T, torch.arange(8))
    torch.testing.assert_close(F.n_pair_loss(a, p), expected, rtol=1e-6, atol=0)
    wanted = torch.autograd.grad(expected, p)
    torch.testing.assert_close(
        torch.autograd.grad(F.n_pair_loss(a, p), p), wanted, rtol=1e-5, atol=1e-6
    )


@over_precisions
@pytest.mark.parametrize("eps", [0.0, 1e-30])
def test_an_easy_row_of_nws_in_softmax_form_keeps_its_digits(dtype, eps):
    a, p = pairs(0.7, dtype)
    labels = torch.eye(64, dtype=torch.long)
    loss = F.nws_loss(a, labels, p, None, temperature=0.02, decoupled=False, eps=eps)

    def closed_form(a, p):
        return odds(unit(a) @ unit(p).T, 0.02).mean()

    compare(loss, (a, p), closed_form, CLOSE[dtype])


def _softmax_losses(a, p, temperature):
    eye = torch.eye(len(a), dtype=torch.long)
    yield F.info_nce_loss(a, p, temperature=temperature)
    yield F.info_nce_loss(a, p, temperature=temperature, symmetric=True)
    yield F.info_nce_loss(a, p, temperature=temperature, impl="definition")
    yield F.info_nce_loss(a, p, temperature=temperature, decoupled=True)
    yield F.info_nce_loss(a, p, temperature=temperature, positive_mask=eye + eye.roll(1, 0))
    yield F.nws_loss(a, eye, p, None, temperature=temperature)
    yield F.nws_loss(a, eye, p, None, temperature=temperature, decoupled=False)
    yield F.nws_loss(a, eye, p, eye.float(), temperature=temperature, key=p.flip(0), key_labels=eye)
    yield F.distillation_loss(a, p, temperature=temperature)


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("index", range(8))
def test_extreme_temperatures_stay_finite_and_close(dtype, temperature, index):
    a, p = pairs(0.5, dtype, rows=8, width=16)
    loss = list(_softmax_losses(a, p, temperature))[index]
    exact = [leaf.detach().double().requires_grad_() for leaf in (a, p)]
    reference = list(_softmax_losses(*exact, temperature))[index]
    assert torch.isfinite(loss)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-3, abs=1e-3)
    gradients = torch.autograd.grad(loss, (a, p), allow_unused=True)
    expected = torch.autograd.grad(reference, exact, allow_unused=True)
    assert expected[0].any()
    for gradient, truth in zip(gradients, expected, strict=True):
        if truth is not None:
            assert torch.isfinite(gradient).all()
            # 1e-4 turns a rounding of 1e-7 in a cosine into 1e-3 of a logit
            assert (gradient.double() - truth).norm() <= 2e-2 * truth.norm() + 1e-6


# ------------------------------------------------------------------------------------------------
# Large vocabularies


def _large(vocab: int, dtype: torch.dtype, batch: int = 4):
    x = (torch.rand(batch, vocab) * 4).to(dtype)
    ids = torch.randint(0, vocab, (batch, 32))
    weight = torch.rand(vocab) * 100
    mask = torch.ones_like(ids)
    calls = {
        "flops": lambda x, w: F.flops_loss(x),
        "flops_unbiased": lambda x, w: F.flops_loss(x, estimator="unbiased"),
        "idf_flops": lambda x, w: F.idf_flops_loss(x, w),
        "language_penalty": lambda x, w: F.language_penalty_loss(x, w),
        "self_reconstruction": lambda x, w: F.self_reconstruction_loss(x, ids, mask),
        "self_reconstruction_balanced": lambda x, w: F.self_reconstruction_loss(
            x, ids, mask, balanced=True
        ),
        "positive_activation": lambda x, w: F.positive_activation_loss(x, ids, mask, w),
        "min_activation": lambda x, w: F.min_activation_loss(x, threshold=10.0),
        "info_nce_dot": lambda x, w: F.info_nce_loss(x, x.flip(0), similarity="dot", temperature=1),
        "info_nce": lambda x, w: F.info_nce_loss(x, x.roll(1, 1)),
        "triplet_euclidean": lambda x, w: F.triplet_margin_loss(
            x, x.flip(0), x.roll(1, 1), similarity="euclidean", margin=1e7
        ),
        "pairwise_contrastive": lambda x, w: F.pairwise_contrastive_loss(
            x, x.flip(0), torch.ones(batch)
        ),
    }
    return x, weight, calls


@pytest.mark.parametrize("vocab", [30_522, 250_002])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_large_vocabularies_stay_finite_and_close(vocab, dtype):
    x, weight, calls = _large(vocab, dtype)
    for name, call in calls.items():
        leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        loss, reference = call(leaf, weight), call(exact, weight.double())
        assert loss.dtype == torch.float32, name
        assert reference.item() != 0, name
        # the difference of two fp32 sums of 250,000 products keeps fewer digits than each
        digits = 1e-3 if name == "info_nce_dot" else 1e-4
        assert loss.item() == pytest.approx(reference.item(), rel=digits), name
        loss.backward()
        reference.backward()
        assert torch.isfinite(leaf.grad).all(), name
        error = (leaf.grad.double() - exact.grad).norm() / exact.grad.norm()
        # a gradient below the smallest half number is the caller's: loss scaling exists for it
        if not (dtype == torch.float16 and exact.grad.abs().max() < 1e-4):
            assert error <= 2 * torch.finfo(dtype).eps + 1e-4, (name, error)


# ------------------------------------------------------------------------------------------------
# Cosines of zero, tiny and huge rows


COSINE_LOSSES = {
    "info_nce": lambda a, p: F.info_nce_loss(a, p, reduction="none"),
    "info_nce_symmetric": lambda a, p: F.info_nce_loss(a, p, symmetric=True, reduction="none"),
    "info_nce_direct": lambda a, p: F.info_nce_loss(a, p, impl="direct", reduction="sum"),
    "triplet": lambda a, p: F.triplet_margin_loss(a, p, p.roll(1, 0), margin=3, reduction="none"),
    "nws": lambda a, p: F.nws_loss(
        a, torch.eye(len(a), dtype=torch.long), p, None, reduction="none"
    ),
}
over_cosines = pytest.mark.parametrize("call", COSINE_LOSSES.values(), ids=COSINE_LOSSES.keys())


@over_cosines
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
def test_a_zero_row_has_similarity_zero_and_gradient_zero(call, dtype):
    a, p = pairs(0.5, dtype, rows=6, width=8)
    with torch.no_grad():
        a[2] = 0
        p[4] = 0
    rows = call(a, p)
    rows.sum().backward()
    assert torch.isfinite(rows).all()
    for leaf, zero in ((a, 2), (p, 4)):
        assert torch.isfinite(leaf.grad).all()
        assert not leaf.grad[zero].any()
        assert leaf.grad[0].any()
    with torch.no_grad():  # similarity 0: as a vector orthogonal to all
        wide = [torch.cat([v.detach(), torch.zeros(6, 2, dtype=dtype)], 1) for v in (a, p)]
        wide[0][2, -1] = 1
        wide[1][4, -2] = 1
        torch.testing.assert_close(rows.detach(), call(*wide), rtol=1e-4, atol=1e-5)


@over_cosines
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 1e-30),
        (torch.float32, 1e-38),
        (torch.float32, 1e30),
        (torch.float32, 1e38),
        (torch.float64, 1e-300),
        (torch.float64, 1e300),
        (torch.bfloat16, 1e-30),
        (torch.bfloat16, 1e38),
        (torch.float16, 6e4),
        (torch.float16, 6e-8),  # the smallest
    ],
    ids=str,
)
def test_tiny_and_huge_rows_have_the_right_similarity(call, dtype, scale):
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-1, 2, (6, 8), generator=generator).to(dtype)
    a[:, 0] = 1
    p = a.roll(1, 1) + a
    p[:, 3] = 0.5
    p = p / 2
    expected = call(a, p)
    tiny = a.clone()
    tiny[2] *= scale
    tiny.requires_grad_()
    rows = call(tiny, p)
    rows.sum().backward()
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(tiny.grad[[0, 1, 3, 4, 5]]).all()
    assert tiny.grad[0].any()
    gradient = tiny.grad[2].double()
    reference = a.clone().requires_grad_()
    call(reference, p).sum().backward()
    expected_gradient = reference.grad[2].double() / scale
    representable = expected_gradient.abs().max() < torch.finfo(dtype).max / 4
    if representable:  # the gradient of a cosine is of degree -1
        assert torch.isfinite(gradient).all()
        tolerance = 1e-4 + 4 * torch.finfo(dtype).eps
        error = (gradient - expected_gradient) / expected_gradient.abs().max().clamp(min=1e-300)
        tiny_normal = torch.finfo(dtype).tiny * 1e3
        if expected_gradient.abs().max() > tiny_normal:
            assert error.abs().max() <= tolerance
    assert not gradient.isnan().any()


# ------------------------------------------------------------------------------------------------
# Large logits and small probabilities elsewhere


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_raw_dots_of_half_vectors_do_not_overflow(dtype):
    a = torch.full((3, 64), 60.0, dtype=dtype)
    p = a.clone()
    p[1] -= 1.0  # dots of 230,400 and 226,560
    loss = F.info_nce_loss(a.requires_grad_(), p, similarity="dot", temperature=1.0)
    loss.backward()
    gap = 64 * 60.0
    assert loss.item() == pytest.approx((2 * math.log(2) + gap + math.log(2)) / 3, rel=1e-3)
    assert torch.isfinite(a.grad).all()


def test_self_reconstruction_keeps_the_digits_of_an_easy_token():
    x = torch.tensor([[30.0, -30.0]], requires_grad=True)
    loss = F.self_reconstruction_loss(x, torch.tensor([[0]]), torch.ones(1, 1))
    loss.backward()
    expected = math.log1p(math.exp(-30.0))
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=0)
    assert x.grad.tolist()[0] == pytest.approx([-expected / 2, expected / 2], rel=1e-4, abs=0)


def test_saturating_activation_keeps_the_digits_of_an_easy_token():
    x = torch.tensor([[30.0, -30.0]], requires_grad=True)
    loss = F.positive_activation_loss(x, torch.tensor([[0]]), torch.ones(1, 1), saturating=True)
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(-30.0), rel=1e-5, abs=0)
    assert x.grad[0, 0].item() == pytest.approx(-math.exp(-30.0), rel=1e-4, abs=0)


def test_equal_positives_with_large_scores_keep_the_digits_of_their_loss():
    """``(top - score) + excess``: the other order rounds ``excess`` to the digits of the score."""
    scores = torch.tensor([[-65504.0, -65504.0, -1e9]])
    positive = torch.tensor([[True, True, False]])
    loss = F.info_nce_from_scores(scores, positive)
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)


def test_the_temperature_has_a_gradient_beside_a_row_that_is_nearly_nothing():
    """That of the row itself is infinite: its length is below the smallest normal number."""
    anchor = torch.tensor([[1e-40, 0.0, 2e-40]], requires_grad=True)
    positive = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])[:1]
    negative = torch.tensor([[0.0, 3.0, 0.0], [2.0, 0.0, 2.0]])
    found = []
    for impl in ("definition", "nonzeros"):
        temperature = torch.tensor(0.3, requires_grad=True)
        loss = 1e5 * F.info_nce_loss(anchor, positive, negative, temperature=temperature, impl=impl)
        found.append(torch.autograd.grad(loss, temperature)[0])
    assert found[0].isfinite()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=0)
