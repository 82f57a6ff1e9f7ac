"""Runs with wrong weights: what `advise` says of them."""

import dataclasses

import pytest

from examples.demo.training import Run
from sparse_losses import COSINE


def _flops(weight, **changes):
    """COSINE with other weights of FLOPS."""
    weights = dict.fromkeys(("query_flops", "document_flops"), weight)
    return COSINE.replace(weights=weights, target_active={}, **changes)


TOO_STRONG = {"weight": 3.0, "warmup": {}}  # a hundred times COSINE's
TOO_WEAK = {"weight": 3e-5, "temperature": 1.0}


@pytest.fixture
def start(corpus, settings):
    """Returns a run of a preset."""
    common = {"batch_size": 16, "learning_rate": 5e-3, "probe_every": 1000}
    return lambda preset: Run(
        corpus, dataclasses.replace(settings, **common, preset=preset, steps=50)
    )


@pytest.mark.parametrize(
    ("flops", "change", "opposite"),
    [(TOO_STRONG, "down", "up"), (TOO_WEAK, "up", "down")],
    ids=["too strong", "too weak"],
)
def test_the_cause_is_named_within_twenty_steps(start, flops, change, opposite):
    run = start(_flops(**flops))
    for _ in range(2):
        run.settings = dataclasses.replace(run.settings, steps=run.step + 10)
        run.train()
        findings = run.findings()["document"]
        changes = [change for finding in findings for change in finding.changes]
        assert ("document_flops", opposite) not in changes
    assert findings[0].changes[0] == ("document_flops", change)


def test_a_weight_that_warms_up_is_judged_by_its_final_value(start):
    for flops, direction in ((300.0, "down"), (3e-6, "up")):
        run = start(_flops(flops))
        assert run.objective.weights["document_flops"] == 0.0
        assert run.findings()["document"][0].changes[0] == ("document_flops", direction)
