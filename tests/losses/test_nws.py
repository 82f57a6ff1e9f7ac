"""NWS: its formula, its theorems, its edges."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse_losses import NWSLoss
from sparse_losses.functional import info_nce_loss, nws_loss
from sparse_losses.losses.nws import _largest_of_labels
from tests.cases import BASE_CASES, assert_follows_the_formula
from tests.instruments import Recorder
from tests.strategies import draw, nws_problems, seeds, temperatures

aggregations = st.sampled_from(["mean", "max"])
over_aggregations = pytest.mark.parametrize("aggregation", ["mean", "max"])


@given(nws_problems())
def test_value_is_the_formula_for_any_references(problem):
    arrays, options = problem
    assert_follows_the_formula("nws", arrays, **options)


COUPLED = next(case for case in BASE_CASES if case.id == "nws-coupled")  # four labels


def problem(seed=0):
    """Four queries, five keys and six rows of a queue."""
    return COUPLED.tensors(seed=seed) | {"temperature": 0.4, "reduction": "none"}


@given(seeds, temperatures, st.sampled_from([1.0, 2.0]))
def test_one_label_and_prototypes_alone_in_softmax_form_is_cross_entropy(seed, temperature, alpha):
    z, v = draw(seed, 5, 3), draw(seed + 1, 4, 3)
    y = torch.from_numpy(np.random.default_rng(seed).integers(0, 4, 5))
    cosines = torch.nn.functional.normalize(z) @ torch.nn.functional.normalize(v).T
    options = {"temperature": temperature, "decoupled": False, "eps": 0.0}
    loss = nws_loss(z, torch.nn.functional.one_hot(y, 4), v, None, alpha=alpha, **options)
    expected = torch.nn.functional.cross_entropy(cosines / temperature, y)
    torch.testing.assert_close(loss, expected)


@given(seeds, temperatures, st.sampled_from([0.0, 0.5, 0.999, 1.0, 1.5, 3.0]))
def test_one_label_each_without_weights_is_decoupled_info_nce(seed, temperature, alpha):
    """With `alpha` from 1 on; below it D is `1 - alpha`, and the prototype weighs `1 / D`."""
    z, v = draw(seed, 4, 3), draw(seed + 1, 4, 3)
    options = {"temperature": temperature, "reduction": "none"}
    one_each = torch.eye(4, dtype=torch.long)
    loss = nws_loss(z, one_each, v, None, alpha=alpha, eps=0.0, **options)
    expected = info_nce_loss(z, v, decoupled=True, **options)
    assert (expected != 0).all()
    torch.testing.assert_close(loss, expected / (1 - alpha) if alpha < 1 else expected)


@given(seeds, st.booleans(), aggregations)
def test_a_masked_queue_row_is_as_if_it_were_not_there(seed, decoupled, aggregation):
    inputs = {**problem(seed), "decoupled": decoupled, "aggregation": aggregation}
    keep = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    kept = {name: inputs[name][keep] for name in ("queue", "queue_labels")}
    expected = nws_loss(**{**inputs, **kept})
    inputs["queue"][~keep] = torch.nan
    leaves = [inputs[name].requires_grad_() for name in ("query", "prototype")]
    masked = nws_loss(**inputs, queue_mask=keep)
    torch.testing.assert_close(masked, expected)
    for gradient in torch.autograd.grad(masked.sum(), leaves):
        assert gradient.isfinite().all()
        assert gradient.any()


@given(seeds, st.floats(0.1, 3.0))
def test_the_softmax_form_is_never_negative(seed, alpha):
    inputs = {**problem(seed), "alpha": alpha, "decoupled": False}
    for eps in (0.0, 1e-8):
        assert (nws_loss(**inputs, eps=eps) >= 0).all()
        assert nws_loss(**inputs, eps=eps).any()


@given(seeds, st.floats(0.0, 2.0), st.floats(0.01, 2.0))
def test_a_larger_beta_never_lowers_it(seed, beta, more):
    inputs = problem(seed)
    low, high = nws_loss(**inputs, beta=beta), nws_loss(**inputs, beta=beta + more)
    assert (high >= low - 1e-12).all()
    one_each = torch.eye(4).long()  # every row has a key or queue row unlike it
    inputs |= {"query_labels": one_each, "queue_labels": one_each[[0, 1, 2, 3, 0, 1]]}
    inputs["label_similarity"] = one_each.double()
    low, high = nws_loss(**inputs, beta=beta), nws_loss(**inputs, beta=beta + more)
    assert (high > low).all()


@pytest.mark.parametrize(
    ("alpha", "carriers", "total"),
    [
        (1.0, [], 1.0),  # D = 0: the prototype is the only carrier
        (1.0, [[1, 0, 0]], 2.0),  # D = 1
        (1.0, [[1, 0, 0]] * 4, 1.25),  # D = 4
        (2.0, [], 1.0),  # D = -1
        (2.0, [[1, 1, 0]], 2.0),  # D = 0: D + alpha, where 1 + alpha / D is infinite
        (3.0, [[1, 1, 0]], 2.5),  # D = 3 / 2 + 1 - 3 = -1/2
    ],
)
def test_the_weights_of_the_positives_add_up_to_this_total(alpha, carriers, total):
    """To `D + alpha / |y|`, which is 1 with prototypes alone; else to `1 + alpha / (|y| D)`."""
    carried = {
        "key": torch.ones(len(carriers), 2),
        "key_labels": torch.tensor(carriers).view(-1, 3),
    }
    call = torch.zeros(1, 2), torch.tensor([[1, 0, 0]]), torch.ones(3, 2), torch.eye(3)
    loss = nws_loss(*call, **carried, alpha=alpha, eps=0.0)  # two prototypes compete, equal scores
    assert loss.item() == pytest.approx(total * math.log(2))
    share = alpha * sum(1 / sum(one) for one in carriers) + 1 - alpha
    if share <= 1e-6:
        assert total == pytest.approx(share + alpha)


def test_a_weight_of_zero_is_no_mask_so_a_nan_key_shows():
    inputs = {**problem(), "key_labels": torch.zeros(5, 4)}
    inputs["key"][0] = torch.nan
    assert nws_loss(**{**inputs, "reduction": "mean"}, beta=0.0, eps=0.0).isnan()


@over_aggregations
def test_queries_by_references_by_labels_are_never_held(aggregation):
    counts = 16, 48, 40, 60
    query, prototype, key, queue = (draw(n, n, 8).requires_grad_() for n in counts)
    hot = [torch.rand(len(x), 48) < 0.5 for x in (query, key, queue)]
    references = {"key": key, "key_labels": hot[1], "queue": queue, "queue_labels": hot[2]}
    with Recorder() as seen:
        loss = nws_loss(
            query, hot[0], prototype, torch.eye(48), **references, aggregation=aggregation
        )
        torch.autograd.grad(loss, [query, prototype])
    assert 16 * 40 <= seen.largest < 16 * (40 + 60 + 48) * 48 / 3


@pytest.mark.parametrize("count", [1, 126, 127, 300])
def test_the_largest_of_any_number_of_labels(count):
    """In fp32 a product of powers tells 126 of them apart."""
    values, hot = draw(0, 4, count).float(), torch.rand(5, count) < 0.02
    hot[0], hot[1] = 0, 1
    expected = [[max([0.0, *row[y > 0].tolist()]) for y in hot] for row in values]
    found = _largest_of_labels(values, hot.float())
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [100.0, -5.0, torch.nan, torch.inf])
def test_unchecked_labels_are_no_index_out_of_range(wrong):
    """An accelerator would stop at it, long after."""
    hot = torch.tensor([[1.0, wrong, 0.0], [wrong, 0.0, 0.0]])
    assert _largest_of_labels(torch.rand(2, 3), hot).shape == (2, 2)


@pytest.mark.cpu_only
def test_the_module_is_made_without_values_for_deferred_initialisation():
    with FakeTensorMode():
        assert NWSLoss(torch.eye(3)).label_similarity.shape == (3, 3)
    with torch.device("meta"):
        loss = NWSLoss(torch.eye(3))
    assert loss.label_similarity.is_meta
    loss = loss.to_empty(device="cpu")
    loss.load_state_dict(NWSLoss(torch.eye(3)).state_dict())
    assert torch.equal(loss.label_similarity, torch.eye(3))


@pytest.mark.parametrize("filled", [None, "features", "labels", "nan", "mask"])
def test_a_slot_without_features_labels_and_mask_is_empty(filled):
    inputs = {**problem(), "reduction": "mean"}
    plain = nws_loss(**inputs)
    for name in ("queue", "queue_labels"):
        inputs[name] = torch.cat([inputs[name], torch.zeros_like(inputs[name][:1])])
    if filled == "mask":
        inputs["queue_mask"] = torch.ones(7)
    elif filled == "labels":
        inputs["queue_labels"][6, 1] = 1
    elif filled is not None:
        inputs["queue"][6, 1] = 1e-30 if filled == "features" else torch.nan
    value = nws_loss(**inputs)
    assert value.isnan() if filled == "nan" else torch.isclose(value, plain) == (filled is None)


@pytest.mark.parametrize(
    ("missing", "present"),
    [
        ("key", "`key_labels`"),
        ("key_labels", "`key`"),
        ("queue", "`queue_labels`"),
        ("queue_labels", "`queue`"),
        ("label_similarity", "`key` or `queue`"),
        ("queue queue_labels", "`queue_mask`"),
    ],
)
def test_references_labels_masks_and_similarities_come_together(missing, present):
    inputs = {**problem(), "queue_mask": torch.ones(6), **dict.fromkeys(missing.split())}
    with pytest.raises(ValueError, match=f"expected `{missing.split()[0]}` with {present}, got"):
        nws_loss(**inputs)


@pytest.mark.cpu_only
def test_the_labels_of_an_empty_slot_may_be_anything():
    inputs = problem()
    mask = torch.tensor([1, 1, 1, 1, 0, 0])
    expected = nws_loss(**inputs, queue_mask=mask)
    inputs["queue_labels"][4:] = 7
    torch.testing.assert_close(nws_loss(**inputs, queue_mask=mask), expected)
    mask[4] = 1
    with pytest.raises(ValueError, match="expected `queue_labels` to be 0 or 1, got 7"):
        nws_loss(**inputs, queue_mask=mask)


@pytest.mark.cpu_only
@pytest.mark.parametrize("value", [1.5, -0.5, math.nan, math.inf])
def test_similarities_outside_zero_one_are_refused(value):
    inputs = problem()
    alike = inputs["label_similarity"]
    alike[0, 1] = value
    for call in (lambda: nws_loss(**inputs), lambda: NWSLoss(alike), lambda: NWSLoss(alike[:3])):
        with pytest.raises(ValueError, match="label_similarity"):
            call()


@pytest.mark.parametrize("value", [1 + 1e-6, -1e-6])
@over_aggregations
def test_similarities_off_by_rounding_are_clamped(value, aggregation):
    inputs = {**problem(), "temperature": 0.1, "reduction": "mean"}
    eye = torch.eye(4, dtype=torch.long)
    inputs |= {"query_labels": eye, "key_labels": eye[[1, 0, 1, 1, 0]]}
    inputs["queue_labels"] = eye[[0, 1, 0, 1, 0, 1]]
    inputs["prototype"] = -inputs["query"]  # far away: the instances decide
    inputs["label_similarity"] = torch.eye(4).double()
    inputs["label_similarity"][0, 1] = inputs["label_similarity"][1, 0] = value
    options = {"aggregation": aggregation, "eps": 1e-30}
    off = nws_loss(**inputs, **options)
    assert off != 0
    inputs["label_similarity"] = inputs["label_similarity"].clamp(0, 1)
    torch.testing.assert_close(nws_loss(**inputs, **options), off, rtol=1e-12, atol=1e-12)
