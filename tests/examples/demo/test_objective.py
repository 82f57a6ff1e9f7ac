import pytest

from sparse_losses import COSINE, RECOMMENDED
from sparse_losses.demo.objective import loss_of, switched_off
from sparse_losses.demo.options import SWITCHES, TERMS


def test_the_switches_are_the_losses_of_the_recommended_preset():
    assert set(TERMS) == {loss_of(term) for term in RECOMMENDED.weights}
    assert set(TERMS) < set(SWITCHES)


@pytest.mark.parametrize("name", ["flops", "distillation", "min_activation"])
def test_without_removes_both_sides_of_just_that_loss(name):
    less = switched_off(COSINE, [name])
    kept = {term: weight for term, weight in COSINE.weights.items() if loss_of(term) != name}
    assert less.weights == kept
    assert len(kept) < len(COSINE.weights)
    assert less.warmup == ({} if name == "flops" else COSINE.warmup)


def test_the_warmup_can_be_switched_off():
    assert RECOMMENDED.warmup
    off = switched_off(RECOMMENDED, ["warmup"])
    assert off.warmup == {}
    assert off.weights == RECOMMENDED.weights
