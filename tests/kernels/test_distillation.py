"""The kernels of distillation: their values, their gradients, their edges."""

import itertools
import math

import numpy as np
import pytest
import torch

from sparse_losses import DistillationLoss
from sparse_losses.functional import distillation_loss
from sparse_losses.kernels import distillation as kernels

modes = pytest.mark.parametrize("standardize", ["batch", "row"])
terms = pytest.mark.parametrize("alphas", [(0.7, 0.3), (1.0, 0.0), (0.0, 1.0)], ids=str)


def sample(dtype):
    """Runs every kernel once, for `tools.compile_kernels`."""
    everything = itertools.product(
        [(40, 4096), (8, 10000), (600, 16)], ["batch", "row"], [False, True], [False, True]
    )
    for shape, standardize, has_mask, is_learned in everything:
        s = torch.zeros(shape, dtype=dtype, requires_grad=True)
        t = torch.zeros(shape, dtype=dtype)
        options = {
            "candidate_mask": torch.ones(shape, dtype=torch.bool) if has_mask else None,
            "temperature": torch.ones(()).requires_grad_() if is_learned else 3.0,
            "standardize": standardize,
            "impl": "triton",
        }
        distillation_loss(s, t, **options).backward()


def draw(seed, *shape, scale=1.0, offset=0.0, dtype=torch.float32):
    values = np.random.default_rng(seed).normal(size=shape) * scale + offset
    return torch.from_numpy(values).to(dtype)


def run(s, t, *, impl="triton", temperature=1.7, learned=True, **options):
    """Value and gradients by the student and by the temperature."""
    s = s.detach().clone().requires_grad_()
    if not learned:
        value = distillation_loss(s, t, temperature=temperature, impl=impl, **options)
        return [value.detach(), *torch.autograd.grad(value, [s])]
    number = torch.tensor(temperature, dtype=torch.promote_types(s.dtype, torch.float32))
    number.requires_grad_()
    value = distillation_loss(s, t, temperature=number, impl=impl, **options)
    return [value.detach(), *torch.autograd.grad(value, [s, number])]


def exactly(s, t, **options):
    return run(s.double(), t.double(), impl="torch", **options)


def assert_near(found, exact, rtol=2e-6, times=4.0):
    """Each within ``rtol`` of its largest entry; the temperature's, which cancels, more widely."""
    for index, (a, e) in enumerate(zip(found, exact, strict=True)):
        bound = rtol * (times if index == 2 else 1) * e.abs().max() + 1e-7
        assert (a.double() - e).abs().max() <= bound, index


def oracle(s, t, mask, temperature, alpha_kl, alpha_mse, standardize):
    """The page's formula, number by number."""
    kept = [
        [(float(a), float(b)) for a, b, m in zip(*row, strict=True) if m and b > -math.inf]
        for row in zip(s, t, mask, strict=True)
    ]
    divergences = []
    for row in kept:
        if row:
            sums = [math.fsum(math.exp(pair[k] / temperature) for pair in row) for k in (0, 1)]
            divergences.append(
                math.fsum(
                    math.exp(b / temperature)
                    / sums[1]
                    * ((b - a) / temperature + math.log(sums[0] / sums[1]))
                    for a, b in row
                )
            )
    kl = math.fsum(divergences) / max(len(divergences), 1)
    groups = kept if standardize == "row" else [[pair for row in kept for pair in row]]
    squares = []
    for group in groups:
        z = []
        for k in (0, 1):
            x = np.array([pair[k] for pair in group])
            few = len(x) < (3 if standardize == "row" else 2) or x.min() == x.max()
            z.append(np.zeros(len(x)) if few else (x - x.mean()) / (x.std(ddof=1) + 1e-8))
        squares.extend((z[0] - z[1]) ** 2)
    return alpha_kl * temperature**2 * kl + alpha_mse * (sum(squares) / max(len(squares), 1))


# Shapes


@modes
@pytest.mark.parametrize("shape", [(1, 3), (5, 4), (7, 17), (3, 130), (513, 3)], ids=str)
@pytest.mark.parametrize("kind", ["whole", "mask", "infinite", "both"])
def test_values_are_those_of_the_formula(standardize, shape, kind):
    s, t = draw(0, *shape), draw(1, *shape, offset=2.0)
    mask = draw(2, *shape) > -0.4 if kind in ("mask", "both") else torch.ones(shape).bool()
    if kind in ("infinite", "both"):
        t[draw(3, *shape) > 0.5] = -torch.inf
    given = {"candidate_mask": mask} if kind in ("mask", "both") else {}
    found = distillation_loss(s, t, standardize=standardize, impl="triton", **given)
    expected = oracle(s, t, mask, 3.0, 0.7, 0.3, standardize)
    assert found.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@modes
@terms
@pytest.mark.parametrize("kind", ["whole", "mask", "infinite"])
@pytest.mark.parametrize("learned", [False, True])
def test_gradients_are_those_of_the_plain_path(standardize, alphas, kind, learned):
    s, t = draw(0, 9, 21, scale=2.0), draw(1, 9, 21, scale=2.0)
    options = {"standardize": standardize, "alpha_kl": alphas[0], "alpha_mse": alphas[1]}
    if kind == "mask":
        options["candidate_mask"] = draw(2, 9, 21) > -0.4
    if kind == "infinite":
        t[draw(2, 9, 21) > 0.4] = -torch.inf
        t[4] = -torch.inf
        t[5, 2:] = -torch.inf
    found = run(s, t, learned=learned, **options)
    exact = exactly(s, t, learned=learned, **options)
    assert_near(found, exact)
    assert found[1].any()


@modes
@pytest.mark.parametrize("gaps", [False, True])
def test_wide_rows_are_read_in_pieces(monkeypatch, standardize, gaps):
    monkeypatch.setattr(kernels, "MOST_COLUMNS", 32)
    monkeypatch.setattr(kernels, "PIECE", 32)
    s, t = draw(0, 5, 75, offset=5.0), draw(1, 5, 75)
    if gaps:
        t[:, 40:] = -torch.inf
        t[2] = -torch.inf
    found = run(s, t, standardize=standardize)
    assert_near(found, exactly(s, t, standardize=standardize))


@modes
def test_many_tiles_are_joined_in_pieces(monkeypatch, standardize):
    monkeypatch.setattr(kernels, "JOINED", 4)
    monkeypatch.setattr(kernels, "TILE", 16)
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    s, t = draw(0, 43, 5, offset=-4.0), draw(1, 43, 5)
    t[7:12] = -torch.inf
    assert_near(run(s, t, standardize=standardize), exactly(s, t, standardize=standardize))


# Digits


@modes
@terms
@pytest.mark.parametrize("temperature", [1.0, 1e4])
@pytest.mark.parametrize("offset", [0.0, 1000.0, -1e5])
def test_no_digits_are_lost_that_the_plain_path_keeps(standardize, alphas, temperature, offset):
    s = draw(0, 7, 50, offset=offset)
    t = s + draw(1, 7, 50, scale=0.1)
    options = {"standardize": standardize, "alpha_kl": alphas[0], "alpha_mse": alphas[1]}
    options["temperature"] = temperature
    exact = exactly(s, t, **options)
    ours, plain = run(s, t, **options), run(s, t, impl="torch", **options)
    assert ours[0] > 0
    for a, p, e in list(zip(ours, plain, exact, strict=True))[:2]:
        assert (a - e).norm() <= (p - e).norm() + 1e-5 * e.norm()


@modes
@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1e6, 1e18])
def test_squares_neither_overflow_nor_underflow(standardize, scale):
    s, t = draw(0, 6, 9, scale=scale), draw(1, 6, 9, scale=scale)
    options = {"alpha_kl": 0.0, "alpha_mse": 1.0, "standardize": standardize, "learned": False}
    found, exact = run(s, t, **options), exactly(s, t, **options)
    assert found[0].item() == pytest.approx(exact[0].item(), rel=1e-5)
    torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-4, atol=1e-5 / scale)


def test_an_outlier_leaves_the_digits_of_the_others():
    s, t = draw(0, 4, 60), draw(1, 4, 60)
    s[1, 3], t[2, 5] = 1e4, -1e4
    for standardize in ("batch", "row"):
        options = {"standardize": standardize, "alpha_kl": 0.0, "alpha_mse": 1.0}
        assert_near(run(s, t, **options), exactly(s, t, **options), rtol=1e-5)


@modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("teacher_dtype", [None, torch.float32], ids=str)
def test_half_precision_is_read_as_it_is(standardize, dtype, teacher_dtype):
    s = draw(0, 9, 33, dtype=dtype)
    t = draw(1, 9, 33, dtype=teacher_dtype or dtype)
    value, gradient = run(s, t, standardize=standardize, learned=False)
    exact = exactly(s, t, standardize=standardize, learned=False)
    assert value.dtype == torch.float32
    assert gradient.dtype == dtype
    assert value.item() == pytest.approx(exact[0].item(), rel=1e-6)
    # The interpreter cuts bits off where a GPU rounds.
    digits = torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), exact[1], rtol=digits, atol=1e-6)


# Edges


@modes
@pytest.mark.parametrize("constant", [0.0, 0.3, -1e6])
@pytest.mark.parametrize("which", ["student", "teacher", "both"])
def test_scores_that_are_all_equal_have_no_z(standardize, constant, which):
    s, t = draw(0, 3, 4), draw(1, 3, 4)
    for name, scores in (("student", s), ("teacher", t)):
        if which in (name, "both"):
            scores[:] = constant
    options = {"alpha_kl": 0.0, "alpha_mse": 1.0, "standardize": standardize}
    found = run(s, t, **options)
    assert_near(found, exactly(s, t, **options))
    if which != "teacher":
        assert not found[1].any()


def test_rows_of_two_candidates_have_no_z_of_their_own():
    s, t = draw(0, 3, 5), draw(1, 3, 5)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 0, 1], [0, 0, 0, 0, 0]])
    options = {"alpha_kl": 0.0, "alpha_mse": 1.0, "standardize": "row", "candidate_mask": mask}
    found = run(s, t, **options)
    assert_near(found, exactly(s, t, **options))
    assert found[1].any(dim=1).tolist() == [False, True, False]


@modes
@pytest.mark.parametrize("how", ["mask", "infinite"])
def test_no_candidate_at_all_is_zero(standardize, how):
    s, t = draw(0, 3, 5), draw(1, 3, 5)
    options = {"standardize": standardize}
    if how == "mask":
        options["candidate_mask"] = torch.zeros(3, 5)
    else:
        t[:] = -torch.inf
    assert not any(x.any() for x in run(s, t, **options))


@modes
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_mask_hides_everything(standardize, bad):
    s, t = draw(0, 4, 6), draw(1, 4, 6)
    mask = draw(2, 4, 6) > -0.3
    plain = run(s, t, candidate_mask=mask, standardize=standardize)
    spoilt = [x.masked_fill(~mask, bad) for x in (s, t)]
    found = run(*spoilt, candidate_mask=mask, standardize=standardize)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert not found[1][~mask].any()
    t[~mask] = -torch.inf
    s[~mask] = bad
    assert_near(run(s, t, standardize=standardize), [x.double() for x in plain])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, interpreting
@modes
@terms
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("spoilt", [0, 1])
def test_what_is_not_a_number_comes_out(standardize, alphas, bad, spoilt):
    scores = [draw(0, 4, 6), draw(1, 4, 6)]
    scores[spoilt][1, 2] = bad
    options = {"standardize": standardize, "alpha_kl": alphas[0], "alpha_mse": alphas[1]}
    value, gradient, _ = run(*scores, **options)
    assert value.isnan()
    assert gradient[1].isnan().any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, interpreting
def test_a_student_that_excludes_the_teachers_candidate_is_infinitely_wrong():
    s, t = draw(0, 4, 6), draw(1, 4, 6)
    s[1, 2] = -torch.inf
    options = {"alpha_kl": 1.0, "alpha_mse": 0.0, "impl": "triton"}
    assert distillation_loss(s, t, **options) == torch.inf


@modes
def test_agreement_is_zero(standardize):
    t = draw(1, 7, 20)
    value, gradient, by_temperature = run(t, t, standardize=standardize)
    assert value == 0
    assert by_temperature == 0
    assert gradient.abs().max() < 1e-7


@modes
def test_a_shift_of_every_row_is_not_seen_by_the_kl(standardize):
    s, t = draw(0, 6, 11), draw(1, 6, 11)
    rows = torch.arange(-3.0, 3.0)[:, None] * 8
    options = {"standardize": standardize, "learned": False}
    same, kl = run(s, t, **options), run(s + rows, t - rows, alpha_mse=0.0, **options)
    torch.testing.assert_close(kl[0], run(s, t, alpha_mse=0.0, **options)[0], rtol=1e-5, atol=1e-6)
    both = run(s + rows, t - rows, **options)
    assert torch.allclose(both[0], same[0], rtol=1e-5) == (standardize == "row")


# What surrounds the kernels


@modes
@pytest.mark.parametrize("gaps", ["", "mask", "infinite"])
def test_every_output_is_written_and_the_same_bits_come_twice(monkeypatch, standardize, gaps):
    s, t = draw(0, 70, 37), draw(1, 70, 37)
    options = {"standardize": standardize}
    if gaps == "mask":
        options["candidate_mask"] = draw(2, 70, 37) > 0
    if gaps == "infinite":
        t[draw(2, 70, 37) > 0] = -torch.inf
    first = run(s, t, **options)
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(torch.nan)
    )
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))
    again = run(s, t, **options)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_scores_may_lie_anyhow():
    s, t = draw(0, 6, 9), draw(1, 6, 9)
    mask = draw(2, 6, 9) > 0
    expected = run(s, t, candidate_mask=mask)
    strided = [torch.stack([x, x], dim=2).transpose(0, 1)[:, :, 1].T for x in (s, t, mask)]
    assert not any(x.is_contiguous() for x in strided)
    leaf = strided[0].requires_grad_()
    value = distillation_loss(
        leaf, strided[1], candidate_mask=strided[2], temperature=1.7, impl="triton"
    )
    value.backward()
    assert torch.equal(value, expected[0])
    assert torch.equal(leaf.grad, expected[1])
    row = t[:1].expand(6, 9)
    assert_near(run(s, row), exactly(s, row))


def test_an_upstream_gradient_scales():
    s, t = draw(0, 6, 9).requires_grad_(), draw(1, 6, 9)
    value = distillation_loss(s, t, impl="triton")
    (once,) = torch.autograd.grad(value, s, retain_graph=True)
    (scaled,) = torch.autograd.grad(-2.5 * value, s)
    torch.testing.assert_close(scaled, -2.5 * once)


@modes
def test_second_derivatives_are_those_of_the_plain_path(standardize):
    t, along = draw(1, 3, 5), draw(2, 3, 5)
    found = {}
    for impl in ("triton", "torch"):
        leaves = draw(0, 3, 5).requires_grad_(), torch.tensor(0.7, requires_grad=True)
        value = distillation_loss(
            leaves[0], t, temperature=leaves[1], standardize=standardize, impl=impl
        )
        slope = torch.autograd.grad(value, leaves, create_graph=True)
        found[impl] = torch.autograd.grad((slope[0] * along).sum() + slope[1], leaves)
    for a, b in zip(*found.values(), strict=True):
        torch.testing.assert_close(a, b)


@modes
@pytest.mark.parametrize("learned", [False, True])
def test_it_compiles_into_one_graph(standardize, learned):
    torch._dynamo.reset()
    s, t = draw(0, 4, 6), draw(1, 4, 6)
    mask = draw(2, 4, 6) > -1
    temperature = torch.nn.Parameter(torch.tensor(1.7)) if learned else 1.7
    module = DistillationLoss(temperature=temperature, standardize=standardize, impl="triton")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    leaf = s.clone().requires_grad_()
    value = compiled(leaf, t, candidate_mask=mask)
    (2 * value).backward()
    expected = run(s, t, candidate_mask=mask, standardize=standardize, learned=learned)
    torch.testing.assert_close(value.detach(), expected[0])
    torch.testing.assert_close(leaf.grad, 2 * expected[1])
    if learned:
        torch.testing.assert_close(temperature.grad, 2 * expected[2])


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("needs", [[True, True], [False, False]], ids=str)
def test_the_operator_is_what_it_says(learned, needs):
    s, temperature = draw(0, 4, 6), torch.tensor(1.7) if learned else None
    arguments = (s, temperature, draw(1, 4, 6), draw(2, 4, 6) > -1, 1.7, 0.7, 0.3, True, needs)
    torch.library.opcheck(
        kernels.value_and_gradients, arguments, test_utils=("test_schema", "test_faketensor")
    )


@modes
def test_autocast_changes_nothing(standardize):
    s, t = draw(0, 4, 6), draw(1, 4, 6)
    expected = run(s, t, standardize=standardize)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(s, t, standardize=standardize)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_gradients_no_gradient_is_made(monkeypatch):
    made = []
    empty_like = torch.empty_like

    def noted(x, **options):
        made.append(x.shape)
        return empty_like(x, **options)

    monkeypatch.setattr(torch, "empty_like", noted)
    s, t = draw(0, 4, 6), draw(1, 4, 6)
    assert distillation_loss(s, t, impl="triton") > 0
    assert not made
    distillation_loss(s.requires_grad_(), t, impl="triton")
    assert made == [(4, 6)]


def test_what_the_kernel_cannot_do_is_said():
    s, t = draw(0, 4, 6), draw(1, 4, 6)
    with pytest.raises(ValueError, match=r"`alpha_kl` or `alpha_mse` above 0 with impl"):
        distillation_loss(s, t, alpha_kl=0.0, alpha_mse=0.0, impl="triton")
    with pytest.raises(ValueError, match=r"fp32, fp16 or bf16 tensors, got torch\.float64"):
        distillation_loss(s.double(), t, impl="triton")
    with pytest.raises(ValueError, match=r"a `temperature` on the device of the scores"):
        distillation_loss(s, t, temperature=torch.ones((), device="meta"), impl="triton")
    with pytest.raises(ValueError, match=r"'auto', 'torch' or 'triton', got 'cuda'"):
        DistillationLoss(impl="cuda")
    empty = distillation_loss(s[:0].requires_grad_(), t[:0], impl="triton")
    assert empty == 0
    assert empty.requires_grad
    assert "impl='triton'" in repr(DistillationLoss(impl="triton"))


def test_fp16_gradients_wait_for_their_scaler():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 16, 8, generator=generator)
    found = []
    for impl in ("triton", "torch"):
        leaf = student.half().requires_grad_()
        loss = distillation_loss(leaf, teacher, alpha_kl=1e-7, alpha_mse=1e-7, impl=impl)
        loss.backward(torch.tensor(2.0**20))
        found.append(leaf.grad)
    assert found[0].dtype == torch.float16
    assert found[1].abs().max() > 1e-4
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-7)
