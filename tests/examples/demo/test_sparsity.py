"""Runs with wrong weights: what `advise` says of them, and what the controller makes of them."""

import dataclasses

import pytest

from examples.demo.training import Run
from sparse_losses import COSINE


def _flops(weight, targets=None, **changes):
    """COSINE with other weights of FLOPS."""
    sides = ("query_flops", "document_flops")
    weights = dict.fromkeys(sides, weight)
    return COSINE.replace(weights=weights, target_active=targets or {}, **changes)


TOO_STRONG = {"weight": 3.0, "warmup": {}}  # a hundred times COSINE's
TOO_WEAK = {"weight": 3e-5, "temperature": 1.0}


@pytest.fixture
def start(corpus, settings):
    """Returns a run of a preset."""
    common = {"batch_size": 16, "learning_rate": 5e-3, "probe_every": 1000}
    return lambda preset, steps=50: Run(
        corpus, dataclasses.replace(settings, **common, preset=preset, steps=steps)
    )


@pytest.mark.parametrize(
    ("flops", "change", "opposite"),
    [(TOO_STRONG, "down", "up"), (TOO_WEAK, "up", "down")],
    ids=["too strong", "too weak"],
)
def test_the_cause_is_named_within_fifty_steps(start, flops, change, opposite):
    run = start(_flops(**flops))
    for _ in range(5):
        run.settings = dataclasses.replace(run.settings, steps=run.step + 10)
        run.train()
        findings = run.findings()["document"]
        changes = [change for finding in findings for change in finding.changes]
        assert ("document_flops", opposite) not in changes
    assert findings[0].changes[0] == ("document_flops", change)


@pytest.mark.parametrize(
    ("flops", "targets"),
    [
        (TOO_STRONG, {"document_flops": 40, "query_flops": 30}),  # both sides act on one network
        (TOO_WEAK, {"document_flops": 40}),
    ],
    ids=["too strong", "too weak"],
)
def test_with_a_controller_they_neither_collapse_nor_stay_dense(corpus, start, flops, targets):
    run = start(_flops(targets=targets, **flops), steps=250)
    run.train()
    assert len(run.controllers) == len(targets)
    for side in run.controllers:
        texts = [getattr(pair, side) for row in corpus.validation for pair in row.pairs]
        active = (run.encode(texts) > 0).sum(1)
        assert (active == 0).double().mean() < 0.05
        # Of 400, and nearly all of them at the start. Where it ends below is seed and rounding:
        # how near the target the controller comes is the business of its own tests.
        assert 10 < active.double().mean() < 200


def test_a_weight_that_warms_up_is_judged_by_its_final_value(start):
    for flops, direction in ((300.0, "down"), (3e-6, "up")):
        run = start(_flops(flops))
        assert run.objective.weights["document_flops"] == 0.0
        assert run.findings()["document"][0].changes[0] == ("document_flops", direction)
