"""``calibrate`` against loops over the vectors' entries, for every kind of model but theirs."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparse_losses import SpladeHead, calibrate, calibrate_threshold
from sparse_losses.functional import splade_pool
from sparse_losses.sparsity import entries
from tests.representation.tiny_models import CORPUS, TEXTS, VARIANTS, dense, make, reloaded

DOCUMENTS = [*CORPUS[:7], "dogs over the fox", "추천 메뉴", "U.S.A. weight"]
QUIET = {"verbose": False}


def kept(logits, t, at_least):
    """Return which pooled logits stay above a threshold, by loops."""
    result = np.zeros(logits.shape, dtype=bool)
    for i, row in enumerate(logits):
        last = min(sorted((x for x in row if x > 0), reverse=True)[:at_least], default=np.inf)
        for j, x in enumerate(row):
            result[i, j] = x > 0 and (x > t or x >= last)
    return result


def products(queries, documents):
    """Return the expected products of a query and a document, by a loop."""
    return sum(q.mean() * d.mean() for q, d in zip(queries.T, documents.T, strict=True))


def check_nearest(given, t, target, *sides):
    """Assert that no threshold gives a number nearer to the target, and leaves something."""
    thresholds = {0.0, *(x for rows in sides for x in rows.flatten() if x > 0)}
    reachable = [x for each in thresholds if (x := given(each)) > 0] or [0.0]
    assert abs(given(t) - target) <= 1e-9 + min(abs(x - target) for x in reachable)


@st.composite
def problems(draw):
    """Logits of documents and queries, with many ties, and how many entries stay at least."""
    width, numbers = draw(st.integers(2, 5)), st.integers(-2, 5)
    shapes = [(draw(st.integers(1, 6)), width) for _ in range(2)]
    logits = [draw(hnp.arrays(np.float64, shape, elements=numbers)) for shape in shapes]
    return *logits, draw(st.integers(0, 2))


def batches(logits):
    """Return hidden states that a head with the unit matrix gives as logits, two a batch."""
    hidden = torch.from_numpy(logits)[:, None]
    return [(part, torch.ones(len(part), 1)) for part in hidden.split(2)]


@given(problems(), st.floats(0.05, 1.0))
@pytest.mark.filterwarnings("ignore:expected")
def test_counts_are_the_nearest_there_are_and_the_report_is_right(problem, share):
    documents, queries, keep = problem
    target = max(keep, share * documents.shape[1])
    head = SpladeHead(torch.eye(documents.shape[1], dtype=torch.float64))
    options = {"queries": batches(queries), "query_target": target, "keep_at_least": keep}
    found = calibrate(head, batches(documents), target, **options, **QUIET)
    after, left = found.after, []
    for logits, t in zip((documents, queries), found[:2], strict=True):
        check_nearest(lambda t, x=logits: kept(x, t, keep).sum() / len(x), t, target, logits)
        left.append(kept(logits, t, keep))
    pruned = torch.cat([head(*batch) for batch in batches(documents)]).numpy() > 0
    assert (pruned == left[0]).all()
    assert after[:2] == pytest.approx([x.sum(1).mean() for x in left])
    assert after.products == pytest.approx(products(left[1], left[0]))
    assert after.longest_list == pytest.approx(left[0].mean(0).max())
    assert after[4:] == tuple((~x.any(1)).sum() for x in left)
    assert found.before.products == pytest.approx(products(queries > 0, documents > 0))
    assert found.before[4:] == after[4:] or keep == 0, "a text became empty"


@given(problems(), st.floats(0.01, 3.0))
@pytest.mark.filterwarnings("ignore:expected")
def test_one_threshold_gives_the_products_that_are_nearest(problem, target):
    documents, queries, keep = problem
    head = SpladeHead(torch.eye(documents.shape[1], dtype=torch.float64))
    options = {"queries": batches(queries), "target_products": target, "keep_at_least": keep}
    found = calibrate(head, batches(documents), **options, **QUIET)
    assert found.document_threshold == found.query_threshold == head.threshold

    def given(t):
        return products(kept(queries, t, keep), kept(documents, t, keep))

    assert found.after.products == pytest.approx(given(head.threshold))
    check_nearest(given, head.threshold, target, documents, queries)


@given(problems(), st.floats(0.05, 1.0), st.sampled_from(["relu", "log1p_relu"]))
@pytest.mark.filterwarnings("ignore:expected")
def test_threshold_is_in_units_of_the_logits(problem, share, activation):
    logits, target = problem[0], share * problem[0].shape[1]
    mask = torch.ones(len(logits), 1)
    x = splade_pool(torch.from_numpy(logits)[:, None], mask, activation=activation)
    t = calibrate_threshold(x, target, activation=activation)
    assert calibrate_threshold(x[None], target, activation=activation) == t
    check_nearest(lambda t: (logits > t).sum() / len(logits), t, target, logits)


@pytest.mark.parametrize(("name", "target"), [("target_active", 32), ("target_products", 2.0)])
def test_other_texts_have_what_was_asked_for(name, target):
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(2000, generator=generator)
    both = [torch.randn(300, 1, 2000, generator=generator) * spread - 0.5 for _ in range(4)]
    head, mask = SpladeHead(torch.eye(2000)), torch.ones(300, 1)
    queries = [(both[1], mask)]
    after = calibrate(head, [(both[0], mask)], queries=queries, **{name: target}, **QUIET).after
    one, other = ((head(x, mask) > 0).double().mean(0) for x in both[2:])
    has_products = name == "target_products"
    found = (one @ other).item() if has_products else one.sum().item()
    assert found == pytest.approx(target, rel=0.1)
    own = after.products if has_products else after.document_active
    assert own == pytest.approx(target, rel=0.02)


ENCODERS = {**VARIANTS, "log1p": {"activation": "log1p_relu"}}
ENCODERS["decoder"] = {"architecture": "gemma2", "logit_scale": 0.5}


def encoder_of(kind):
    return make(**ENCODERS[kind])


def bias_of(encoder):
    return encoder.head.bias if encoder.expansion else encoder.importance[-1].bias


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.filterwarnings("ignore:sentence-transformers")
def test_an_encoder_keeps_both_sides_and_every_budget(kind, tmp_path):
    encoder, rare = encoder_of(kind), kind in ("input tokens", "all")
    numbers, query_targets = ((2, 3, 2.5), 1.5) if rare else ((9, 33.3, 20), (4, 12, 8))
    whole = {side: dense(encoder, DOCUMENTS, side=side) for side in ("document", "query")}
    options = {"queries": DOCUMENTS, "query_target": query_targets, "batch_size": 3, **QUIET}
    calibration = encoder.calibrate(DOCUMENTS, numbers, **options)
    largest = max(numbers)
    assert encoder.budgets == calibration.budgets
    assert sorted(encoder.budgets) == sorted(numbers)
    assert encoder.budgets[largest] == calibration[:2]
    for one in (encoder, reloaded(encoder, tmp_path)):
        for i, number in enumerate((*numbers, None)):
            queries = query_targets if rare else (*query_targets, max(query_targets))[i]
            for side, target in (("document", number or largest), ("query", queries)):
                left = dense(one, DOCUMENTS, side=side, active=number)
                assert (left > 0).sum(1).double().mean().item() == pytest.approx(target, rel=0.02)
                torch.testing.assert_close(left, whole[side].where(left > 0, 0.0))
                assert ((left > 0).any(1) == (whole[side] > 0).any(1)).all(), "none becomes empty"
    batch = encoder.tokenize(DOCUMENTS)
    with torch.no_grad():
        assert (encoder(**batch) > 0).sum() == (whole["document"] > 0).sum(), "no side"
        pruned, logits = encoder(**batch, side="query", active=numbers[0], return_logits=True)
        assert torch.equal(logits, encoder(**batch, return_logits=True)[1])
    torch.testing.assert_close(pruned, dense(encoder, DOCUMENTS, side="query", active=numbers[0]))
    with pytest.raises(ValueError, match="`active` to be one of"):
        encoder.encode(DOCUMENTS, active=7)


SHIFTED = [("plain", (7.4, 110, 149)), ("gate", (20, 110)), ("idf", (20,)), ("all", (2, 4.5))]


@pytest.mark.parametrize(("kind", "targets"), SHIFTED)
def test_a_shifted_bias_gives_the_number_to_both_sides(kind, targets):
    encoder = encoder_of(kind)
    with torch.no_grad():
        if not encoder.expansion:  # logits of both signs
            encoder.importance[-1].bias.fill_(-0.1)
    for target in targets:
        bias, before = bias_of(encoder).clone(), active(encoder)
        found = calibrate(encoder, DOCUMENTS, target, queries=TEXTS, method="shift", **QUIET)
        assert found.before.document_active == pytest.approx(before, rel=0.02)
        assert active(encoder) == pytest.approx(target, rel=0.02)
        torch.testing.assert_close(bias_of(encoder), bias - found.shift)
        assert found.after.document_active == pytest.approx(target, rel=0.02)
        assert active(encoder, TEXTS) == pytest.approx(found.after.query_active, rel=0.02)


def active(encoder, texts=DOCUMENTS):
    return len(encoder.encode(texts).values()) / len(texts)


@pytest.mark.parametrize("expansion", [True, False])
def test_a_logit_of_exactly_0_is_no_absent_one(expansion):
    encoder = make(expansion=expansion)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()
        bias_of(encoder)[150 // 2 :] = 1.0
    special, number = {*encoder.tokenizer.all_special_ids}, 150
    if not expansion:  # only these can be active
        rows = [{*row} - special for row in encoder.tokenizer(DOCUMENTS)["input_ids"]]
        number = sum(map(len, rows)) / len(rows)
    calibrate(encoder, DOCUMENTS, number, method="shift", **QUIET)
    assert active(encoder) == pytest.approx(number)


def test_shift_to_products_and_of_a_bias_in_half_precision():
    encoder, half = make(), make().to(torch.bfloat16)
    options = {"queries": TEXTS, "method": "shift", **QUIET}
    found = calibrate(encoder, DOCUMENTS, target_products=3.0, **options)
    shares = [(dense(encoder, x) > 0).double().mean(0) for x in (DOCUMENTS, TEXTS)]
    assert (shares[0] @ shares[1]).item() == pytest.approx(found.after.products)
    assert found.after.products == pytest.approx(3.0, rel=0.1)
    half.calibrate(DOCUMENTS, 12, method="shift", **QUIET)
    assert active(half) == pytest.approx(12, rel=0.05)


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr])
def test_a_head_is_shifted_and_pruned_whatever_its_layout(layout):
    torch.manual_seed(0)
    bias = torch.nn.Parameter(torch.zeros(30))
    options = {"threshold": torch.zeros(30), "softcap": 4.0, "layout": layout}
    head = SpladeHead(torch.randn(30, 8), bias, **options)
    data = [(torch.randn(4, 5, 8), torch.ones(4, 5)) for _ in range(3)]
    shifted = calibrate(head, iter(data), 12, method="shift", **QUIET)
    assert shifted.after.document_active == 12
    assert shifted.shift == pytest.approx(-head.bias[0].item(), rel=1e-5)
    if layout == torch.sparse_csr:
        calibrate(head, data, 6.5, **QUIET)
        with pytest.raises(ValueError, match="expected dense vectors to prune"):
            head(*data[0])
    held = calibrate(head, iter(data), 6.5, keep_at_least=0, **QUIET).document_threshold
    assert sum((head(*batch).to_dense() > 0).sum() for batch in data) == 6.5 * 12
    found = calibrate(head, data, queries=data, query_target=2, keep_at_least=0, **QUIET)
    assert head.threshold == found.document_threshold == held < found.query_threshold
    with pytest.raises(TypeError, match=r"a list of pairs \(hidden, attention_mask\), got one T"):
        calibrate(head, data[0], 2)
    for model, texts in ((SpladeHead(torch.eye(8)), data), (encoder_of("decoder"), DOCUMENTS)):
        with pytest.raises(ValueError, match="expected a projection with a bias to shift"):
            calibrate(model, texts, 2, method="shift")


@pytest.mark.parametrize(("target", "is_known"), [(0.5, True), (5.0, True), (5.0, False)])
def test_memory_is_bounded(target, is_known, monkeypatch):
    """A count is exact where it fits; else a sample of the texts is used."""
    torch.manual_seed(0)
    monkeypatch.setattr(entries, "LIMIT", 8000)
    rows = torch.randn(1600, 50).relu()
    texts = entries.Entries("document", 0.0, 0, target * 1600 if is_known else math.inf)
    for part in rows.split(4):
        texts.add(part)
        assert sum(len(values) for _, _, values in texts.parts) <= 8000
    texts.join()
    count = (rows > texts.limit(target)).sum().item() / 1600
    assert count == pytest.approx(target, rel=1e-9 if target == 0.5 else 0.05)


def test_fewer_than_asked_is_a_warning_and_all_are_kept():
    encoder, data = make(), [(torch.tensor([[[1.0, 2.0, 0.0]]]), torch.ones(1, 1))]
    with pytest.warns(UserWarning, match=r"expected 150 active dimensions a document, got 112\.9"):
        found = calibrate(encoder, DOCUMENTS, 150, **QUIET)
    assert encoder.budgets == {150: (0.0, None)}
    assert found.before == found.after
    with pytest.warns(UserWarning, match=r"expected 140 products of a .*, got .*: all are kept"):
        calibrate(encoder, DOCUMENTS, queries=TEXTS, target_products=140, **QUIET)
    with pytest.warns(UserWarning, match="expected 3 active dimensions a row, got 2: all"):
        assert calibrate_threshold(torch.tensor([[1.0, 2.0, 0.0]]), 3) == 0.0
    with pytest.warns(UserWarning, match=r"expected 0.5 products of a .*, got 1 at least"):
        calibrate(SpladeHead(torch.eye(3)), data, queries=data, target_products=0.5, **QUIET)


@pytest.mark.filterwarnings("error:documents have")
def test_a_dense_model_is_told_to_start_sparse():
    with pytest.warns(UserWarning, match=r"113 of 150 dimensions: .*texts, 9, method=.shift"):
        calibrate(make(), DOCUMENTS, 5, **QUIET)
    calibrate(make(), DOCUMENTS, 5, method="shift", **QUIET)


def test_a_side_without_a_number_keeps_its_threshold():
    encoder = make()
    only = encoder.calibrate(DOCUMENTS, queries=TEXTS, query_target=6, **QUIET)
    assert encoder.budgets == {only.before.document_active: (None, only.query_threshold)}
    held = encoder.calibrate(DOCUMENTS, (9, 5), **QUIET)
    assert held.query_threshold == only.query_threshold
    found = encoder.calibrate(DOCUMENTS, queries=TEXTS, query_target=4, **QUIET)
    documents = [{n: pair[0] for n, pair in x.budgets.items()} for x in (found, held)]
    assert documents[0] == documents[1]
    assert {pair[1] for pair in found.budgets.values()} == {found.query_threshold}
    assert found.after[:2] == pytest.approx((9, 4))
    assert found.before.document_active > 100


def test_it_prints_what_it_set_shows_progress_and_restores_modes(capsys):
    encoder = make().train()
    encoder.model.base_model.eval()
    modes = [module.training for module in encoder.modules()]
    found = calibrate(encoder, DOCUMENTS, (5, 9), queries=TEXTS, query_target=3, show_progress=True)
    out, err = capsys.readouterr()
    assert out == f"{found}\n"
    for words in ("documents: 112.9 -> 9 dim", "queries: 110.4 -> 3 dim", "active=): 5, 9"):
        assert words in out
    assert "Calibrating: 100%" in err
    assert [module.training for module in encoder.modules()] == modes
    other = copy.deepcopy(encoder).eval()
    assert calibrate(other, DOCUMENTS, 9, **QUIET).document_threshold == found.document_threshold
    assert capsys.readouterr() == ("", "")


def test_nan_counts_for_nothing_and_stays():
    encoder = make()
    expected = calibrate(encoder, DOCUMENTS, 9, **QUIET)
    with torch.no_grad():
        encoder.head.bias[3] = torch.nan
    found = calibrate(encoder, DOCUMENTS, 9, **QUIET)
    assert found.after.document_active == pytest.approx(9)
    assert found.before.document_active <= expected.before.document_active
    with torch.no_grad():
        assert encoder(**encoder.tokenize(DOCUMENTS), side="document")[:, 3].isnan().all()
    x = torch.tensor([[torch.nan, 3.0, 2.0, 1.0]])
    assert 2.0 <= math.log1p(calibrate_threshold(x, 1)) < 3.0


def test_bad_input_is_named_and_changes_nothing():
    encoder = make(budgets={7: (0.5, None)})
    bias = bias_of(encoder).clone()
    defaults = {"model": encoder, "documents": DOCUMENTS, "target_active": 5}
    for options, message in [
        ({"target_active": 0}, "`target_active`"),
        ({"target_active": 151}, "`target_active` from `keep_at_least` = 1 to V = 150, got 151"),
        ({"target_active": 0.5}, "`keep_at_least` = 1 .*, got 0.5"),
        ({"target_active": None}, "dimensions or `target_products`, got "),
        ({"target_products": 1.0}, "dimensions or `target_products`, got "),
        ({"query_target": 3}, "expected `queries`"),
        ({"target_active": None, "target_products": 1.0}, "expected `queries`"),
        ({"target_active": None, "target_products": 0, "queries": TEXTS}, "`target_products`"),
        ({"target_active": (5, 9), "method": "shift"}, "expected one `target_active`"),
        ({"query_target": 3, "method": "shift"}, "one shift changes both sides"),
        ({"method": "cut"}, "`method`"),
        ({"keep_at_least": -1}, "`keep_at_least`"),
        ({"queries": []}, "at least one query, got none"),
        ({"documents": "a text"}, "`texts`"),
        ({"documents": (text for text in TEXTS)}, "`texts`"),
        ({"model": torch.nn.Linear(2, 2)}, "expected a SpladeEncoder, a SpladeHead, or a Spars"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            calibrate(**(defaults | options))
    assert encoder.budgets == {7: (0.5, None)}
    assert torch.equal(bias_of(encoder), bias)


def test_wrong_activations_are_named():
    for x, target, message in [
        (torch.ones(2, 4), 4.5, "`target_active` above 0 and up to V = 4, got 4.5"),
        (torch.ones(4), 1, r"shape \[B, V\] or \[B, N, V\], got \[4\]"),
        (torch.tensor([[1.0, -1.0]]), 1, "activations >= 0, got -1"),
        (torch.ones(0, 4), 1, "at least one row, got none"),
        (torch.tensor([[800.0, 900.0]]), 1, "those of finite logits, got 900"),
        (torch.ones(2, 4).to_sparse_csr(), 1, "`activations` to be dense"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            calibrate_threshold(x, target)
