import itertools

import pytest
import torch

from sparse_losses import InfoNCELoss, MinActivationLoss, SpladeBatch, Texts, gradient_report
from tests.objective.making import objective

V = 20
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
