"""All regularisers of a side in one read, against loops in fp64 and against PyTorch."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from sparse_losses import (
    FlopsLoss,
    IdfFlopsLoss,
    LanguagePenaltyLoss,
    MinActivationLoss,
    SelfReconstructionLoss,
    SpladeBatch,
    SpladeObjective,
    Texts,
)
from sparse_losses.kernels import regularisers as module
from sparse_losses.kernels.regularisers import _regularisers, regularisers
from sparse_losses.objective.regularisers import ON_TEXTS

# The interpreter's NumPy says aloud what a GPU computes in silence: inf - inf, 0 * inf.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN):RuntimeWarning")

WEIGHTS = {"flops": 0.7, "min_activation": 1.3, "language_penalty": 0.2, "self_reconstruction": 2.0}


def _texts(rows, width, length=6, dtype=torch.float32, logits=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    ids = torch.randint(0, width, (rows, length), generator=generator)
    mask = torch.rand(rows, length, generator=generator) < 0.8
    mask[0] = False  # a text without tokens
    ids = torch.where(mask, ids, -100)
    if not logits:
        return Texts(x, ids, mask)
    return Texts(x.relu().log1p(), ids, mask, x)


def _penalty(width, seed=0):
    return torch.rand(width, generator=torch.Generator().manual_seed(seed)) * 3


def _objective(width, weights=WEIGHTS, impl="triton", **losses):
    default = {
        "flops": IdfFlopsLoss(_penalty(width, 1)),
        "min_activation": MinActivationLoss(top_k=min(3, width), threshold=4.0),
        "language_penalty": LanguagePenaltyLoss(_penalty(width, 2)),
    }
    of_query = {f"query_{name}": weight for name, weight in weights.items()}
    return SpladeObjective(of_query, impl=impl, **(default | losses))


def _run(objective, texts, upstream=1.0):
    """Total, terms, and the gradients by activations and logits."""
    leaves = [
        None if x is None else x.detach().requires_grad_()
        for x in (texts.activations, texts.logits)
    ]
    texts = texts._replace(activations=leaves[0], logits=leaves[1])
    total, terms = objective(SpladeBatch(texts, texts))
    wanted = [leaf for leaf in leaves if leaf is not None]
    upstream = torch.tensor(upstream, dtype=total.dtype)
    found = torch.autograd.grad(total, wanted, upstream, materialize_grads=True)
    return total.detach(), terms, found


def _assert_alike(ours, theirs, rtol=2e-5, atol=2e-6):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


def _compare(texts, upstream=1.0, **options):
    width = texts.activations.shape[1]
    ours = _run(_objective(width, **options), texts, upstream)
    theirs = _run(_objective(width, impl="torch", **options), texts, upstream)
    _assert_alike(ours, theirs)
    return ours


def sample(dtype):
    """Everything there is, at real sizes but for the number of rows, then of columns."""
    for rows, width in ((2, 250_002), (2, 1 << 19), (512, 1_002), (4_000, 64)):
        plain = {"flops": FlopsLoss()}
        unbiased = {
            "flops": IdfFlopsLoss(_penalty(width), estimator="unbiased"),
            "self_reconstruction": SelfReconstructionLoss(balanced=True, ignore_token_ids=[0]),
            "stopword_ids": [1],
            "min_activation": MinActivationLoss(top_k=32),
        }
        learned = {name: torch.ones(()) for name in WEIGHTS}
        for losses, weights, logits in (
            ({}, WEIGHTS, False),
            (plain, WEIGHTS, True),
            (unbiased, learned, False),
        ):
            texts = _texts(rows, width, 256, dtype, logits)
            _run(_objective(width, weights, **losses), texts)


def _softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _expected(texts, balanced, unbiased, special):
    """The four terms and their weighted sum's gradient, number by number in fp64."""
    x = texts.activations.double().numpy()
    rows, width = x.shape
    w, p = _penalty(width, 1).double().numpy(), _penalty(width, 2).double().numpy()
    gradient, terms = np.zeros_like(x), dict.fromkeys(ON_TEXTS, 0.0)
    for j in range(width):
        column = x[:, j]
        mean = column.sum() / rows
        square, pull = mean**2, [2 * mean / rows] * rows
        if unbiased:
            pairs = [(a, b) for a, b in itertools.permutations(range(rows), 2)]
            square = sum(column[a] * column[b] for a, b in pairs) / len(pairs)
            pull = [2 * (column.sum() - column[i]) / len(pairs) for i in range(rows)]
        terms["flops"] += w[j] * (abs(mean) + 0.3 * square)
        for i in range(rows):
            gradient[i, j] += WEIGHTS["flops"] * w[j] * (np.sign(mean) / rows + 0.3 * pull[i])
            terms["language_penalty"] += p[j] * x[i, j] / rows
            gradient[i, j] += WEIGHTS["language_penalty"] * p[j] / rows
    ids, mask = texts.input_ids.tolist(), texts.attention_mask.tolist()
    sets = [
        {t for t, on in zip(i, m, strict=True) if on} - special
        for i, m in zip(ids, mask, strict=True)
    ]
    counts = [
        sum(bool(on) and t not in special for t, on in zip(i, m, strict=True))
        for i, m in zip(ids, mask, strict=True)
    ]
    valid = max(sum(count > 0 for count in counts), 1)
    for i, (targets, count) in enumerate(zip(sets, counts, strict=True)):
        k = min(3, width, count)
        best = sorted(range(width), key=lambda j, i=i: -x[i, j])[:k]
        lack = 4.0 - sum(x[i, j] for j in best) / k if k else 0.0
        if lack > 0:
            terms["min_activation"] += lack / valid
            for j in best:
                gradient[i, j] -= WEIGHTS["min_activation"] / k / valid
        kept = width - len(special)
        for j in set(range(width)) - special:
            is_target = j in targets
            share = 1 / kept
            if balanced:
                share = 0.5 / max(len(targets) if is_target else kept - len(targets), 1)
            toward = -x[i, j] if is_target else x[i, j]
            terms["self_reconstruction"] += share * _softplus(toward) / rows
            slope = share / (1 + math.exp(-toward)) / rows
            weight = WEIGHTS["self_reconstruction"]
            gradient[i, j] += weight * (-slope if is_target else slope)
    return terms, gradient


@pytest.mark.parametrize(("rows", "width"), [(2, 3), (5, 33), (3, 70), (9, 64)])
@pytest.mark.parametrize(("balanced", "unbiased"), [(False, False), (True, True)])
def test_it_is_the_formulas(rows, width, balanced, unbiased):
    special = {0, 1}
    texts = _texts(rows, width)
    total, terms, (gradient,) = _run(
        _objective(
            width,
            flops=IdfFlopsLoss(_penalty(width, 1), estimator="unbiased" if unbiased else "biased"),
            self_reconstruction=SelfReconstructionLoss(
                balanced=balanced, ignore_token_ids=sorted(special)
            ),
            special_token_ids=sorted(special),
        ),
        texts,
    )
    wanted, wanted_gradient = _expected(texts, balanced, unbiased, special)
    for name, value in wanted.items():
        assert terms[f"query_{name}"].item() == pytest.approx(value, rel=1e-5, abs=1e-6), name
    weighted = sum(WEIGHTS[name] * value for name, value in wanted.items())
    assert total.item() == pytest.approx(weighted, rel=1e-5)
    np.testing.assert_allclose(gradient.numpy(), wanted_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(16))
def test_any_options_are_as_in_pytorch(seed):
    draw = random.Random(seed)
    width, rows = draw.choice([7, 32, 50]), draw.choice([2, 3, 8])
    estimator = draw.choice(["biased", "unbiased"])
    reductions = [draw.choice(["mean", "sum"]) for _ in range(3)]
    names = draw.sample(ON_TEXTS, draw.randint(1, 4))
    idf = IdfFlopsLoss(_penalty(width), beta=draw.choice([0.0, 0.3]), estimator=estimator)
    texts = _texts(rows, width, draw.choice([1, 5, 130]), logits=draw.random() < 0.5, seed=seed)
    if draw.random() < 0.3:
        names = [name for name in names if name != "self_reconstruction"] or ["flops"]
        texts = texts._replace(input_ids=None, attention_mask=None)
    _compare(
        texts,
        upstream=draw.choice([1.0, -3.0]),
        weights={
            name: draw.choice([WEIGHTS[name], -1.0, torch.tensor(WEIGHTS[name])]) for name in names
        },
        flops=draw.choice([idf, FlopsLoss(estimator=estimator)]),
        min_activation=MinActivationLoss(
            top_k=draw.choice([1, 2, 7]), threshold=draw.choice([0.5, 4]), reduction=reductions[0]
        ),
        language_penalty=LanguagePenaltyLoss(_penalty(width, 2).double(), reduction=reductions[1]),
        self_reconstruction=SelfReconstructionLoss(
            balanced=draw.random() < 0.5,
            ignore_token_ids=draw.choice([None, [2], torch.tensor([1, 4])]),
            reduction=reductions[2],
        ),
        special_token_ids=draw.choice([(), [3]]),
        stopword_ids=draw.choice([(), [0, 5]]),
    )


def test_more_rows_than_a_program_takes_at_once():
    _compare(_texts(module.ROWS + 5, 35))


def test_more_numbers_than_32_bits_count(monkeypatch):
    monkeypatch.setattr(module, "WIDE", 1)  # as many would not fit here
    _compare(_texts(3, 40))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_vocabulary_of_one(rows):
    _compare(_texts(rows, 1), min_activation=MinActivationLoss(top_k=1, threshold=4.0))


def test_more_groups_than_maxima_asked_for():
    _compare(_texts(2, 32 * 9 + 1), min_activation=MinActivationLoss(top_k=2, threshold=9.0))
    _compare(_texts(2, 70), min_activation=MinActivationLoss(top_k=32, threshold=9.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_no_further_off_than_pytorch(dtype, autocast):
    texts = _texts(6, 50, dtype=dtype)
    exact = _run(
        _objective(50, impl="torch"), texts._replace(activations=texts.activations.double())
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        ours, theirs = (_run(_objective(50, impl=impl), texts) for impl in ("triton", "torch"))
    assert ours[0].dtype == torch.float32
    assert ours[2][0].dtype == dtype

    def error(found, of):
        return (found.double() - of.double()).abs().max().item()

    assert error(ours[0], exact[0]) <= error(theirs[0], exact[0]) + 1e-5
    for name, term in ours[1].items():
        assert term.dtype == torch.float32
        assert error(term, exact[1][name]) <= error(theirs[1][name], exact[1][name]) + 1e-5
    # The interpreter cuts bits off where a GPU rounds, once in each of two writes.
    cut = 2.0 ** (-7 if dtype == torch.bfloat16 else -11) * exact[2][0].abs().max().item()
    assert error(ours[2][0], exact[2][0]) <= error(theirs[2][0], exact[2][0]) + cut


def test_easy_texts_keep_their_digits():
    texts = _texts(4, 90, logits=True)
    ids, mask = texts.input_ids.clamp(min=0), texts.attention_mask
    targets = torch.zeros(4, 91).scatter_(1, torch.where(mask, ids, 90), 1.0)[:, :90]
    texts = texts._replace(logits=torch.where(targets > 0, 18.0, -18.0))
    ours = _run(_objective(90), texts)
    exact = _run(
        _objective(90, impl="torch"),
        Texts(texts.activations.double(), ids, mask, texts.logits.double()),
    )
    term, wanted = (each[1]["query_self_reconstruction"].item() for each in (ours, exact))
    assert 0 < wanted < 1e-7
    assert term == pytest.approx(wanted, rel=5e-6)
    torch.testing.assert_close(ours[2][1], exact[2][1].float(), rtol=5e-6, atol=0)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [(1, 4), (2, 40)])
@pytest.mark.parametrize("name", ON_TEXTS)
def test_what_is_not_finite_comes_through(value, where, name):
    texts = _texts(3, 50)
    texts.activations[where] = value
    ours = _run(_objective(50, {name: 2.0}), texts)
    theirs = _run(_objective(50, {name: 2.0}, impl="torch"), texts)
    _assert_alike(ours[:2], theirs[:2])
    assert torch.equal(ours[2][0].isnan(), theirs[2][0].isnan()) or name == "flops"
    if not math.isnan(value):
        _assert_alike(ours[2], theirs[2])


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
def test_what_is_hidden_is_not_seen(estimator):
    texts = _texts(4, 40)
    texts.activations[1, 3] = math.nan  # a stopword, which FLOPS does not see
    texts.activations[2, 5] = math.inf
    flops = IdfFlopsLoss(_penalty(40), estimator=estimator)
    found = _compare(texts, weights={"flops": 1.0}, flops=flops, stopword_ids=[3, 5])
    assert found[0].isfinite()
    assert not found[2][0][:, [3, 5]].any()
    ignoring = SelfReconstructionLoss(ignore_token_ids=[3, 5])
    found = _compare(texts, weights={"self_reconstruction": 1.0}, self_reconstruction=ignoring)
    assert found[0].isfinite()
    assert not found[2][0][:, [3, 5]].any()


def test_a_text_without_tokens_hides_its_nan_from_minimum_activation():
    texts = _texts(3, 40)
    texts.activations[0, 7] = math.nan
    assert not texts.attention_mask[0].any()
    found = _compare(texts, weights={"min_activation": 1.0})
    assert found[0].isfinite()


def test_of_ties_the_smallest_ids_are_taken():
    texts = Texts(torch.tensor([[1.0] * 70, [0.0] * 40 + [-0.0] * 30]))
    found = _run(_objective(70, {"min_activation": 1.0}), texts)
    assert found[0].item() == pytest.approx((3.0 + 4.0) / 2)
    assert found[2][0].nonzero()[:, 1].tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("kind", ["columns", "rows", "transposed"])
def test_any_strides(kind):
    texts = _texts(4, 36)
    x = torch.randn(8, 80)
    x = {"columns": x[:4, :72:2], "rows": x[::2, 3:39], "transposed": x[:4, :36].T.contiguous().T}[
        kind
    ]
    _compare(texts._replace(activations=x))


def test_the_same_bits_twice():
    texts = _texts(5, 70, logits=True)
    one, other = (_run(_objective(70), texts) for _ in range(2))
    for a, b in zip(one[1].values(), other[1].values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip((one[0], *one[2]), (other[0], *other[2]), strict=True):
        assert torch.equal(a, b)


def test_every_output_is_written(monkeypatch):
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def poisoned(made):
        return made.fill_(math.nan) if made.is_floating_point() else made

    texts = _texts(5, 70)
    wanted = _run(_objective(70), texts)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poisoned(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
    found = _run(_objective(70), texts)
    _assert_alike(found, wanted, rtol=0, atol=0)


def test_without_a_gradient_none_is_made():
    texts = _texts(3, 40)
    total, terms = _objective(40)(SpladeBatch(texts, texts))
    assert not total.requires_grad
    wanted = _run(_objective(40), texts)
    torch.testing.assert_close(total, wanted[0])
    assert terms.keys() == wanted[1].keys()
    options = {"weights": [1.0, 0.0, 0.0, 0.0], "is_sum": [False] * 4}
    assert regularisers([False, False], texts.activations, None, **options)[1] == [None, None]


def test_weights_may_be_learned():
    texts = _texts(4, 40)
    results = []
    for impl in ("triton", "torch"):
        weights = {name: torch.tensor(WEIGHTS[name], requires_grad=True) for name in ON_TEXTS[:3]}
        objective = _objective(40, {**weights, "self_reconstruction": 2.0}, impl=impl)
        total, terms = objective(SpladeBatch(texts, texts))
        (3 * total).backward(retain_graph=True)
        for name, weight in weights.items():
            torch.testing.assert_close(weight.grad, 3 * terms[f"query_{name}"])
        total.backward()
        results.append([total, *terms.values(), *(weight.grad for weight in weights.values())])
    _assert_alike(*results)


def test_a_graph_may_be_kept_and_gone_through_again():
    texts = _texts(4, 40)
    x = texts.activations.requires_grad_()
    total, _ = _objective(40)(SpladeBatch(texts, texts))
    (first,) = torch.autograd.grad(5 * total, x, retain_graph=True)
    (again,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(first, 5 * again)


@pytest.mark.parametrize("logits", [False, True])
def test_second_derivatives(logits):
    results = []
    for impl in ("triton", "torch"):
        texts = _texts(3, 40, logits=logits)
        leaves = [x.requires_grad_() for x in (texts.activations, texts.logits) if x is not None]
        weight = torch.tensor(0.5, requires_grad=True)
        objective = _objective(40, WEIGHTS | {"flops": weight}, impl=impl)
        total = objective(SpladeBatch(texts, texts)).total
        gradients = torch.autograd.grad(total, leaves, create_graph=True)
        norm = sum(gradient.square().sum() for gradient in gradients)
        results.append([*gradients, *torch.autograd.grad(norm, [*leaves, weight])])
    assert results[0][-1] != 0
    _assert_alike(*results)


def test_other_losses_stay_and_the_sum_is_theirs_too():
    query, document = _texts(4, 40), _texts(4, 40, seed=1)
    negative = _texts(3, 40, seed=2)
    names = [f"{side}_{name}" for side in ("query", "document") for name in ON_TEXTS]
    results = []
    for impl in ("triton", "torch"):
        objective = SpladeObjective(
            dict.fromkeys([*names, "info_nce", "query_positive_activation"], 0.5),
            language_penalty=LanguagePenaltyLoss(_penalty(40)),
            stopword_ids=[2, 3],
            impl=impl,
        )
        x = [t.activations.detach().requires_grad_() for t in (query, document, negative)]
        of_all = zip((query, document, negative), x, strict=True)
        batch = SpladeBatch(*(t._replace(activations=y) for t, y in of_all))
        total, terms = objective(batch)
        results.append((terms, [total, *torch.autograd.grad(total, x)]))
    assert list(results[0][0]) == list(results[1][0])
    _assert_alike(*([*terms.values(), *rest] for terms, rest in results))


@pytest.mark.parametrize("learned", [False, True])
def test_it_compiles_in_one_graph(learned):
    texts = _texts(4, 40, logits=True)
    weights = {
        name: torch.tensor(value, requires_grad=True) if learned else value
        for name, value in WEIGHTS.items()
    }
    results = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        x, logits = (t.detach().requires_grad_() for t in (texts.activations, texts.logits))
        both = texts._replace(activations=x, logits=logits)
        total, terms = wrap(_objective(40, weights, stopword_ids=[1]))(SpladeBatch(both, both))
        leaves = [x, logits, *(weights.values() if learned else ())]
        results.append([total, *terms.values(), *torch.autograd.grad(3 * total, leaves)])
        assert not any(term.requires_grad for term in terms.values())
    _assert_alike(*results)


@pytest.mark.parametrize("needs", [False, True])
def test_the_operator_says_the_truth_of_itself(needs):
    x = torch.randn(3, 40, requires_grad=needs)
    ids, attended = torch.randint(0, 40, (3, 5)), torch.ones(3, 5, dtype=torch.bool)
    hidden = torch.zeros(40, dtype=torch.bool)
    torch.library.opcheck(
        _regularisers,
        (
            *(x, torch.ones(4), _penalty(40), hidden, _penalty(40), ids, attended, hidden),
            *(torch.tensor([0, 1, 5]), needs, [1.0, 1.0, 1.0, 1.0], [False, True, False, True]),
            *(False, 0.3, 3, 4.0, True),
        ),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


class _Doubled(FlopsLoss):
    def forward(self, activations):
        return 2 * super().forward(activations)


def test_a_loss_of_somebody_elses_is_called(monkeypatch):
    texts = _texts(3, 40)
    batch = SpladeBatch(texts, texts)
    with pytest.raises(ValueError, match="expected the losses of this package, without hooks,"):
        _objective(40, flops=_Doubled())(batch)
    hooked = FlopsLoss()
    hooked.register_forward_hook(lambda *_: torch.tensor(7.0))
    monkeypatch.setattr("sparse_losses.kernels.is_ahead", lambda *_: True)
    plain = _objective(40, impl="torch", flops=FlopsLoss())(batch).terms["query_flops"]
    terms = _objective(40, impl="auto", flops=_Doubled())(batch).terms
    torch.testing.assert_close(terms["query_flops"], 2 * plain)
    assert _objective(40, impl="auto", flops=hooked)(batch).terms["query_flops"] == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_activation": MinActivationLoss(top_k=33)}, "`top_k` of at most 32"),
        ({"weights": {"flops": torch.tensor(1.0).double()}}, "weights in fp32"),
        ({"flops": IdfFlopsLoss(torch.ones(40).double())}, None),
    ],
)
def test_what_the_kernel_cannot_do_is_said(options, message):
    texts = _texts(3, 40)
    objective = _objective(40, **options)
    if message is None:
        objective(SpladeBatch(texts, texts))
        return
    with pytest.raises(ValueError, match=f'expected {message}.* with impl="triton"'):
        objective(SpladeBatch(texts, texts))


def test_learned_penalties_and_no_texts_are_for_pytorch():
    objective = _objective(40)
    objective.language_penalty.token_penalty.requires_grad_()
    texts = _texts(3, 40)
    with pytest.raises(ValueError, match="expected penalties that need no gradient"):
        objective(SpladeBatch(texts, texts))
    none = Texts(*(t[:0] for t in texts[:3]))
    with pytest.raises(ValueError, match="at least one text"):
        _objective(40)(SpladeBatch(none, none))
    double = Texts(texts.activations.double(), *texts[1:3])
    with pytest.raises(ValueError, match="fp32, fp16 or bf16"):
        _objective(40)(SpladeBatch(double, double))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language_penalty": LanguagePenaltyLoss(torch.ones(39))}, "`token_penalty` of shape"),
        ({"min_activation": MinActivationLoss(top_k=41)}, "`top_k` of at most V = 40"),
        ({"stopword_ids": [40]}, "`stopword_ids` below V = 40"),
    ],
)
def test_wrong_arguments_are_the_losses_errors(options, message):
    texts = _texts(3, 40)
    with pytest.raises(ValueError, match=message):
        _objective(40, **options)(SpladeBatch(texts, texts))


def test_ids_outside_the_vocabulary_are_an_error():
    texts = _texts(3, 40)
    texts.input_ids[1], texts.attention_mask[1] = 40, True
    with pytest.raises(ValueError, match=r"expected `input_ids` in \[0, V\) with V = 40, got 40"):
        _objective(40)(SpladeBatch(texts, texts))


def test_an_unbiased_estimate_of_one_text_is_an_error():
    texts = _texts(1, 40)
    with pytest.raises(ValueError, match="at least 2 rows"):
        _objective(40, flops=FlopsLoss(estimator="unbiased"))(SpladeBatch(texts, texts))


def test_subclasses_with_terms_of_their_own_keep_them():
    class More(SpladeObjective):
        def terms(self, batch):
            return {name: 2 * term for name, term in super().terms(batch).items()}

    texts = _texts(3, 40)
    batch = SpladeBatch(texts, texts)
    total = SpladeObjective({"query_flops": 1.0}, impl="torch")(batch).total
    torch.testing.assert_close(More({"query_flops": 1.0}, impl="triton")(batch).total, 2 * total)


def test_terms_with_their_own_graphs_are_pytorchs():
    texts = _texts(3, 40)
    x = texts.activations.requires_grad_()
    terms = _objective(40).terms(SpladeBatch(texts, texts))
    for term in terms.values():
        assert torch.autograd.grad(term, x, retain_graph=True)[0].any()


@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_terms_are_of_the_degree_of_their_formulas(scale):
    texts = _texts(4, 40)
    scaled = texts._replace(activations=scale * texts.activations)
    weights = {"flops": 1.0, "language_penalty": 1.0}
    one, other = (_run(_objective(40, weights, flops=FlopsLoss()), t) for t in (texts, scaled))
    torch.testing.assert_close(other[1]["query_flops"], scale**2 * one[1]["query_flops"])
    torch.testing.assert_close(
        other[1]["query_language_penalty"], scale * one[1]["query_language_penalty"]
    )
    order = torch.tensor([2, 0, 3, 1])
    moved = Texts(*(t[order] for t in texts[:3]))
    one, other = (_run(_objective(40), t) for t in (texts, moved))
    _assert_alike([other[0], other[2][0]], [one[0], one[2][0][order]])


def test_fp16_gradients_wait_for_their_scaler():
    texts = _texts(4, 50, dtype=torch.float16)
    small = {name: 1e-8 * weight for name, weight in WEIGHTS.items()}
    ours, theirs = (
        _run(_objective(50, small, impl), texts, 2.0**20)[2][0] for impl in ("triton", "torch")
    )
    assert ours.dtype == torch.float16
    assert theirs.abs().max() > 1e-4
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-7)


def test_weights_that_change_compile_once():
    texts = _texts(3, 40)
    objective = _objective(40, {"flops": 1.0})
    torch._dynamo.reset()
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    for step in range(10):
        objective.weights["query_flops"] = 1.0 + step / 10
        batch = SpladeBatch(texts, texts)
        torch.testing.assert_close(compiled(batch).total, objective(batch).total)
