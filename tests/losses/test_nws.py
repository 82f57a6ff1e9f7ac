"""NWS: its formula, its theorems, its edges."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse_losses import NWSLoss
from sparse_losses.fast.label_lists import DenseLabels, LabelLists, largest_of_labels
from sparse_losses.functional import info_nce_loss, nws_loss
from tests.cases import assert_follows_the_formula
from tests.strategies import draw, nws_problems, seeds, temperatures


@given(nws_problems())
def test_value_is_the_formula_for_any_references(problem):
    arrays, options = problem
    assert_follows_the_formula("nws", arrays, **options)


def labels(seed, rows, width, density=0.5, filled=True):
    rng = np.random.default_rng(seed)
    hot = rng.random((rows, width)) < density
    if filled:
        hot[np.arange(rows), rng.integers(0, width, rows)] = True
    return torch.from_numpy(hot.astype(np.int64))


def similarity(seed, width):
    half = torch.from_numpy(np.random.default_rng(seed).random((width, width)))
    return ((half + half.T) / 2).fill_diagonal_(1.0)


def problem(seed=0, batch=4, width=5, count=4, keys=3, rows=5):
    return {
        "query": draw(seed, batch, width),
        "query_labels": labels(seed, batch, count),
        "prototype": draw(seed + 1, count, width),
        "label_similarity": similarity(seed, count),
        "key": draw(seed + 2, keys, width),
        "key_labels": labels(seed + 2, keys, count),
        "queue": draw(seed + 3, rows, width),
        "queue_labels": labels(seed + 3, rows, count),
        "temperature": 0.4,
        "reduction": "none",
    }


@given(seeds, temperatures, st.sampled_from([1.0, 2.0]))
def test_one_label_and_prototypes_alone_in_softmax_form_is_cross_entropy(seed, temperature, alpha):
    z, v = draw(seed, 5, 3), draw(seed + 1, 4, 3)
    y = torch.from_numpy(np.random.default_rng(seed).integers(0, 4, 5))
    cosines = torch.nn.functional.normalize(z) @ torch.nn.functional.normalize(v).T
    loss = nws_loss(
        z,
        torch.nn.functional.one_hot(y, 4),
        v,
        None,
        alpha=alpha,
        temperature=temperature,
        decoupled=False,
        eps=0.0,
    )
    expected = torch.nn.functional.cross_entropy(cosines / temperature, y)
    torch.testing.assert_close(loss, expected)


@given(seeds, temperatures, st.sampled_from([0.0, 0.5, 0.9, 1.0, 1.5, 3.0]))
def test_one_label_each_without_weights_is_decoupled_info_nce(seed, temperature, alpha):
    """With `alpha` from 1 on; below it D is `1 - alpha`, and the prototype weighs `1 / D`."""
    z, v = draw(seed, 4, 3), draw(seed + 1, 4, 3)
    options = {"temperature": temperature, "reduction": "none"}
    one_each = torch.eye(4, dtype=torch.long)
    loss = nws_loss(z, one_each, v, None, alpha=alpha, eps=0.0, **options)
    expected = info_nce_loss(z, v, decoupled=True, **options)
    assert (expected != 0).all()
    torch.testing.assert_close(loss, expected / (1 - alpha) if alpha < 1 else expected)


@given(seeds)
def test_scaling_a_feature_changes_nothing(seed):
    inputs = problem(seed)
    plain = nws_loss(**inputs)
    for name in ("query", "prototype", "key", "queue"):
        inputs[name] = inputs[name] * torch.rand(len(inputs[name]), 1).double().add(0.1)
    assert (plain != 0).all()
    torch.testing.assert_close(nws_loss(**inputs), plain)


@given(seeds, st.sampled_from(["mean", "max"]))
def test_relabelling_changes_nothing(seed, aggregation):
    inputs = {**problem(seed), "aggregation": aggregation}
    plain = nws_loss(**inputs)
    assert (plain != 0).all()
    order = torch.from_numpy(np.random.default_rng(seed).permutation(4))
    inputs["prototype"] = inputs["prototype"][order]
    inputs["label_similarity"] = inputs["label_similarity"][order][:, order]
    for name in ("query", "key", "queue"):
        inputs[f"{name}_labels"] = inputs[f"{name}_labels"][:, order]
    torch.testing.assert_close(nws_loss(**inputs), plain)


@given(seeds, st.sampled_from(["mean", "max"]))
def test_keys_and_queue_rows_play_the_same_part(seed, aggregation):
    inputs = {**problem(seed), "aggregation": aggregation}
    plain = nws_loss(**inputs)
    for name in ("", "_labels"):
        inputs[f"queue{name}"] = torch.cat(
            [inputs[f"queue{name}"].flip(0), inputs.pop(f"key{name}")]
        )
    torch.testing.assert_close(nws_loss(**inputs), plain)
    assert (plain != 0).all()


@given(seeds, st.booleans(), st.sampled_from(["mean", "max"]))
def test_a_masked_queue_row_is_as_if_it_were_not_there(seed, decoupled, aggregation):
    inputs = {**problem(seed), "decoupled": decoupled, "aggregation": aggregation}
    keep = torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool)
    kept = {
        **inputs,
        "queue": inputs["queue"][keep],
        "queue_labels": inputs["queue_labels"][keep],
    }
    expected = nws_loss(**kept)
    torch.testing.assert_close(nws_loss(**inputs, queue_mask=keep), expected)
    inputs["queue"][~keep] = torch.nan
    inputs["query"].requires_grad_()
    inputs["prototype"].requires_grad_()
    masked = nws_loss(**inputs, queue_mask=keep)
    torch.testing.assert_close(masked, expected)
    masked.sum().backward()
    assert torch.isfinite(inputs["query"].grad).all()
    assert torch.isfinite(inputs["prototype"].grad).all()
    assert inputs["query"].grad.any()


@pytest.mark.parametrize("alpha", [0.5, 0.75, 0.999])
def test_a_small_normaliser_is_still_a_normaliser(alpha):
    """One label and no instance that shares it: D = 1 - alpha, and only about 0 counts as 1."""
    e = torch.eye(2, dtype=torch.float64)
    common = {"label_similarity": torch.eye(2).double(), "key": e[1:], "alpha": alpha, "eps": 0.0}
    labels = torch.tensor([[0, 1]])
    loss = nws_loss(e[:1], torch.tensor([[1, 0]]), e, key_labels=labels, temperature=1.0, **common)
    assert loss.item() == pytest.approx((math.log(2) - 1) / (1 - alpha), rel=1e-9)


@given(seeds, st.floats(0.1, 3.0))
def test_the_softmax_form_is_never_negative(seed, alpha):
    inputs = {**problem(seed), "alpha": alpha, "decoupled": False}
    for eps in (0.0, 1e-8):
        assert (nws_loss(**inputs, eps=eps) >= 0).all()
        assert nws_loss(**inputs, eps=eps).any()


def test_the_decoupled_form_may_be_negative():
    e = torch.eye(3, dtype=torch.float64)
    loss = nws_loss(e, torch.eye(3, dtype=torch.long), e, None, temperature=0.1)
    assert loss.item() == pytest.approx(math.log(2) - 10, abs=1e-3)


@given(seeds, st.floats(0.0, 2.0), st.floats(0.01, 2.0))
def test_a_larger_beta_never_lowers_it(seed, beta, more):
    inputs = problem(seed)
    low, high = nws_loss(**inputs, beta=beta), nws_loss(**inputs, beta=beta + more)
    assert (high >= low - 1e-12).all()
    inputs["query_labels"] = torch.eye(4).long()  # every row has a key or queue row unlike it
    inputs["queue_labels"] = torch.eye(4).long()[[0, 1, 2, 3, 0]]
    inputs["label_similarity"] = torch.eye(4).double()
    low, high = nws_loss(**inputs, beta=beta), nws_loss(**inputs, beta=beta + more)
    assert (high > low).all()


@given(seeds, st.sampled_from(["mean", "max"]))
def test_labels_all_alike_leave_the_prototypes_to_compete(seed, aggregation):
    inputs = {**problem(seed), "eps": 1e-12}
    for name in ("query_labels", "key_labels", "queue_labels"):
        inputs[name] = torch.nn.functional.one_hot(inputs[name].argmax(1), 4)  # one label each
    inputs["label_similarity"] = torch.ones(4, 4).double()
    alike = nws_loss(**inputs, aggregation=aggregation)
    torch.testing.assert_close(alike, nws_loss(**inputs, beta=0.0), rtol=1e-6, atol=1e-6)
    assert (alike != 0).all()


@given(seeds)
def test_labels_not_alike_make_both_aggregations_one(seed):
    inputs = problem(seed)
    inputs["label_similarity"] = torch.eye(4).double()
    mean, largest = (nws_loss(**inputs, aggregation=a) for a in ("mean", "max"))
    torch.testing.assert_close(mean, largest)
    assert (mean != 0).all()


@given(seeds)
def test_max_never_weighs_a_negative_more_than_mean(seed):
    inputs = problem(seed)
    mean, largest = (nws_loss(**inputs, aggregation=a) for a in ("mean", "max"))
    assert (largest <= mean + 1e-12).all()
    assert (mean != 0).all()


@given(seeds)
def test_eps_zero_is_the_limit_of_small_eps(seed):
    inputs = problem(seed)
    inputs["query_labels"][:, 0] = 0
    inputs["query_labels"][:, 1] = 1
    exact = nws_loss(**inputs, eps=0.0)
    torch.testing.assert_close(nws_loss(**inputs, eps=1e-13), exact, rtol=1e-8, atol=1e-8)
    assert not torch.allclose(nws_loss(**inputs, eps=0.3), exact)


def test_eps_fades_the_negatives_that_the_best_positive_leads_by_eighteen_temperatures():
    prototype = torch.tensor([[1.0, 0.0], [-1.0, 0.1]], dtype=torch.float64)
    one = torch.tensor([[1, 0]])
    norms = []
    for eps in (1e-8, 0.0):
        leaf = prototype.clone().requires_grad_()
        nws_loss(
            torch.tensor([[1.0, 0.2]]).double(), one, leaf, None, temperature=0.04, eps=eps
        ).backward()
        norms.append(leaf.grad[1].norm().item())
    assert norms[1] > 1e-2
    assert norms[0] < 1e-6 * norms[1]


def references_of(inputs, aggregation="mean", alpha=1.0, beta=1.0, eps=1e-8):
    """Weights of positives, and of negatives in the denominator, one reference at a time."""
    y = inputs["query_labels"].double()
    s = inputs["label_similarity"]
    instances = torch.cat([inputs["key_labels"], inputs["queue_labels"]]).double()
    positive = torch.zeros(len(y), len(instances) + y.shape[1], dtype=torch.float64)
    negative = torch.zeros_like(positive)
    for i, own in enumerate(y):
        share = [
            sum(
                alpha * theirs[c] / torch.maximum(own, theirs).sum()
                for theirs in instances
                if theirs[c]
            )
            + (1 - alpha / own.sum())
            for c in range(y.shape[1])
        ]
        share = [1.0 if d <= 1e-6 else d for d in share]
        for r, theirs in enumerate(instances):
            both = [c for c in range(y.shape[1]) if own[c] and theirs[c]]
            for c in both:
                overlap = alpha / torch.maximum(own, theirs).sum()
                positive[i, r] += overlap / (share[c] + eps)
            pairs = own[:, None] * theirs * s
            alike = (
                pairs.max()
                if aggregation == "max"
                else pairs.sum() / (own.sum() * theirs.sum() + eps)
            )
            negative[i, r] = 0.0 if both else beta * (1 - alike)
        for c in range(y.shape[1]):
            column = len(instances) + c
            positive[i, column] = own[c] / (share[c] + eps)
            negative[i, column] = 1 - own[c]
    count = y.sum(-1, keepdim=True)
    return positive / (count + eps), negative


@given(seeds, st.sampled_from(["mean", "max"]), st.floats(0.0, 1.0), st.floats(0.0, 2.0))
def test_equal_scores_leave_the_weights_and_the_logarithm_of_the_negatives(
    seed, aggregation, alpha, beta
):
    inputs = {**problem(seed), "query": torch.zeros(4, 5).double()}
    inputs["query_labels"][:, 0] = 0  # some prototype is a negative
    inputs["query_labels"][:, 1] = 1
    options = {"aggregation": aggregation, "alpha": alpha, "beta": beta, "eps": 0.0}
    positive, negative = references_of(inputs, **options)
    expected = positive.sum(-1) * negative.sum(-1).log()
    torch.testing.assert_close(nws_loss(**inputs, **options), expected)
    assert positive.any()


@given(seeds, st.floats(0.0, 1.0))
def test_the_weights_of_a_label_add_up_to_one_and_an_excess(seed, alpha):
    """To `1 + alpha / (|y| D)`: where `alpha` is 0, to one."""
    inputs = problem(seed)
    inputs["key_labels"][0] = 1  # every label has a carrier: D > 0
    inputs["query_labels"][:, 0] = 0  # prototype 0 is a negative
    inputs["query_labels"][:, 1] = 1
    options = {"alpha": alpha, "eps": 0.0}
    inputs["query"] = torch.zeros(4, 5).double()
    _, negative = references_of(inputs, **options)
    y = inputs["query_labels"].double()
    count = y.sum(-1, keepdim=True)
    instances = torch.cat([inputs["key_labels"], inputs["queue_labels"]]).double()
    union = count + instances.sum(-1) - y @ instances.T
    share = alpha * (1 / union) @ instances + 1 - alpha / count
    total = (y * (1 + alpha / (count * share))).sum(-1) / count[:, 0]
    torch.testing.assert_close(nws_loss(**inputs, **options), total * negative.sum(-1).log())


@pytest.mark.parametrize(
    ("alpha", "carriers", "total"),
    [
        (1.0, [], 1.0),  # D = 0: the prototype is the only carrier
        (1.0, [[1, 0, 0]], 2.0),  # D = 1
        (1.0, [[1, 0, 0]] * 4, 1.25),  # D = 4
        (2.0, [], 1.0),  # D = -1
        (
            2.0,
            [[1, 1, 0]],
            2.0,
        ),  # D = 2 / 2 + 1 - 2 = 0: D + alpha, where 1 + alpha / D is infinite
        (3.0, [[1, 1, 0]], 2.5),  # D = 3 / 2 + 1 - 3 = -1/2
    ],
)
def test_where_the_normaliser_counts_as_one_the_weights_add_up_to_what_is_there(
    alpha, carriers, total
):
    """To `D + alpha / |y|`, which is 1 with prototypes alone; else to `1 + alpha / (|y| D)`."""
    key_labels = torch.tensor(carriers).reshape(-1, 3)
    zero = torch.zeros(1, 2, dtype=torch.float64)  # all scores are equal: two prototypes compete
    loss = nws_loss(
        zero,
        torch.tensor([[1, 0, 0]]),
        torch.ones(3, 2, dtype=torch.float64),
        torch.eye(3).double(),
        key=torch.ones(len(carriers), 2, dtype=torch.float64),
        key_labels=key_labels,
        alpha=alpha,
        eps=0.0,
    )
    assert loss.item() == pytest.approx(total * math.log(2))
    share = alpha * sum(1 / sum(one) for one in carriers) + 1 - alpha
    if share <= 1e-6:
        assert total == pytest.approx(share + alpha)


@given(seeds, st.sampled_from([True, False]), st.sampled_from([0.0, 1e-8, 0.3]))
def test_the_gradient_is_softmax_times_all_weight_minus_weight(seed, decoupled, eps):
    inputs = problem(seed)
    inputs["query_labels"][:, 0] = 0
    inputs["query_labels"][:, 1] = 1
    query = torch.nn.functional.normalize(inputs["query"]).requires_grad_()
    inputs["query"] = query
    nws_loss(**inputs, decoupled=decoupled, eps=eps).sum().backward()
    references = torch.cat([inputs["key"], inputs["queue"], inputs["prototype"]])
    references = torch.nn.functional.normalize(references)
    scores = query.detach() @ references.T / 0.4
    positive, negative = references_of(inputs, eps=eps)
    if not decoupled:
        negative = torch.where(positive > 0, 1.0, negative)
    odds = negative * scores.exp()
    floor = torch.zeros_like(odds)
    floor.scatter_(1, scores.argmax(1, keepdim=True), eps * scores.exp().amax(1, keepdim=True))
    share = (odds + floor) / (odds + floor).sum(-1, keepdim=True)
    by_scores = (positive.sum(-1, keepdim=True) * share - positive) / 0.4
    torch.testing.assert_close(by_scores.sum(-1), torch.zeros(4).double())
    expected = by_scores @ references
    along = (expected * query.detach()).sum(-1, keepdim=True) * query.detach()
    torch.testing.assert_close(query.grad, expected - along, rtol=1e-6, atol=1e-7)
    assert query.grad.any()


@given(seeds)
def test_the_cold_limit_is_the_hardest_negative_minus_the_weighted_positives(seed):
    inputs = problem(seed)
    inputs["query_labels"][:, 0] = 0
    inputs["query_labels"][:, 1] = 1
    inputs["temperature"] = 1e-6
    positive, negative = references_of(inputs, eps=0.0)
    references = torch.cat([inputs["key"], inputs["queue"], inputs["prototype"]])
    unit = torch.nn.functional.normalize
    cosines = unit(inputs["query"]) @ unit(references).T
    hardest = torch.where(negative > 0, cosines, -2.0).amax(-1)
    expected = positive.sum(-1) * hardest - (positive * cosines).sum(-1)
    rows = nws_loss(**inputs, eps=0.0) * 1e-6
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-3)
    assert expected.any()


@given(seeds, temperatures, st.sampled_from([1e-8, 1e-3, 0.3]))
def test_with_eps_a_row_is_at_least_its_weight_times_the_logarithm_of_eps(seed, temperature, eps):
    inputs = {**problem(seed), "temperature": temperature}
    inputs["prototype"] = inputs["query"][[0, 1, 2, 3]]  # the best of cases: rows that are solved
    inputs["query_labels"] = torch.eye(4).long()
    positive, _ = references_of(inputs, eps=eps)
    rows = nws_loss(**inputs, eps=eps)
    assert (rows >= positive.sum(-1) * math.log(eps) - 1e-9).all()
    assert rows.any()


def test_a_weight_below_one_is_a_margin_of_the_temperature_times_its_logarithm():
    """A key that counts for a tenth counts like one that is `t log 10` further away."""
    e = torch.eye(3, dtype=torch.float64)
    t, cosine = 0.07, 0.8

    def row(similarity, cosine):
        key = cosine * e[0] + math.sqrt(1 - cosine**2) * e[1]
        alike = torch.tensor([[1.0, similarity], [similarity, 1.0]]).double()
        query_labels, key_labels = torch.eye(2).long()[:, None]
        prototype = torch.stack([e[0], e[2]])
        return nws_loss(
            e[:1],
            query_labels,
            prototype,
            alike,
            key=key[None],
            key_labels=key_labels,
            temperature=t,
            eps=0.0,
        )

    nearer = row(0.9, cosine)
    torch.testing.assert_close(nearer, row(0.0, cosine - t * math.log(10)))
    assert (nearer - row(0.9, 0.0)).abs() > 1


# Edges


@pytest.mark.parametrize("decoupled", [True, False])
def test_an_unlabelled_row_is_not_valid(decoupled):
    inputs = {**problem(), "decoupled": decoupled}
    inputs["query_labels"][1] = 0
    inputs["query"].requires_grad_()
    rows = nws_loss(**inputs)
    assert rows[1] == 0.0
    mean = nws_loss(**{**inputs, "reduction": "mean"})
    torch.testing.assert_close(mean, rows.sum() / 3)
    mean.backward()
    assert not inputs["query"].grad[1].any()
    assert inputs["query"].grad[[0, 2, 3]].any(dim=1).all()


@pytest.mark.parametrize("aggregation", ["mean", "max"])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_an_unlabelled_reference_is_a_full_negative(aggregation, eps):
    inputs = {**problem(), "aggregation": aggregation, "eps": eps}
    inputs["label_similarity"] = torch.ones(
        4, 4
    ).double()  # labelled keys and rows are no negatives
    inputs["queue_labels"][2] = 0
    with_it = nws_loss(**inputs, decoupled=True)
    mask = torch.ones(5)
    mask[2] = 0
    without = nws_loss(**inputs, queue_mask=mask)
    assert (with_it > without).all()
    assert torch.isfinite(with_it).all()


def test_the_only_carrier_of_a_label_has_weight_one():
    """alpha = 1, one label, no instance that shares it: D would be 0 and the weight 1e8."""
    inputs = problem()
    inputs["query_labels"] = torch.eye(4, dtype=torch.long)
    inputs["key_labels"] = torch.zeros(3, 4, dtype=torch.long)
    inputs["queue_labels"] = torch.zeros(5, 4, dtype=torch.long)
    rows = nws_loss(**inputs)
    assert rows.abs().max() < 100
    arrays = {k: v.numpy() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    assert_follows_the_formula("nws", arrays, temperature=0.4)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_negatives_of_weight_zero_are_no_negatives(eps):
    """One prototype, and keys that `beta` weighs with zero: nothing is left to compete."""
    z = draw(0, 2, 3).requires_grad_()
    keys = {"key": draw(2, 2, 3), "key_labels": torch.tensor([[1], [0]])}
    call = (z, torch.ones(2, 1, dtype=torch.long), draw(1, 1, 3), torch.ones(1, 1))
    assert nws_loss(*call, **keys, beta=1.0, eps=eps).item() != 0.0
    loss = nws_loss(*call, **keys, beta=0.0, eps=eps)
    loss.backward()
    assert torch.isfinite(z.grad).all()
    assert (loss.item() == 0.0) == (eps == 0.0)


def test_prototypes_learn_and_keys_do_not():
    inputs = problem()
    for name in ("query", "prototype", "key", "queue"):
        inputs[name].requires_grad_()
    nws_loss(**inputs).sum().backward()
    assert inputs["query"].grad.any()
    assert inputs["prototype"].grad.any()
    assert inputs["key"].grad is None
    assert inputs["queue"].grad is None


def test_a_weight_of_zero_is_no_mask_so_a_nan_key_shows():
    inputs = {**problem(), "key_labels": torch.zeros(3, 4)}
    inputs["key"][0] = torch.nan
    for impl in ("definition", "direct"):
        assert nws_loss(**{**inputs, "reduction": "mean"}, beta=0.0, eps=0.0, impl=impl).isnan()


@pytest.mark.parametrize("void", ["no label", "no negative"])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("impl", ["definition", "direct"])
def test_where_no_row_is_valid_every_nan_is_hidden(impl, decoupled, void):
    inputs = inputs_of(0, torch.float64)
    for name in ("query_labels", "key_labels", "queue_labels"):
        inputs[name] = torch.full_like(inputs[name], void == "no negative")
    for name in ("query", "prototype", "key"):
        inputs[name] = torch.full_like(inputs[name], torch.nan)
    if decoupled or void == "no label":
        for tensor in follow(inputs, impl, eps=0.0, decoupled=decoupled):
            assert not tensor.any()
    else:
        assert follow(inputs, impl, eps=0.0, decoupled=False)[0].isnan()


# Two ways


def follow(inputs, impl, **options):
    """Return what a call and its gradients are, computed one way."""
    inputs = {k: v if v is None else v.clone() for k, v in inputs.items()}
    leaves = [inputs[name].requires_grad_() for name in ("query", "prototype", "temperature")]
    value = nws_loss(**inputs, impl=impl, **options)
    gradients = torch.autograd.grad(value, leaves, retain_graph=True)
    again = torch.autograd.grad(value, leaves)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(gradients, again, strict=True))
    return [value.detach(), *gradients]


IMPLEMENTATIONS = ("definition", "direct")


def inputs_of(seed, dtype, count=4, temperature=0.3, batch=7, rows=5):
    inputs = problem(seed, batch=batch, count=count, rows=rows)
    del inputs["reduction"]
    for name in ("query_labels", "key_labels", "queue_labels"):
        inputs[name] = labels(seed + len(name), len(inputs[name]), count, 0.3, filled=False)
    inputs["temperature"] = torch.tensor(temperature)
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


WITHOUT = {
    "prototypes": ("key", "key_labels", "queue", "queue_labels"),
    "key": ("queue", "queue_labels"),
    "queue": ("key", "key_labels"),
    "all": (),
    "masked": (),
}

OPTIONS = [
    {"decoupled": d, "eps": eps, "alpha": alpha, "beta": beta, "reduction": reduction}
    for d, eps, (alpha, beta, reduction) in itertools.product(
        (True, False),
        (0.0, 1e-8, 0.3, 2.0),
        ((1.0, 1.0, "mean"), (0.5, 2.0, "sum"), (3.0, 0.0, "mean")),
    )
]


def same_both_ways(inputs, **options):
    plain, actual = (follow(inputs, impl, **options) for impl in IMPLEMENTATIONS)
    assert plain[0] != 0
    for expected, tensor in zip(plain, actual, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("references", WITHOUT)
@pytest.mark.parametrize("aggregation", ["mean", "max"])
def test_both_ways_have_the_same_value_and_gradients(references, aggregation):
    for seed, options in enumerate(OPTIONS):
        inputs = inputs_of(seed, torch.float64, count=4 if seed % 3 else 70)
        for name in WITHOUT[references]:
            inputs[name] = None
        if references == "masked":
            inputs["queue_mask"] = torch.tensor([1, 0, 1, 0, 1])
            inputs["queue"][1] = torch.nan
        same_both_ways(inputs, **options, aggregation=aggregation)


@pytest.mark.parametrize("decoupled", [True, False])
def test_both_ways_follow_the_same_of_tied_references(decoupled):
    """Two prototypes are one vector; the floor of ``eps`` follows the first of them."""
    inputs = inputs_of(0, torch.float64)
    inputs["prototype"][2] = inputs["prototype"][1] = inputs["query"][0]
    inputs["query"] = inputs["query"] + 0.01 * draw(1, *inputs["query"].shape)
    same_both_ways(inputs, decoupled=decoupled, eps=2.0)


@pytest.mark.parametrize("aggregation", ["mean", "max"])
@pytest.mark.parametrize(("count", "density"), [(4, 0.3), (70, 0.03)])
def test_several_blocks_are_the_same_both_ways(aggregation, count, density, monkeypatch):
    """With many labels a row and with few, where the products go by lists."""
    monkeypatch.setattr("sparse_losses.fast.nws.most_scores", lambda device: 100_000)
    for seed, (decoupled, eps) in enumerate(itertools.product([True, False], [0.0, 1e-8, 2.0])):
        inputs = inputs_of(seed, torch.float64, batch=97, rows=300, count=count)
        for name in ("query_labels", "key_labels", "queue_labels"):
            inputs[name] = labels(seed, len(inputs[name]), count, density, filled=False)
        inputs["queue_mask"] = labels(seed, 300, 1, 0.8, filled=False)[:, 0]
        same_both_ways(inputs, decoupled=decoupled, eps=eps, aggregation=aggregation)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_nan_of_a_row_without_negatives_is_hidden(impl):
    """Decoupled and exact; the other rows have prototypes to compete with."""
    inputs = inputs_of(0, torch.float64)
    inputs["query_labels"] = torch.eye(4).long()[[0, 1, 2, 3, 0, 1, 2]]
    inputs["query_labels"][2] = 1
    inputs["key_labels"][:, 0] = inputs["queue_labels"][:, 0] = 1
    expected = follow(inputs, impl, eps=0.0)
    inputs["query"][2] = torch.nan
    for spoilt, plain in zip(follow(inputs, impl, eps=0.0), expected, strict=True):
        assert torch.equal(spoilt, plain)
    assert expected[1][[0, 1, 3, 4, 5, 6]].any(dim=1).all()
    assert not expected[1][2].any()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_both_ways_hide_the_nan_of_rows_that_are_not_valid_and_no_other(decoupled, eps):
    inputs = inputs_of(0, torch.float64)
    inputs["query_labels"][:, 0] = 1
    inputs["query_labels"][4] = 0
    inputs["query"][4] = torch.nan
    options = {"decoupled": decoupled, "eps": eps}
    plain, actual = (follow(inputs, impl, **options) for impl in IMPLEMENTATIONS)
    assert not actual[1][4].any()
    for expected, tensor in zip(plain, actual, strict=True):
        assert torch.isfinite(tensor).all()
        torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-12)
    for name, row in (("query", 1), ("key", 0), ("queue", 2), ("prototype", 3)):
        spoilt = {**inputs, name: inputs[name].clone()}
        spoilt[name][row] = torch.nan
        for impl in IMPLEMENTATIONS:
            assert follow(spoilt, impl, **options)[0].isnan(), (name, impl)


@pytest.mark.parametrize("temperature", [1e-4, 0.02, 1e4])
@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-8])
@pytest.mark.parametrize("decoupled", [True, False])
def test_direct_is_as_exact_in_single_precision(temperature, eps, decoupled):
    inputs = inputs_of(3, torch.float32, temperature=temperature)
    inputs["query_labels"] = torch.eye(4).long()[[0, 1, 2, 3, 0, 1, 2]]
    inputs["query"] = inputs["prototype"][[0, 1, 2, 3, 0, 1, 2]] + 0.1 * inputs["query"]
    for name in WITHOUT["prototypes"]:
        inputs[name] = None  # every row is easy
    wide = {
        k: v.double() if v is not None and v.is_floating_point() else v for k, v in inputs.items()
    }
    options = {"eps": eps, "decoupled": decoupled}
    exact, actual = follow(wide, "definition", **options), follow(inputs, "direct", **options)
    assert actual[0] != 0 or (temperature == 1e-4 and not decoupled)
    for expected, tensor in list(zip(exact, actual, strict=True))[:3]:
        error = (tensor.double() - expected).norm()
        # 1e-4 turns a rounding of 1e-7 in a cosine into 1e-3 of a score
        assert error <= (2e-2 if temperature == 1e-4 else 2e-4) * expected.norm() + 1e-30


@pytest.mark.parametrize("aggregation", ["mean", "max"])
def test_blocks_never_hold_all_queries_by_references(aggregation, monkeypatch):
    from tests.losses.test_contract import Recorder

    monkeypatch.setattr("sparse_losses.fast.nws.most_scores", lambda device: 100_000)
    inputs = problem(batch=2000, width=8, count=12, keys=40, rows=60)
    inputs["query"].requires_grad_()
    inputs["prototype"].requires_grad_()
    everything = 2000 * (40 + 60 + 12)
    largest = {}
    for impl in IMPLEMENTATIONS:
        with Recorder() as seen:
            options = {"aggregation": aggregation, "impl": impl, "reduction": "mean"}
            nws_loss(**{**inputs, **options}).backward()
        largest[impl] = seen.largest
    assert largest["definition"] >= everything
    assert everything / 20 < largest["direct"] < everything / 5


def test_direct_says_what_it_cannot_do():
    inputs = problem()
    with pytest.raises(ValueError, match=r'reduction="mean" or "sum" with impl="direct"'):
        nws_loss(**inputs, impl="direct")
    inputs["reduction"] = "mean"
    assert nws_loss(**inputs, impl="direct") != 0
    for temperature in (1e-30, 1e30):
        inputs["temperature"] = temperature
        expected = nws_loss(**inputs, impl="definition")
        torch.testing.assert_close(nws_loss(**inputs, impl="direct"), expected)
    for temperature in (1e-31, 1e31):
        inputs["temperature"] = temperature
        with pytest.raises(ValueError, match="`temperature` from 1e-30 to 1e30, got 1e"):
            nws_loss(**inputs, impl="direct")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 5, 300])
@pytest.mark.parametrize("density", [0.0, 0.05, 0.5, 1.0])
def test_products_with_labels_are_products(dtype, count, density):
    some = [labels(seed, rows, count, density, filled=False) for seed, rows in ((1, 6), (2, 9))]
    hot = torch.cat(some).to(dtype)
    values = draw(0, 5, count).abs().round(decimals=1).to(dtype)  # with ties
    lists = LabelLists.for_few_labels(some, values)
    assert (lists is not None) == (8 * hot.sum() <= hot.numel())
    product = hot @ values.T
    for way in (DenseLabels(hot), lists or DenseLabels(hot)):
        assert torch.equal(way.count, hot.sum(1, keepdim=True))
        assert torch.equal(way.dense, hot)
        torch.testing.assert_close(way.times(values), product)
        torch.testing.assert_close(way.by_label(product), product.T @ hot)
    assert torch.equal(largest_of_labels(values, hot), (hot[:, None] * values).amax(-1).T)


def test_lists_are_made_of_three_tensors_and_up_to_one_label_in_eight():
    parts = [torch.zeros(rows, 8) for rows in (1, 2, 2)]
    for n, part in enumerate(parts):
        part[-1, 2 * n : 2 * n + 2] = 1
    like = torch.zeros(3, 8)
    assert LabelLists.for_few_labels(parts, like) is None  # 6 of 40
    parts[2][1, 5] = 0
    lists = LabelLists.for_few_labels(parts, like)  # 5 of 40
    assert torch.equal(lists.dense, torch.cat(parts))
    assert lists.count.T.tolist() == [[2, 0, 2, 0, 1]]
    indices = [
        x for x in vars(lists).values() if not x.is_floating_point() and x is not lists.count
    ]
    assert {x.dtype for x in indices} == {torch.int32}


def test_the_largest_of_labels_is_at_least_0():
    values = torch.tensor([[-1.0, -2.0, 3.0], [0.5, -4.0, -0.25]])
    hot = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert largest_of_labels(values, hot).tolist() == [[0.0, 3.0, 0.0], [0.5, 0.0, 0.0]]


@pytest.mark.parametrize("wrong", [100.0, -5.0, torch.nan, torch.inf])
def test_labels_that_nobody_could_check_are_no_index_out_of_range(wrong):
    """An accelerator would stop at it, long after."""
    hot = torch.tensor([[1.0, wrong, 0.0], [wrong, 0.0, 0.0]])
    assert largest_of_labels(torch.rand(2, 3), hot).shape == (2, 2)


# Where and when it is made


@pytest.mark.cpu_only
def test_it_is_made_without_values_for_deferred_initialisation():
    with FakeTensorMode():
        assert NWSLoss(torch.eye(3)).label_similarity.shape == (3, 3)
    with torch.device("meta"):
        loss = NWSLoss(torch.eye(3))
    assert loss.label_similarity.is_meta
    loss = loss.to_empty(device="cpu")
    loss.load_state_dict(NWSLoss(torch.eye(3)).state_dict())
    assert torch.equal(loss.label_similarity, torch.eye(3))


@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_shapes_can_be_computed_without_values(mode):
    with FakeTensorMode() if mode == "fake" else torch.device("meta"):
        query, labels = torch.zeros(2, 5, requires_grad=True), torch.zeros(2, 3)
        loss = NWSLoss(torch.zeros(3, 3))(
            query, labels, torch.zeros(3, 5), key=torch.zeros(4, 5), key_labels=torch.zeros(4, 3)
        )
        (gradient,) = torch.autograd.grad(loss, query)
    assert loss.shape == ()
    assert gradient.shape == (2, 5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_is_made_in_inference_mode_can_be_learned_from(impl):
    inputs = {**problem(), "reduction": "mean"}
    inputs["query"].requires_grad_()
    inputs["prototype"].requires_grad_()
    leaves = [inputs["query"], inputs["prototype"]]
    expected = torch.autograd.grad(nws_loss(**inputs, impl=impl), leaves)
    with torch.inference_mode():
        loss = NWSLoss(inputs.pop("label_similarity").clone(), temperature=0.4, impl=impl)
        for name in ("key", "key_labels", "queue", "queue_labels", "query_labels"):
            inputs[name] = inputs[name].clone()
    del inputs["temperature"], inputs["reduction"]
    value = loss(**inputs)
    actual = torch.autograd.grad(value, leaves, retain_graph=True)
    again = torch.autograd.grad(value, leaves, create_graph=True)
    for gradient, second, truth in zip(actual, again, expected, strict=True):
        torch.testing.assert_close(gradient, truth)
        torch.testing.assert_close(second, truth)
        assert truth.any()


# A queue without a mask


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_without_a_mask_the_slots_that_were_never_filled_are_none(impl):
    inputs = {**problem(), "reduction": "mean", "impl": impl}
    expected = nws_loss(**inputs)
    for name in ("queue", "queue_labels"):
        inputs[name] = torch.cat([inputs[name], torch.zeros_like(inputs[name])])
    torch.testing.assert_close(nws_loss(**inputs), expected)
    assert expected != 0


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("filled", ["features", "labels", "nan", "mask"])
def test_a_slot_with_features_or_labels_or_in_the_mask_is_filled(impl, filled):
    inputs = {**problem(), "reduction": "mean", "impl": impl}
    plain = nws_loss(**inputs)
    for name in ("queue", "queue_labels"):
        inputs[name] = torch.cat([inputs[name], torch.zeros_like(inputs[name][:1])])
    if filled == "mask":
        inputs["queue_mask"] = torch.ones(6)
    elif filled == "labels":
        inputs["queue_labels"][5, 1] = 1
    else:
        inputs["queue"][5, 1] = 1e-30 if filled == "features" else torch.nan
    value = nws_loss(**inputs)
    assert value.isnan() if filled == "nan" else not torch.isclose(value, plain)


# Errors


@pytest.mark.parametrize(
    ("missing", "present"),
    [
        ("key", "`key_labels`"),
        ("key_labels", "`key`"),
        ("queue", "`queue_labels`"),
        ("queue_labels", "`queue`"),
        ("label_similarity", "`key` or `queue`"),
    ],
)
def test_references_labels_and_similarities_come_together(missing, present):
    with pytest.raises(ValueError, match=f"expected `{missing}` with {present}, got None"):
        nws_loss(**{**problem(), missing: None})


@pytest.mark.parametrize("name", ["key", "queue"])
def test_keys_or_a_queue_alone_need_similarities(name):
    inputs = {**problem(), name: None, f"{name}_labels": None}
    assert nws_loss(**inputs).any()
    with pytest.raises(ValueError, match="expected `label_similarity` with `key` or `queue`"):
        nws_loss(**{**inputs, "label_similarity": None})


def test_a_mask_needs_a_queue():
    inputs = problem()
    del inputs["queue"], inputs["queue_labels"]
    with pytest.raises(ValueError, match="queue"):
        nws_loss(**inputs, queue_mask=torch.ones(5))


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("name", "size"), [("query_labels", "batch"), ("key_labels", "keys"), ("queue_labels", "rows")]
)
@pytest.mark.parametrize("wrong", [2, -1, 0.5, math.nan])
def test_a_label_that_is_neither_0_nor_1_is_refused_in_any_row(name, size, wrong):
    inputs = problem(width=2, count=3, **{size: 2500})
    assert nws_loss(**{**inputs, name: inputs[name].double()}).any()
    for row in (0, 1023, 1024, 2499):
        spoilt = inputs[name].to(torch.int32 if wrong in (2, -1) else torch.float32)
        spoilt[row, 1] = wrong
        with pytest.raises(ValueError, match=f"expected `{name}` to be 0 or 1, got {wrong:g}"):
            nws_loss(**{**inputs, name: spoilt})


@pytest.mark.cpu_only
def test_the_labels_of_an_empty_slot_may_be_anything():
    inputs = problem(width=2, count=3, rows=2500)
    mask = torch.ones(2500)
    mask[2000:] = 0
    expected = nws_loss(**inputs, queue_mask=mask)
    inputs["queue_labels"][2000:] = 7
    torch.testing.assert_close(nws_loss(**inputs, queue_mask=mask), expected)
    mask[2499] = 1
    with pytest.raises(ValueError, match="expected `queue_labels` to be 0 or 1, got 7"):
        nws_loss(**inputs, queue_mask=mask)


@pytest.mark.cpu_only
@pytest.mark.parametrize("value", [1.5, -0.5, math.nan, math.inf])
def test_similarities_outside_zero_one_are_refused(value):
    inputs = problem()
    inputs["label_similarity"][0, 1] = value
    with pytest.raises(ValueError, match="label_similarity"):
        nws_loss(**inputs)
    with pytest.raises(ValueError, match="label_similarity"):
        NWSLoss(inputs["label_similarity"])
    with pytest.raises(ValueError, match="label_similarity"):
        NWSLoss(torch.ones(3, 4))


@pytest.mark.parametrize("value", [1 + 1e-6, 1 + 5e-7, -5e-7, -1e-6])
@pytest.mark.parametrize("aggregation", ["mean", "max"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_similarities_may_be_off_by_rounding(value, aggregation, impl):
    """And then `a` is clamped to [0, 1]: neither more than a full negative nor less than none."""
    inputs = {**problem(), "temperature": 0.1, "reduction": "mean"}
    inputs["query_labels"] = torch.eye(4, dtype=torch.long)
    inputs["key_labels"] = torch.eye(4, dtype=torch.long)[[1, 0, 1]]
    inputs["queue_labels"] = torch.eye(4, dtype=torch.long)[[0, 1, 0, 1, 0]]
    inputs["prototype"] = -inputs["query"]  # far away: the instances decide
    inputs["label_similarity"] = torch.eye(4).double()
    inputs["label_similarity"][0, 1] = inputs["label_similarity"][1, 0] = value
    arrays = {k: v.numpy() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    off = nws_loss(**inputs, aggregation=aggregation, eps=1e-30, impl=impl)
    assert torch.isfinite(off).all()
    assert off != 0
    inputs["label_similarity"] = inputs["label_similarity"].clamp(0, 1)
    on = nws_loss(**inputs, aggregation=aggregation, eps=1e-30, impl=impl)
    torch.testing.assert_close(off, on, rtol=1e-12, atol=1e-12)
    if aggregation == "max":
        assert_follows_the_formula("nws", arrays, temperature=0.1, aggregation="max", eps=1e-30)
