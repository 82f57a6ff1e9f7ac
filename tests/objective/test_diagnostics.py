import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses import (
    Diagnostics,
    InfoNCELoss,
    MinActivationLoss,
    SpladeBatch,
    Texts,
    gradient_report,
)
from tests.objective.making import objective

V = 20
SPECIAL, STOP, ALLOWED = [0, 1], [2, 3, 4], list(range(14))


def _sparse(rows, generator=None):
    return (torch.rand(rows, V, generator=generator) - 0.6).relu()


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
    pairs = zip(x, active, strict=True)
    tops = [j for row, a in pairs for j in sorted(a, key=lambda j: -row[j])[:top_k]]
    foreign = set(range(V)) - set(ALLOWED) - set(SPECIAL)
    column = np.clip(x, 0, None).sum(0)

    def mean_of(group):
        return np.mean([row[j] for row in x for j in group if row[j] > 0])

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
        "self_dot": sum((row[row > 0] ** 2).sum() for row in x) / len(live),
        "dead_rows": (rows - len(live)) / rows,
        "dense_rows": sum(len(a) > V / 4 for a in active) / rows,
        "mean_activation": column.sum() / len(entries),
        "flops": sum((column[j] / rows) ** 2 for j in range(V)),
        "index_flops": sum((sum(j in a for a in active) / rows) ** 2 for j in range(V)),
        "longest_list": max(sum(j in a for a in active) / rows for j in range(V)),
        "never_active": sum(all(j not in a for a in active) for j in range(V)) / V,
        "semantic_ratio": mean_of(set(range(V)) - set(SPECIAL) - set(STOP)) / mean_of(STOP),
        "input_recall": recall(ids, mask),
        "other_side_recall": recall(positive_ids, positive_mask),
    }
    for name, group in (("special", set(SPECIAL)), ("stopword", set(STOP)), ("foreign", foreign)):
        report[f"{name}_share"] = sum(j in group for j in entries) / len(entries)
        report[f"{name}_top"] = sum(j in group for j in tops) / len(tops)
    return report


LAYOUTS = {"dense": torch.clone, "CSR": torch.Tensor.to_sparse_csr}


@pytest.mark.parametrize("layout", LAYOUTS)
@given(st.integers(0, 10**6), st.integers(2, 9))
def test_the_report_is_what_loops_count(layout, seed, rows):
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
            Texts(LAYOUTS[layout](x[part]), ids[part], mask[part]),
            other_side=Texts(x[part], other[part], other_mask[part]),
        )
    report = diagnostics.report()
    expected = _oracle(x, ids, mask, other, other_mask)
    assert set(report) == set(expected)
    for name, value in expected.items():
        assert report[name] == pytest.approx(value, rel=1e-5), name

    active = [sorted({j for j in range(V) if r[j] > 0}, key=lambda j: -r[j]) for r in x]
    for listed, held in (
        (diagnostics.longest_lists(4), active),
        (diagnostics.top_tokens(4), [ids[:3] for ids in active]),
    ):
        shares = {j: sum(j in ids for ids in held) / rows for j in range(V)}
        assert [*listed.values()] == sorted((s for s in shares.values() if s), reverse=True)[:4]
        assert all(shares[j] == pytest.approx(share) for j, share in listed.items())


def test_numbers_without_inputs_are_not_in_the_report():
    diagnostics = Diagnostics(V)
    assert diagnostics.report() == diagnostics.top_tokens() == diagnostics.longest_lists() == {}
    diagnostics.update(_sparse(3))
    diagnostics.update(_sparse(0))
    assert diagnostics.report()["texts"] == 3
    assert not {name for name in diagnostics.report() if "share" in name or "recall" in name}
    diagnostics.reset()
    assert diagnostics.report() == {}
    with pytest.raises(ValueError, match=f"V = {V}, got 5"):
        diagnostics.update(torch.rand(3, 5))


def test_the_report_says_in_which_mode_the_texts_were_encoded():
    diagnostics = Diagnostics(4)
    for rows, training in ((3, True), (1, False), (5, None)):
        diagnostics.update(torch.ones(rows, 4), training=training)
    assert diagnostics.report()["training_mode"] == 3 / 4


def test_silent_texts_have_a_report_too():
    diagnostics = _diagnostics()
    diagnostics.update(torch.zeros(4, V))
    report = diagnostics.report()
    assert report.pop("texts") == 4.0
    assert report.pop("dead_rows") == report.pop("never_active") == 1.0
    assert not any(report.values()), "a NaN is not 0"
    assert diagnostics.top_tokens() == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_with_a_nan_is_neither_live_nor_dead(layout):
    x = torch.zeros(4, V)
    x[0, :3] = 1.0
    x[1, :9] = 1.0
    x[1, 19] = math.nan
    x[2, 5] = math.nan
    diagnostics = _diagnostics()
    diagnostics.update(LAYOUTS[layout](x))
    report = diagnostics.report()
    assert [report[x] for x in ("texts", "dead_rows", "active_dimensions")] == [4.0, 0.25, 3.0]
    assert math.isnan(report["flops"])
    assert math.isnan(report["mean_activation"])


def test_batches_from_inside_and_outside_inference_mode_add_up():
    diagnostics, expected, x = _diagnostics(), _diagnostics(), _sparse(6)
    for first, inference in ((0, True), (2, False), (4, True)):
        with torch.inference_mode(inference):
            diagnostics.update(x[first : first + 2])
    expected.update(x)
    assert diagnostics.report() == pytest.approx(expected.report())


WEIGHTS = {"info_nce": 3.0, "query_flops": 0.7, "document_flops": 0.2, "triplet_margin": 1.0}
SIDES = ("anchor", "positive", "negative")


def _batch(logits=False):
    def texts(*shape):
        pooled, ids = torch.randn(*shape, V), torch.randint(0, V, (*shape, 5))
        return Texts(pooled.relu().log1p(), ids, ids >= 0, pooled if logits else None)

    return SpladeBatch(texts(6), texts(6), texts(6, 2))


@pytest.mark.parametrize("logits", [False, True])
def test_the_gradient_report_agrees_with_autograd(logits):
    weights = {**WEIGHTS, "document_self_reconstruction": 2.0, "query_min_activation": 1.0}
    losses = {"info_nce": InfoNCELoss(temperature=0.5)}
    losses["min_activation"] = MinActivationLoss(threshold=5.0)
    batch = _batch(logits)
    report = gradient_report(objective(weights, losses), batch)

    gradients = {}
    for name, weight in weights.items():
        leaves = [(t.activations if t.logits is None else t.logits).clone() for t in batch[:3]]
        parts = iter([x.requires_grad_() for x in leaves])

        def again(texts, parts=parts):
            leaf = next(parts)
            if texts.logits is None:
                return texts._replace(activations=leaf)
            return texts._replace(activations=leaf.relu().log1p(), logits=leaf)

        alone = objective({name: weight}, losses)
        alone(batch._replace(**{s: again(getattr(batch, s)) for s in SIDES})).total.backward()
        gradients[name] = torch.cat(
            [(torch.zeros_like(x) if x.grad is None else x.grad).flatten() for x in leaves]
        ).double()
    expected = {f"norm/{name}": gradient.norm().item() for name, gradient in gradients.items()}
    for a, b in itertools.combinations(weights, 2):
        cosine = torch.nn.functional.cosine_similarity(gradients[a], gradients[b], dim=0)
        expected[f"cosine/{a}/{b}"] = cosine.item()
    assert report == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_gradient_report_of_sparse_activations_is_that_of_dense_ones():
    run = objective({"query_flops": 1.0, "document_flops": 1.0})
    x, y = _sparse(4), _sparse(4)
    dense = gradient_report(run, SpladeBatch(Texts(x), Texts(y)))
    sides = [Texts(side.to_sparse_csr()) for side in (x, y)]
    assert gradient_report(run, SpladeBatch(*sides)) == pytest.approx(dense)
    assert dense["norm/query_flops"] > 0
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"got torch\.inference_mode"):
        gradient_report(run, SpladeBatch(*sides))


def test_the_gradient_report_leaves_the_run_alone():
    encoder = torch.nn.Linear(4, V)
    hidden = encoder(torch.randn(6, 4))
    batch = SpladeBatch(Texts(hidden.relu()), Texts(hidden.relu()))
    made = objective({"info_nce": 1.0, "query_flops": 1.0})
    calls = []
    encoder.register_full_backward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        report = gradient_report(made, batch)
    assert report["norm/info_nce"] > 0
    assert calls == []
    assert encoder.weight.grad is None


def test_a_term_at_rest_has_no_gradient_and_no_cosine():
    losses = {"min_activation": MinActivationLoss(threshold=0.0)}
    made = objective({"info_nce": 1.0, "query_min_activation": 1.0}, losses)
    report = gradient_report(made, _batch())
    assert report["norm/query_min_activation"] == 0.0
    assert report["cosine/info_nce/query_min_activation"] == 0.0
