"""Scores that terms share, and the options with which InfoNCE may not use them."""

import gc
import inspect
import weakref

import pytest
import torch

import sparse_losses as sl
from sparse_losses.functional import info_nce_from_scores
from sparse_losses.objective import batch as batches
from sparse_losses.objective import terms
from tests.objective.making import CALLS, V, alone, batch, objective

# Another value than the default for every hyperparameter of the losses.
OTHER = {
    "temperature": 0.9,
    "similarity": "dot",
    "symmetric": True,
    "in_batch": False,
    "negatives_from": ("document", "query"),
    "false_negative_margin": -0.2,
    "false_negative_ratio": 0.8,
    "decoupled": True,
    "gather": True,
    "impl": "definition",
    "reduction": "sum",
    "margin": 0.7,
    "alpha_kl": 0.2,
    "alpha_mse": 0.9,
    "standardize": "row",
    "token_weight": torch.rand(V, dtype=torch.float64),
    "estimator": "unbiased",
    "threshold": 23.0,  # of the number of active dimensions in FLOPS, else of an activation
    "beta": 0.9,
    "top_k": 2,
    "ignore_token_ids": [*range(15)],
    "balanced": True,
    "saturating": True,
}
SAME_VALUE = ("gather", "impl")  # on one rank


def options_of(term):
    make = CALLS[term][0]
    names = inspect.signature(getattr(make, "func", make)).parameters
    return sorted({*names} - {"token_penalty"} - ({"reduction"} if term == "info_nce" else set()))


@pytest.fixture
def calls(monkeypatch):
    """How often the scores, and InfoNCE of them, are computed; what the former were."""
    counted = {"score": 0, "info_nce_from_scores": 0, "made": []}

    def count(module, name):
        function = getattr(module, name)

        def counting(*args, **options):
            counted[name] += 1
            value = function(*args, **options)
            counted["made"].append(weakref.ref(value))
            return value

        monkeypatch.setattr(module, name, counting)

    # Nothing public tells whether scores are shared.
    count(batches, "score")
    count(terms, "info_nce_from_scores")
    return counted


@pytest.mark.parametrize(
    ("term", "option"), [(term, name) for term in CALLS for name in [None, *options_of(term)]]
)
def test_every_option_of_every_loss_holds_inside_the_objective(term, option, calls):
    torch.manual_seed(3)
    b, options = batch("own"), {} if option is None else {option: OTHER[option]}
    loss = CALLS[term][0](**options)
    # Distillation needs the scores in InfoNCE's similarity, so that InfoNCE may share them.
    similarity = getattr(loss, "similarity", "cosine") if term == "info_nce" else "cosine"
    weights = {"info_nce": 1.0, "distillation": 1.0, term: 1.0}
    value = objective(weights, {term: loss}, similarity=similarity)(b).terms[term]
    torch.testing.assert_close(value, alone(term, b, **options))
    if option is not None and option not in SAME_VALUE:
        assert abs(value - alone(term, b)) > 1e-6 * abs(value)
    if term == "info_nce":  # what InfoNCE of scores does not know switches sharing off
        known = {None, "similarity", *inspect.signature(info_nce_from_scores).parameters}
        assert calls["info_nce_from_scores"] == (option in known - {"gather"})


def test_scores_are_computed_once_and_not_kept(calls):
    b = batch("own", grad=True)
    names = ["info_nce", "distillation", "margin_mse", "ranknet"]
    made = objective(dict.fromkeys(names, 1.0))
    total, values = made(b)
    total.backward()
    assert [*values] == names
    assert (calls["score"], calls["info_nce_from_scores"]) == (1, 1)
    made(b)
    assert calls["score"] == 2
    del total, values
    gc.collect()
    assert [ref() for ref in calls["made"]] == [None] * 4
    assert b.memory is None


class Doubled(sl.InfoNCELoss):
    def forward(self, *args, **options):
        return 2 * super().forward(*args, **options)


def hooked():
    loss = sl.InfoNCELoss()
    loss.register_forward_hook(lambda module, args, value: 2 * value)
    return loss


@pytest.mark.parametrize("make", [Doubled, hooked, sl.InfoNCELoss])
def test_a_module_that_runs_other_code_is_called(make, calls):
    b = batch("own")
    value = objective({"info_nce": 1.0, "distillation": 1.0}, {"info_nce": make()})(b).terms
    factor = 1 if make is sl.InfoNCELoss else 2
    torch.testing.assert_close(value["info_nce"], factor * alone("info_nce", b))
    assert calls["info_nce_from_scores"] == (factor == 1)


def test_an_option_that_is_new_switches_sharing_off(calls):
    loss = sl.InfoNCELoss()
    made = objective({"info_nce": 1.0, "distillation": 1.0}, {"info_nce": loss})
    made(batch("own"))
    assert calls["info_nce_from_scores"] == 1
    hyperparameters = loss.hyperparameters
    loss.hyperparameters = lambda **given: {**hyperparameters(**given), "new": 1.0}
    with pytest.raises(TypeError, match=r"the term 'info_nce'.*'new'"):  # it is handed on
        made(batch("own"))
    assert calls["info_nce_from_scores"] == 1


@pytest.mark.parametrize("negative", [None, "shared", "own"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"decoupled": True, "reduction": "sum"}])
def test_info_nce_has_the_same_gradient_when_it_shares_the_scores(negative, masked, options):
    results = []
    for shared in (False, True):
        torch.manual_seed(1)
        b = batch(negative, grad=True)
        if masked:
            mask = torch.ones(b.teacher_scores.shape)
            mask[2, 3] = mask[0, 0] = mask[1, -1] = 0
            b = b._replace(candidate_mask=mask)
        temperature = torch.nn.Parameter(torch.tensor(0.2, dtype=torch.float64))
        loss = sl.InfoNCELoss(temperature=temperature, **options)
        weights = {"info_nce": 1.0}
        if shared:  # and the other term gives no gradient of its own
            weights["distillation"] = 1e-300
        total, _ = objective(weights, {"info_nce": loss})(b)
        leaves = [b.anchor.activations, b.positive.activations, temperature]
        results.append([total.detach(), *torch.autograd.grad(total, leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
