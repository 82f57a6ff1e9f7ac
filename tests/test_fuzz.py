"""Eight hundred of the calls that ``make fuzz`` makes by the million, and that it finds defects."""

import itertools

import numpy as np
import pytest
import torch

import sparse_losses.functional as F
from tools import fuzz

CALLS = 800


def seeds_of(stem: str):
    """Seeds whose problem is of that loss: the first number drawn says so."""
    for seed in itertools.count():
        case = fuzz.CASES[np.random.default_rng(seed).integers(len(fuzz.CASES))]
        if seed % 20 != 7 and case.stem == stem:
            yield seed


def run(start: int, calls: int):
    return fuzz.fuzz(itertools.count(start), "cpu", lambda done: done >= calls)


def test_calls_at_random_are_the_formula():
    calls, following, failures = run(0, CALLS)
    assert calls >= CALLS
    assert following > CALLS / 10
    assert [str(failure) for failure in failures] == []


def test_a_seed_is_the_same_problem_wherever_a_run_starts():
    for seed in (3, 11, 40):
        one, other = fuzz.draw(seed), fuzz.draw(seed)
        assert (one.case, one.dtype, one.options) == (other.case, other.dtype, other.options)
        for name, tensor in one.tensors.items():
            torch.testing.assert_close(tensor, other.tensors[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wrong", ["value", "gradient", "nan"])
def test_a_defect_is_found_and_told_as_a_call(monkeypatch, wrong):
    plain = F.flops_loss

    def flops_loss(activations, **options):
        value = plain(activations, **options)
        if activations.dtype == torch.float64:  # the reference's
            return value
        if wrong == "gradient":
            return 2 * value - value.detach()
        return value * 1.001 if wrong == "value" else value * float("nan")

    monkeypatch.setattr(F, "flops_loss", flops_loss)
    seeds = itertools.islice(seeds_of("flops"), 20)
    failures = [failure for seed in seeds for failure in fuzz.check(seed)[1]]
    assert len(failures) > 5
    assert all("F.flops_loss(" in failure.line for failure in failures)
    exec(failures[0].line, {})
    kind = "activations" if wrong == "gradient" else "value"
    assert all(failure.what.startswith(kind) for failure in failures)


def test_a_nan_under_a_mask_that_shows_is_found(monkeypatch):
    plain = F.token_weights

    def token_weights(logits, attention_mask):  # 0 * NaN
        return plain(logits, torch.ones_like(attention_mask)) * (attention_mask != 0)

    monkeypatch.setattr(F, "token_weights", token_weights)
    hidden = (seed for seed in seeds_of("token_weights") if fuzz.draw(seed).hidden)
    assert any(fuzz.check(seed)[1] for seed in itertools.islice(hidden, 5))
