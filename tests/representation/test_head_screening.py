"""Screening by bf16 products finds every active entry and the very arg-max of fp32.

Most inputs lie on a grid where every fp32 dot product is exact in any order (`head_oracle`): the
oracle, screened and unscreened must agree on each sign and each position. Random problems are in
`test_head`, where the screened head is one of the ways.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_losses.fast import head as fast_head
from sparse_losses.fast.head import _packed_logits, packed_head
from sparse_losses.fast.sparse import csr
from tests.representation import head_oracle as oracle


def run(tensors: dict, screening: bool | None, tile: int | None = 7) -> dict:
    """Return the activations and all gradients, every entry weighed differently."""
    leaves = {
        name: tensor.detach().clone().requires_grad_()
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_floating_point()
    }
    given = tensors | leaves
    mask = given.get("attention_mask")
    arguments = [
        *(given[name] for name in ("hidden", "weight")),
        None if given.get("bias") is None else given["bias"].float(),
        None if mask is None else mask != 0,
        None if given.get("gate") is None else given["gate"].float(),
    ]
    out, _ = packed_head(*arguments, dtype=torch.float32, screen=screening, tile=tile)
    upstream = torch.linspace(0.5, 1.5, out.numel()).reshape(out.shape)
    found = torch.autograd.grad(out, list(leaves.values()), upstream)
    return {"out": out.detach(), **dict(zip(leaves, found, strict=True))}


def tensors_of(arrays: dict, dtype=torch.float32) -> dict:
    tensors = {}
    for name, array in arrays.items():
        tensor = None if array is None else torch.from_numpy(np.array(array))
        floating = tensor is not None and tensor.is_floating_point()
        tensors[name] = tensor.to(dtype) if floating else tensor
        if floating:
            assert np.array_equal(tensors[name].double().numpy(), array), "the numbers are exact"
    return tensors


def check(arrays: dict, dtype=torch.float32, gradients: bool = True) -> np.ndarray:
    """Insist that screened is the oracle: supports, values, arg-maxima; return the activations."""
    names = ("hidden", "weight", "bias", "attention_mask", "gate")
    given = [arrays.get(name) for name in names]
    pooled = oracle.logits(*given)
    expected = oracle.activations(pooled)
    found = run(tensors_of(arrays, dtype), True)
    actual = found["out"].double().numpy()
    np.testing.assert_array_equal(actual > 0, expected > 0)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=0.0)
    if gradients:
        upstream = np.linspace(0.5, 1.5, expected.size).reshape(expected.shape)
        wanted = oracle.gradients(*given, upstream)
        eps = max(torch.finfo(dtype).eps, 1e-5)
        of_bias = 0.0 if arrays.get("bias") is None else np.abs(arrays["bias"]).max()
        width = np.shape(arrays["weight"])[1]
        sizes = {  # of the terms that a gradient sums: what cancels leaves their rounding
            "hidden": np.abs(arrays["weight"]).max(0),
            "weight": np.abs(arrays["hidden"]).reshape(-1, width).max(0),
            "bias": 1.0,
            "gate": np.abs(oracle.maxima(*given[:2], given[3])[0]).max() + of_bias,
        }
        for name in found.keys() - {"out"}:
            gradient, reference = found[name].double().numpy(), wanted[name]
            slack = eps * np.abs(reference) + eps * sizes[name]
            assert (np.abs(gradient - reference) <= slack).all(), name
            if name == "hidden":
                np.testing.assert_array_equal(gradient.any(-1), reference.any(-1))
    return actual


def agree(tensors: dict, gradients: bool = True) -> torch.Tensor:
    """Insist that screened is unscreened; return the activations."""
    screened, unscreened = run(tensors, True), run(tensors, False)
    actual, expected = screened["out"], unscreened["out"]
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    if gradients:
        for name in screened:
            size = unscreened[name].abs().max().item() if unscreened[name].numel() else 0.0
            torch.testing.assert_close(
                screened[name], unscreened[name], rtol=1e-5, atol=1e-5 * size, msg=name
            )
    return actual


class Dtypes(TorchDispatchMode):
    """Remember which dtypes large results have."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.sparse_losses.head_packed.default:
            with self:  # look inside
                return _packed_logits(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim == 2:
            self.seen.add((out.dtype, tuple(out.shape)))
        return out


@pytest.mark.parametrize("screening", [False, True])
def test_screening_multiplies_in_bf16(screening):
    states, weight = torch.randn(2, 16, 8), torch.randn(64, 8)
    with Dtypes() as seen:
        run({"hidden": states, "weight": weight, "bias": torch.full((64,), -6.0)}, screening, None)
    assert ((torch.bfloat16, (64, 32)) in seen.seen) == screening


@pytest.mark.parametrize(
    ("dtype", "device", "vocab", "is_fast", "pays"),
    [
        (torch.float32, "cpu", 64, True, True),
        (torch.float32, "cpu", 63, True, False),  # a product of fewer than 2^24 multiplications
        (torch.float64, "cpu", 64, True, False),
        (torch.float32, "meta", 64, True, False),
        (torch.float32, "cpu", 64, False, False),
    ],
)
def test_only_large_fp32_products_of_a_cpu_with_fast_bf16_are_screened(
    dtype, device, vocab, is_fast, pays, monkeypatch
):
    monkeypatch.setattr(fast_head, "multiplies_bf16", lambda: is_fast)
    states = torch.empty(1 << 12, 1 << 6, dtype=dtype, device=device)
    assert fast_head._screening_pays(states, vocab) == pays


@pytest.mark.parametrize("options", [{}, {"bias": -70.0}, {"gate": 1.0}], ids=str)
@pytest.mark.parametrize(("dtype", "second"), [(torch.float32, 125.5), (torch.bfloat16, 126.0)])
def test_only_tokens_that_may_be_the_largest_are_computed_again(
    dtype, second, options, monkeypatch
):
    """One token of one text: the second score is 1.6% lower, or 1.2% if the weight is exact."""
    computed = []

    def counting_csr(row, column, values, shape):
        computed.append(values.numel())
        return csr(row, column, values, shape)

    monkeypatch.setattr(fast_head, "csr", counting_csr)
    hidden = torch.tensor([[[127.5], [second], [-3.0]], [[-3.0], [-127.5], [-second]]])
    tensors = {"hidden": hidden, "weight": torch.ones(30, 1, dtype=dtype)}
    shapes = {"bias": (30,), "gate": (2, 30)}
    tensors |= {name: torch.full(shapes[name], value) for name, value in options.items()}
    if "gate" in tensors:
        tensors["gate"][:, ::2] = 0.0
    out = agree(tensors)
    assert (out > 0).any(1).tolist() == [True, False]
    assert sum(computed) == (15 if "gate" in tensors else 30)


def test_a_tile_with_too_many_candidates_is_not_screened():
    """More than a fifth of its products: 7 of 20 columns are active, at all tokens."""
    attended = torch.arange(8) < torch.tensor([[4], [8]])
    packed = fast_head._pack(attended)
    states = torch.ones(len(packed.token), 1)
    for active, is_dense in ((7, True), (3, False)):
        rows = torch.where(torch.arange(20) < active, 1.0, -1.0)[:, None]
        for force in (False, True):
            screen = fast_head._Screen(states, packed, rows.dtype, force=force)
            found = screen.candidates(rows, None, None)
            assert (found is None) == (is_dense and not force)


@pytest.mark.parametrize("exponent", [-149, -100, -70, -63, -10, 0, 10, 60])
def test_the_norm_of_a_row_is_not_underestimated_where_squares_underflow(exponent):
    x = torch.full((2, 5), 2.0**exponent)
    bound = fast_head._norm_bound(x).double()
    assert (bound >= x.double().norm(dim=1) * (1 - 1e-6)).all()
    if exponent >= -10:
        torch.testing.assert_close(bound, x.double().norm(dim=1), rtol=1e-6, atol=0)


def test_the_bound_covers_a_sum_that_loses_all_small_terms():
    """In fp32, 2^24 + 1/2 is 2^24: summed in order, 766 halves vanish between two large terms."""
    hidden, weight = torch.ones(1, 768), torch.full((1, 768), 0.5)
    hidden[0, [0, -1]] = weight[0, 0] = 4096.0
    weight[0, -1] = -4096.0
    assert torch.equal(hidden.bfloat16().float(), hidden)
    products = (hidden * weight)[0]
    lost = (products.double().sum() - np.cumsum(products.numpy())[-1]).item()
    assert lost == 383.0
    packed = fast_head._pack(torch.ones(1, 1, dtype=torch.bool))
    states = hidden.index_select(0, packed.token)
    screen = fast_head._Screen(states, packed, torch.bfloat16, force=True)
    assert screen.slack.item() * weight.norm().item() >= lost


# Generic data


def at_density(density: float, dtype=torch.float32, seed: int = 0) -> dict:
    """Draw a call of which that share is active, and of which no logit is close to zero."""
    batch, length, vocab, width = 4, 24, 600, 64
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, length, width, generator=generator).to(dtype)
    weight = (torch.randn(vocab, width, generator=generator) / 8).to(dtype)
    mask = torch.rand(batch, length, generator=generator) < 0.7
    exact = hidden.double() @ weight.double().T
    pooled = exact.masked_fill(~mask[..., None], -torch.inf).amax(1).flatten().sort().values
    at = round(len(pooled) * (1 - density))
    if at == len(pooled):
        threshold = pooled[-1] + 1e-4
    else:  # the widest gap thereabouts
        reach = min(20, (len(pooled) - at) // 4)
        gaps = pooled.diff()[at - reach : at + reach]
        widest = at - reach + int(gaps.argmax())
        threshold = (pooled[widest] + pooled[widest + 1]) / 2
    bias = -threshold.to(dtype).expand(vocab).clone()
    return {"hidden": hidden, "weight": weight, "bias": bias, "attention_mask": mask}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("density", [0.5, 0.05, 0.005, 0.0])
def test_screened_is_unscreened_at_any_density(density, dtype):
    tensors = at_density(density, dtype)
    screened, unscreened = run(tensors, True), run(tensors, False)
    out = screened["out"]
    share = (out > 0).double().mean().item()
    assert share == pytest.approx(density, rel=0.3)
    assert (share == 0) == (density == 0)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in tensors.items()}
    logits = wide["hidden"] @ wide["weight"].T + wide["bias"]
    pooled = logits.masked_fill(~wide["attention_mask"][..., None], -torch.inf).amax(1)
    if dtype == torch.float32:
        assert torch.equal(out > 0, pooled > 0)
    assert torch.equal(out > 0, unscreened["out"] > 0)
    exact = pooled.relu().log1p()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, unscreened["out"], rtol=1e-5, atol=1e-5)
    for name in screened.keys() - {"out"}:
        eps = max(torch.finfo(dtype).eps, 1e-5)
        torch.testing.assert_close(screened[name], unscreened[name], rtol=eps, atol=eps, msg=name)


def test_a_gate_hides_columns_from_the_screen():
    tensors = at_density(0.3)
    gate = torch.tensor([0.0, 0.25, 1.0])[torch.arange(4 * 600).reshape(4, 600) % 3]
    out = agree({**tensors, "gate": gate})
    assert torch.equal(out > 0, (run(tensors, False)["out"] > 0) & (gate > 0))
    gate[1, 5], gate[2, 7] = torch.nan, torch.nan
    out = agree({**tensors, "gate": gate}, gradients=False)
    assert out.isnan().nonzero().tolist() == [[1, 5], [2, 7]]


@pytest.mark.parametrize("density", ["sparse", "dense", "first one, then the other"])
def test_the_automatic_choice_changes_nothing(density):
    rng = np.random.default_rng(2)
    hidden = oracle.grid(rng, (8, 32, 16))
    weight = oracle.grid(rng, (5000, 16), bits=8)
    assert hidden.size * len(weight) > 1 << 24
    assert oracle.is_exact(hidden, weight, 2.0**-12)
    bias = {"sparse": -80.0, "dense": 0.0}.get(density, -80.0 * (np.arange(5000) < 2500))
    arrays = {"hidden": hidden, "weight": weight, "bias": np.broadcast_to(bias, 5000)}
    tensors = tensors_of(arrays)
    chosen, expected = (run(tensors, screening, None) for screening in (None, False))
    assert expected["out"].any(1).all()
    assert torch.equal(chosen["out"] > 0, expected["out"] > 0)
    for name in chosen:
        torch.testing.assert_close(chosen[name], expected[name], rtol=1e-5, atol=1e-4, msg=name)


# Built to break a bound


# What bf16 makes of the neighbours of 1 + 2^-8, the middle between 1 and the number after it.
DOWN, UP = 1 + 2.0**-8 - 2.0**-10, 1 + 2.0**-8 + 2.0**-10


@pytest.mark.parametrize("width", [12, 768])
@pytest.mark.parametrize("of_hidden", [DOWN, UP], ids=["hidden_down", "hidden_up"])
@pytest.mark.parametrize("of_weight", [DOWN, 1.0, UP], ids=["weight_down", "exact", "weight_up"])
def test_all_roundings_go_the_same_way(of_hidden, of_weight, width):
    """The bf16 product is off by up to 1%; the logit is a millionth on either side of zero."""
    rng = np.random.default_rng(width)
    sign = rng.choice([-1.0, 1.0], size=width)
    hidden = np.zeros((2, 3, width))
    hidden[0, 1] = of_hidden * sign
    hidden[1, 2] = -of_hidden * sign
    count = rng.integers(max(width // 2, 1), width + 1, size=40)  # how the sum is rounded varies
    weight = (np.arange(width) < count[:, None]) * of_weight * sign
    weight[20:] *= -1  # the second text's
    dots = (np.abs(weight) * of_hidden).sum(1)
    exact = oracle.is_exact(hidden, weight, 2.0**-20) and dots.max() < 16
    exact = exact or (of_weight == 1.0 and oracle.is_exact(hidden, weight, 2.0**-10))
    tiny = (2.0**-20 if of_weight != 1.0 else 2.0**-10) if exact else 2e-5 * dots
    above = np.arange(40) % 2 == 0
    bias = np.where(above, tiny, -tiny) - dots
    tensors = {
        "hidden": torch.from_numpy(hidden).float(),
        "weight": torch.from_numpy(weight).float(),
        "bias": torch.from_numpy(bias).float(),
    }
    expected = np.zeros((2, 40), bool)
    expected[0, :20], expected[1, 20:] = above[:20], above[20:]
    screened = run(tensors, True)
    np.testing.assert_array_equal((screened["out"] > 0).numpy(), expected)
    unscreened = run(tensors, False)["out"]  # a logit is what is left of a sum of `dots`
    assert torch.equal(screened["out"] > 0, unscreened > 0)
    torch.testing.assert_close(screened["out"], unscreened, rtol=0, atol=3e-6 * dots.max())
    touched = np.zeros((2, 3), bool)
    touched[0, 1] = touched[1, 2] = True
    np.testing.assert_array_equal(screened["hidden"].any(-1).numpy(), touched)
    if exact:
        check({"hidden": hidden, "weight": weight, "bias": bias})


@pytest.mark.parametrize("count", [256, 514])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_three_roundings_at_their_worst(count, sign):
    """Hidden states, weights and their product are each rounded by half a step, all downwards."""
    value = 1 + 2.0**-8 - 2.0**-14
    hidden, weight = torch.zeros(1, 4, 768), torch.zeros(30, 768)
    hidden[0, 1, :count] = sign * value
    weight[:, :count] = sign * value
    dot = count * value**2
    low = (hidden[0, 1].bfloat16().double() @ weight[0].bfloat16().double()).bfloat16()
    assert 1 - low.item() / dot > (2.9 if count > 256 else 1.9) * 2.0**-8
    above = torch.arange(30) % 2 == 0
    bias = torch.where(above, 2e-5 * dot, -2e-5 * dot) - dot
    out = agree({"hidden": hidden, "weight": weight, "bias": bias}, gradients=False)
    assert torch.equal(out[0] > 0, above)


@pytest.mark.parametrize("width", [32, 768])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("vocab", [1, 50])
def test_ones_are_not_lost_next_to_256(width, tokens, vocab):
    """A sum that is kept in bf16 stays at 256."""
    hidden = torch.ones(1, tokens, width)
    hidden[0, 0, 0] = 256.0
    bias = torch.full((vocab,), -254.0 - width)  # the logit is 1
    out = agree({"hidden": hidden, "weight": torch.ones(vocab, width), "bias": bias})
    torch.testing.assert_close(out, torch.full((1, vocab), 2.0).log())


def test_the_arg_max_when_every_rounding_favours_the_wrong_token():
    """Bf16 says 262 to 256; in truth the second is larger by a hundred-thousandth."""
    up, down = 1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-8 - 2.0**-20
    loser, winner = torch.zeros(2, 514)
    loser[:256], loser[512] = up, 127 / 128
    winner[256:512], winner[513] = down, 255 / 256
    weight = torch.ones(514)
    weight[:256], weight[256:512] = up, down
    low = [(h.bfloat16().double() @ weight.bfloat16().double()).bfloat16() for h in (loser, winner)]
    assert [each.item() for each in low] == [262.0, 256.0]
    true = [(h.double() @ weight.double()).item() for h in (loser, winner)]
    assert 1e-5 < true[1] / true[0] - 1 < 2e-5
    hidden = torch.stack([torch.stack([loser, winner]), torch.stack([winner, loser])])
    found = run({"hidden": hidden, "weight": weight.repeat(30, 1)}, True)
    assert found["hidden"].any(-1).tolist() == [[False, True], [True, False]]
    agree({"hidden": hidden, "weight": weight.repeat(30, 1)})


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_arg_max_when_only_the_rounding_of_the_result_is_large(sign):
    """257.0039 becomes 258 and 257.0077 becomes 256, and so do the negative scores."""
    near = [[256.0, UP], [255.0, 2 * (1 + 2.0**-8 - 2.0**-12)]]
    hidden = torch.cat([sign * torch.tensor([near]), torch.tensor([[[-400.0, 0.0]]])], dim=1)
    weight = torch.ones(30, 2, dtype=torch.bfloat16)
    low = hidden[0].bfloat16().double().sum(-1).bfloat16()
    assert low.tolist() == [sign * 258.0, sign * 256.0, -400.0]
    exact = hidden[0].double().sum(-1)
    assert (exact[1] > exact[0]) == (sign > 0)
    tensors = {"hidden": hidden, "weight": weight, "bias": torch.full((30,), 300.0)}
    found = run(tensors, True)
    assert found["hidden"].any(-1).tolist() == [[sign < 0, sign > 0, False]]
    agree(tensors)


def digits(rng: np.random.Generator, width: int, decoys: int) -> tuple:
    hidden, weight = oracle.grid(rng, (3, 1 + decoys, width)), oracle.grid(rng, (50, width))
    return hidden, weight, 2.0**-12


def dominated(rng: np.random.Generator, is_all: bool) -> tuple:
    """1e6 next to 1e-3: the norm says nothing about the rest."""
    hidden = oracle.grid(rng, (3, 6, 9), scale=2.0**-9)
    hidden[0] *= not is_all
    hidden[..., 4] = 2.0**20
    weight = oracle.grid(rng, (50, 9), bits=5, scale=2.0**-3)
    weight[:, 4] = rng.choice([0.0, 0.0, 2.0**-12, -(2.0**-12)], size=50)
    return hidden, weight, 2.0**-12


def with_zeros(rng: np.random.Generator) -> tuple:
    hidden, weight = oracle.grid(rng, (4, 5, 8)), oracle.grid(rng, (50, 8))
    hidden[0], hidden[1, 2], hidden[2, 1:] = 0.0, 0.0, 0.0
    weight[::3] = 0.0
    return hidden, weight, 2.0**-12


def scaled(rng: np.random.Generator, of_hidden: int, of_weight: int) -> tuple:
    hidden = rng.integers(-511, 512, size=(3, 5, 8)) * 2.0**of_hidden
    weight = rng.integers(-63, 64, size=(50, 8)) * 2.0**of_weight
    return hidden, weight, 2.0 ** (of_hidden + of_weight)


SCALES = [
    (-100, 0),  # squares of 1e-30 are zero
    (-145, 6),  # numbers of 1e-40
    (0, -145),
    (-60, -70),  # normal numbers whose products are not
    (-75, -60),
    (52, 52),  # products of 1e18
    (108, -100),  # squares of 1e36 are infinite
    (-120, 108),
    (108, 0),  # the largest norms
    (0, 108),
]
EDGES = {
    **{f"digits {n}": partial(digits, width=n[0], decoys=n[1]) for n in ((1, 0), (4, 5), (16, 5))},
    "one dominates": partial(dominated, is_all=False),
    "one is all there is": partial(dominated, is_all=True),
    "zeros": with_zeros,
    "nothing but zeros": lambda rng: (np.zeros((2, 3, 4)), np.zeros((50, 4)), 2.0**-140),
    **{f"scales {n}": partial(scaled, of_hidden=n[0], of_weight=n[1]) for n in SCALES},
}


@pytest.mark.parametrize("name", EDGES)
def test_the_last_digit_decides_every_sign(name):
    """A text of each column is a unit above zero, at zero or below it: bf16 cannot say which."""
    rng = np.random.default_rng(1)
    hidden, weight, unit = EDGES[name](rng)
    is_scaled = name.startswith("scales")
    check({"hidden": hidden, "weight": weight}, gradients="-145" not in name)
    column = np.arange(len(weight))
    text = column % len(hidden)
    top, _ = oracle.maxima(hidden, weight)
    step = rng.integers(-1, 2, size=len(weight))
    bias = step * unit - top[text, column]
    out = check({"hidden": hidden, "weight": weight, "bias": bias}, gradients=not is_scaled)
    np.testing.assert_array_equal(out[text, column] > 0, step > 0)
    assert set(step) == {-1, 0, 1}


@pytest.mark.parametrize("width", [4, 16])
def test_huge_terms_cancel_to_a_small_logit(width):
    """Terms of 1e4 whose sum is +-1/8: bf16 knows the last one to +-32."""
    rng = np.random.default_rng(width)
    hidden = np.zeros((2, 4, width))
    hidden[:, 2, :-1] = rng.integers(-1023, 1024, size=(2, width - 1))
    hidden[:, 2, -1] = 1.0
    weight = np.zeros((60, width))
    weight[:, :-1] = rng.integers(-15, 16, size=(60, width - 1))
    sign = rng.choice([-1.0, 1.0], size=60)
    text = np.arange(60) % 2
    weight[:, -1] = sign / 8 - (hidden[text, 2] * weight).sum(1)
    assert np.abs(weight[:, -1]).max() > 5e3
    out = check({"hidden": hidden, "weight": weight, "bias": np.full(60, -(2.0**-4))})
    np.testing.assert_array_equal(out[text, np.arange(60)] > 0, sign > 0)


# NaN and what is as large


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3.4e38, -3.4e38], ids=str)
@pytest.mark.parametrize(
    ("name", "index"),
    [("hidden", (1, 3, 2)), ("hidden", (0, 0)), ("weight", (4, 2)), ("weight", 9), ("bias", 5)],
    ids=str,
)
def test_nan_and_what_is_as_large_as_infinity(name, index, value):
    rng = np.random.default_rng(8)
    arrays = {
        "hidden": oracle.grid(rng, (3, 6, 8)),
        "weight": oracle.grid(rng, (40, 8), scale=2.0**-16),
        "bias": oracle.grid(rng, 40, scale=2.0**-16),
        "attention_mask": np.ones((3, 6), bool),
    }
    clean = torch.from_numpy(check(arrays)).float()
    tensors = tensors_of(arrays)
    tensors[name][index] = value
    screened, unscreened = run(tensors, True)["out"], run(tensors, False)["out"]
    of_index = (index[0],) if name == "hidden" else (slice(None), np.ravel(index)[0])
    if value != value:
        assert screened[of_index].isnan().all()
    if abs(value) != 3.4e38:  # what overflows in fp32 depends on the order of the sum
        wide = [tensors[name].double() for name in ("hidden", "weight", "bias")]
        expected = (wide[0] @ wide[1].T + wide[2]).amax(1).relu().log1p()
        torch.testing.assert_close(screened.double(), expected, rtol=1e-5, atol=0, equal_nan=True)
        torch.testing.assert_close(screened, unscreened, rtol=1e-5, atol=0, equal_nan=True)
    kept = torch.ones_like(screened, dtype=torch.bool)
    kept[of_index] = False
    assert torch.equal(screened[kept] > 0, clean[kept] > 0)
    torch.testing.assert_close(screened[kept], clean[kept])


def test_a_score_that_bf16_rounds_to_minus_infinity_is_active_with_a_large_bias():
    hidden, bias = torch.full((1, 1, 1), -3.4e38), torch.full((20,), 3.4028e38)
    assert hidden.bfloat16().isinf()
    assert (agree({"hidden": hidden, "weight": torch.ones(20, 1), "bias": bias}) > 80).all()


def test_numbers_that_bf16_rounds_to_infinity():
    """The largest fp32 numbers, and products that are small nevertheless."""
    largest = torch.finfo(torch.float32).max
    assert torch.tensor(largest).bfloat16().isinf()
    hidden = torch.zeros(2, 3, 4)
    hidden[:, :, 1] = torch.arange(1, 7).reshape(2, 3)
    hidden[0, 1, 0] = largest
    hidden[1, 2, 0] = -largest
    weight = torch.zeros(20, 4)
    weight[:, 0] = torch.tensor([0.0, 2.0**-120, -(2.0**-120), 2.0**-149, -(2.0**-100)]).repeat(4)
    weight[:, 1] = torch.tensor([1.0, -1.0]).repeat(10)
    for bias in (None, torch.full((20,), -100.0)):
        out = agree({"hidden": hidden, "weight": weight, "bias": bias})
        logits = hidden.double() @ weight.double().T
        pooled = logits.amax(1) + (0 if bias is None else bias)
        torch.testing.assert_close(out.double(), pooled.relu().log1p(), rtol=1e-6, atol=0)
        assert out.any()
