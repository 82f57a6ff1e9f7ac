import pytest
import torch

from sparse_losses.demo.objective import Objective, Weights, token_penalty
from sparse_losses.demo.switches import TERMS
from sparse_losses.demo.tokens import Tokens, pad

TOKENS = Tokens.learn(["the apple pie of the cherry", "an apple for the cherry pie"] * 3, 60)
IDF = torch.linspace(0.1, 5.0, TOKENS.vocab_size, dtype=torch.float64)


def _terms(without=(), plain_flops=False, progress=1.0, weights=None):
    torch.manual_seed(0)
    texts = [pad(TOKENS.ids(["apple pie", "the cherry"])), pad(TOKENS.ids(["a pie", "cherry"]))]
    vectors = [0.2 * torch.rand(2, TOKENS.vocab_size) for _ in range(2)]
    objective = Objective(TOKENS, IDF, weights or Weights(), without, plain_flops)
    return objective(*vectors, *texts, torch.tensor([0, 1]), progress)


def test_all_terms_by_default_and_none_is_idle():
    terms = _terms()
    assert tuple(terms) == TERMS
    assert all(term.abs() > 1e-3 for term in terms.values())


@pytest.mark.parametrize("name", TERMS)
def test_without_removes_just_that_term(name):
    full, less = _terms(), _terms([name])
    assert set(full) - set(less) == {name}
    for other, value in less.items():
        torch.testing.assert_close(value, full[other])


@pytest.mark.parametrize("name", ["special_penalty", "stopword_penalty", "idf"])
def test_without_an_ingredient_changes_flops_alone(name):
    full, less = _terms(), _terms([name])
    changed = {term for term in full if not torch.equal(full[term], less[term])}
    assert changed == {"flops"}


def test_warmup_is_quadratic_and_can_be_switched_off():
    weights = Weights(warmup=0.5)
    values = [_terms(progress=p, weights=weights)["flops"].item() for p in (0.0, 0.25, 0.5, 1.0)]
    assert values == pytest.approx([0.0, values[2] / 4, values[2], values[2]])
    assert values[2] > 0
    off = _terms(["warmup"], progress=0.0, weights=weights)["flops"].item()
    assert off == pytest.approx(values[2])


def test_plain_flops_is_the_sum_of_squared_means():
    terms = _terms(plain_flops=True)
    torch.manual_seed(0)
    vectors = [0.2 * torch.rand(2, TOKENS.vocab_size) for _ in range(2)]
    expected = sum(float((x.mean(0) ** 2).sum()) for x in vectors) / 2
    assert terms["flops"].item() == pytest.approx(Weights().flops * expected, rel=1e-5)


def test_token_penalty_and_its_switches():
    weights = Weights(idf_alpha=4.0, penalty_floor=0.03)
    stop, special = list(TOKENS.stopword_ids), list(TOKENS.special_ids)
    ordinary = torch.ones(TOKENS.vocab_size, dtype=torch.bool)
    ordinary[special] = False
    full = token_penalty(TOKENS, IDF, weights, frozenset())
    assert full[special].eq(weights.special_penalty).all()
    assert full[ordinary].min() >= 0.03 - 1e-7
    calm = token_penalty(TOKENS, IDF, weights, frozenset(["stopword_penalty"]))
    torch.testing.assert_close(full[stop], calm[stop] * weights.stopword_penalty)
    flat = token_penalty(TOKENS, IDF, weights, frozenset(["stopword_penalty", "idf"]))
    assert flat[ordinary].unique().numel() == 1
    torch.testing.assert_close(flat[ordinary].mean(), calm[ordinary].mean())
    free = token_penalty(TOKENS, IDF, weights, frozenset(["special_penalty"]))
    assert free[special].max() <= 1
