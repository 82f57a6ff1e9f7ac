import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses import (
    Diagnostics,
    InfoNCELoss,
    SpladeBatch,
    SpladeObjective,
    Texts,
    advise,
)
from sparse_losses.functional import context_overlap, gradient_report, recall_at_k

V = 20
SPECIAL, STOP, ALLOWED = [0, 1], [2, 3, 4], list(range(14))


def _sparse(rows, generator=None):
    x = torch.rand(rows, V, generator=generator) - 0.6
    return x.relu()


def _diagnostics(**options):
    known = {"special_token_ids": SPECIAL, "stopword_ids": STOP, "allowed_token_ids": ALLOWED}
    return Diagnostics(V, **{**known, "top_k": 3, **options})


def _oracle(x, ids, mask, positive_ids, positive_mask, top_k=3):
    """Loops in float64."""
    x = x.double().numpy()
    rows = len(x)
    active = [{j for j in range(V) if row[j] > 0} for row in x]
    live = [a for a in active if a]
    entries = [j for a in active for j in a]
    tops = [
        j
        for row, a in zip(x, active, strict=True)
        for j in sorted(a, key=lambda j: -row[j])[:top_k]
    ]
    foreign = set(range(V)) - set(ALLOWED) - set(SPECIAL)
    column = np.clip(x, 0, None).sum(0)
    p = column[column > 0] / column.sum()

    def mean_of(group):
        values = [row[j] for row in x for j in group if row[j] > 0]
        return sum(values) / len(values)

    def recall(all_ids, all_mask):
        shares = []
        for a, i, m in zip(active, all_ids.tolist(), all_mask.tolist(), strict=True):
            own = {t for t, on in zip(i, m, strict=True) if on} - set(SPECIAL)
            if own:
                shares.append(len(own & a) / len(own))
        return sum(shares) / len(shares)

    report = {
        "texts": rows,
        "active_dimensions": sum(map(len, live)) / len(live),
        "smallest": min(map(len, live)),
        "largest": max(map(len, active)),
        "dead_rows": (rows - len(live)) / rows,
        "dense_rows": sum(len(a) > V / 4 for a in active) / rows,
        "mean_activation": column.sum() / len(entries),
        "flops": sum((column[j] / rows) ** 2 for j in range(V)),
        "index_flops": sum((sum(j in a for a in active) / rows) ** 2 for j in range(V)),
        "effective_tokens": math.exp(-sum(q * math.log(q) for q in p)),
        "never_active": sum(all(j not in a for a in active) for j in range(V)) / V,
        "semantic_ratio": mean_of(set(range(V)) - set(SPECIAL) - set(STOP)) / mean_of(STOP),
        "input_recall": recall(ids, mask),
        "other_side_recall": recall(positive_ids, positive_mask),
    }
    for name, group in (("special", set(SPECIAL)), ("stopword", set(STOP)), ("foreign", foreign)):
        report[f"{name}_share"] = sum(j in group for j in entries) / len(entries)
        report[f"{name}_top"] = sum(j in group for j in tops) / len(tops)
    return report


@given(st.integers(0, 10**6), st.integers(2, 9))
def test_the_report_is_what_loops_count(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    x = _sparse(rows, generator)
    x[0] = 0.0
    x[1, [2, 9]] = 1.0
    ids, other = (torch.randint(0, V, (rows, 7), generator=generator) for _ in range(2))
    mask, other_mask = (torch.randint(0, 2, (rows, 7), generator=generator) for _ in range(2))
    ids[0, 0], mask[0, 0], other[0, 0], other_mask[0, 0] = 5, 1, 6, 1
    diagnostics = _diagnostics()
    for part in (slice(0, 1), slice(1, rows)):  # batches add up
        diagnostics.update(
            Texts(x[part], ids[part], mask[part]),
            other_side=Texts(x[part], other[part], other_mask[part]),
        )
    report = diagnostics.report()
    expected = _oracle(x, ids, mask, other, other_mask)
    assert set(report) == set(expected)
    for name, value in expected.items():
        assert report[name] == pytest.approx(value, rel=1e-5), name

    on_top = [sorted({j for j in range(V) if r[j] > 0}, key=lambda j: -r[j])[:3] for r in x]
    shares = {j: sum(j in top for top in on_top) / rows for j in range(V)}
    found = diagnostics.top_tokens(4)
    assert list(found.values()) == sorted((s for s in shares.values() if s), reverse=True)[:4]
    assert all(shares[j] == pytest.approx(share) for j, share in found.items())


def test_the_top_of_nothing_is_nothing():
    diagnostics = _diagnostics()
    assert diagnostics.top_tokens() == {}
    diagnostics.update(torch.zeros(2, V))
    assert diagnostics.top_tokens() == {}
    with pytest.raises(ValueError, match="expected `k` to be an integer >= 1, got 0"):
        diagnostics.top_tokens(0)


def test_what_cannot_be_said_is_not_in_the_report():
    diagnostics = Diagnostics(V)
    assert diagnostics.report() == {}
    diagnostics.update(_sparse(3))
    assert not {name for name in diagnostics.report() if "share" in name or "recall" in name}
    diagnostics.reset()
    assert diagnostics.report() == {}


def test_silent_texts_have_a_report_too():
    diagnostics = _diagnostics()
    diagnostics.update(torch.zeros(4, V))
    report = diagnostics.report()
    assert report["dead_rows"] == 1.0
    assert report["active_dimensions"] == report["effective_tokens"] == report["index_flops"] == 0.0
    assert all(math.isfinite(value) for value in report.values())


def test_no_number_hides_a_nan():
    diagnostics = _diagnostics()
    diagnostics.update(torch.full((4, V), math.nan))
    report = diagnostics.report()
    assert report["dead_rows"] == 0.0
    hidden = ("flops", "mean_activation", "active_dimensions", "largest", "effective_tokens")
    assert {name: report[name] for name in hidden} == pytest.approx(
        dict.fromkeys(hidden, math.nan), nan_ok=True
    )
    assert all(isinstance(finding.symptom, str) for finding in advise(report))


def test_a_row_with_a_nan_is_neither_live_nor_dead():
    x = torch.zeros(4, V)
    x[0, :3] = 1.0
    x[1, :9] = 1.0
    x[1, 19] = math.nan
    x[2, 5] = math.nan
    diagnostics = _diagnostics()
    diagnostics.update(x)
    report = diagnostics.report()
    assert report["texts"] == 4.0
    assert report["dead_rows"] == 0.25
    assert report["active_dimensions"] == report["smallest"] == report["largest"] == 3.0
    assert math.isnan(report["flops"])
    assert math.isnan(report["mean_activation"])


def test_infinite_activations_are_all_that_counts():
    diagnostics = _diagnostics()
    x = torch.ones(2, V)
    x[0, :2] = math.inf
    diagnostics.update(x)
    report = diagnostics.report()
    assert report["flops"] == report["mean_activation"] == math.inf
    assert report["effective_tokens"] == pytest.approx(2.0)


def test_batches_from_inside_and_outside_inference_mode_add_up():
    diagnostics, expected = _diagnostics(), _diagnostics()
    x = _sparse(6)
    with torch.inference_mode():
        diagnostics.update(x[:2])
    diagnostics.update(x[2:4])
    with torch.inference_mode():
        diagnostics.update(x[4:])
    expected.update(x)
    assert diagnostics.report() == pytest.approx(expected.report())


def test_nothing_grows_with_the_number_of_updates():
    diagnostics = _diagnostics()

    def held():
        return sum(x.numel() for x in vars(diagnostics).values() if isinstance(x, torch.Tensor))

    diagnostics.update(_sparse(4))
    first = held()
    for _ in range(20):
        diagnostics.update(_sparse(4))
    assert held() == first
    assert diagnostics.report()["texts"] == 84


def test_a_report_prints_one_line_a_number():
    diagnostics = _diagnostics()
    diagnostics.update(_sparse(4))
    report = diagnostics.report()
    lines = str(report).splitlines()
    assert len(lines) == len(report)
    assert lines[1].split()[0] == "active_dimensions"


def test_another_vocabulary_is_an_error():
    with pytest.raises(ValueError, match=rf"\[B, {V}\], got \[3, 5\]"):
        Diagnostics(V).update(torch.rand(3, 5))


def test_the_overlap_of_contexts():
    one = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4, [2.0, 0, 0, 1.0]])
    other = torch.tensor([[0.0, 3.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0] * 4, [1.0, 0, 0, 9.0]])
    torch.testing.assert_close(context_overlap(one, other), torch.tensor([0.25, 0.0, 0.0, 1.0]))


def recall(scores, positive, k):
    """Loops over the positives of each query; half of the tied candidates rank above."""
    shares = []
    for row, wanted in zip(scores, positive, strict=True):
        found = 0
        for own in (score for score, is_wanted in zip(row, wanted, strict=True) if is_wanted):
            above, tied = sum(s > own for s in row), sum(s == own for s in row) - 1
            found += 1 + above + tied / 2 <= k
        if any(wanted):
            shares.append(found / sum(wanted))
    return sum(shares) / len(shares) if shares else 0.0


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_recall_counts_positives_among_the_best(seed, k):
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.rand(5, 6, generator=generator) * 4).round()  # with ties
    positive = torch.randint(0, 2, (5, 6), generator=generator)
    positive[0] = 0
    expected = recall(scores.tolist(), positive.tolist(), k)
    assert recall_at_k(scores, positive, k).item() == pytest.approx(expected, abs=1e-6)


def test_scoring_everything_alike_finds_nothing():
    assert recall_at_k(torch.zeros(5, 100), torch.arange(5), 10) == 0.0


def test_recall_of_one_positive_a_query():
    scores = torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.3, 0.9], [0.1, 0.2, 0.3]])
    positive = torch.tensor([0, 1, 0])
    found = [recall_at_k(scores, positive, k).item() for k in (1, 2, 3)]
    assert found == pytest.approx([1 / 3, 2 / 3, 1.0])
    with pytest.raises(ValueError, match="at most C = 3, got 4"):
        recall_at_k(scores, positive, 4)


WEIGHTS = {"info_nce": 3.0, "query_flops": 0.7, "document_flops": 0.2, "triplet_margin": 1.0}


SIDES = ("anchor", "positive", "negative")


def _batch(logits=False):
    def texts(*shape):
        pooled = torch.randn(*shape, V)
        return Texts(
            pooled.relu().log1p(),
            torch.randint(0, V, (*shape, 5)),
            torch.ones(*shape, 5, dtype=torch.int64),
            pooled if logits else None,
        )

    return SpladeBatch(texts(6), texts(6), texts(6, 2))


@pytest.mark.parametrize("logits", [False, True])
def test_the_gradient_report_agrees_with_autograd(logits):
    weights = {**WEIGHTS, "document_self_reconstruction": 2.0, "query_min_activation": 1.0}
    objective = SpladeObjective(weights, info_nce=InfoNCELoss(temperature=0.5))
    objective.min_activation.threshold = 5.0
    batch = _batch(logits)
    report = gradient_report(objective, batch)

    gradients = {}
    for name, weight in weights.items():
        alone = SpladeObjective({name: weight}, info_nce=InfoNCELoss(temperature=0.5))
        alone.min_activation.threshold = 5.0
        leaves = [(t.activations if t.logits is None else t.logits).clone() for t in batch[:3]]
        parts = iter([x.requires_grad_() for x in leaves])

        def again(texts, parts=parts):
            leaf = next(parts)
            if texts.logits is None:
                return texts._replace(activations=leaf)
            return texts._replace(activations=leaf.relu().log1p(), logits=leaf)

        alone(batch._replace(**{s: again(getattr(batch, s)) for s in SIDES})).total.backward()
        gradients[name] = torch.cat(
            [(torch.zeros_like(x) if x.grad is None else x.grad).flatten() for x in leaves]
        ).double()
    assert set(report.norms) == set(weights)
    for name, gradient in gradients.items():
        assert report.norms[name] == pytest.approx(gradient.norm().item(), rel=1e-6)
    for (a, b), cosine in report.cosines.items():
        expected = torch.nn.functional.cosine_similarity(gradients[a], gradients[b], dim=0)
        assert cosine == pytest.approx(expected.item(), abs=1e-6)
    assert len(report.cosines) == len(weights) * (len(weights) - 1) / 2


def test_the_gradient_report_leaves_the_run_alone():
    encoder = torch.nn.Linear(4, V)
    hidden = encoder(torch.randn(6, 4))
    batch = SpladeBatch(Texts(hidden.relu()), Texts(hidden.relu()))
    objective = SpladeObjective({"info_nce": 1.0, "query_flops": 1.0})
    calls = []
    encoder.register_full_backward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        report = gradient_report(objective, batch)
    assert report.norms["info_nce"] > 0
    assert calls == []
    assert encoder.weight.grad is None
    assert set(report.as_dict()) == {
        "norm/info_nce",
        "norm/query_flops",
        "cosine/info_nce/query_flops",
    }
    assert "query_flops" in str(report)


def test_a_term_at_rest_has_no_gradient_and_no_cosine():
    objective = SpladeObjective({"info_nce": 1.0, "query_min_activation": 1.0})
    objective.min_activation.threshold = 0.0
    report = gradient_report(objective, _batch())
    assert report.norms["query_min_activation"] == 0.0
    assert report.cosines["info_nce", "query_min_activation"] == 0.0
