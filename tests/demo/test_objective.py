import pytest
import torch

from sparse_losses import COSINE, SpladeBatch, Texts
from sparse_losses.demo.objective import (
    loss_of,
    make_objective,
    switched_off,
    token_penalty,
)
from sparse_losses.demo.options import TERMS
from sparse_losses.demo.tokens import Tokens, pad

TOKENS = Tokens.learn(["the apple pie of the cherry", "an apple for the cherry pie"] * 3, 60)
IDF = torch.linspace(0.1, 5.0, TOKENS.vocab_size, dtype=torch.float64)
STEPS = 100


def _vectors():
    torch.manual_seed(0)
    return [0.2 * torch.rand(2, TOKENS.vocab_size) for _ in range(2)]


def _terms(without=(), progress=1.0, preset=COSINE):
    """The weighted terms, both sides of a loss together, as the training's record has them."""
    texts = [pad(TOKENS.ids(["apple pie", "the cherry"])), pad(TOKENS.ids(["a pie", "cherry"]))]
    sides = [
        Texts(vector, text.input_ids, text.attention_mask)
        for vector, text in zip(_vectors(), texts, strict=True)
    ]
    preset = switched_off(preset.replace(target_active={}), without)
    objective = make_objective(TOKENS, IDF, preset, without)
    (schedule,) = preset.schedules(objective, steps=STEPS)
    schedule.load_state_dict({"steps_taken": round(progress * STEPS)})
    total, terms = objective(
        SpladeBatch(
            *sides,
            positive_ids=torch.tensor([0, 1]),
            teacher_scores=torch.tensor([[3.0, 0.0], [1.0, 2.0]]),
        )
    )
    weighted = {}
    for name, value in terms.items():
        before = weighted.get(loss_of(name), 0.0)
        weighted[loss_of(name)] = before + objective.weights[name] * value
    torch.testing.assert_close(total, torch.as_tensor(sum(weighted.values())))
    return weighted


def test_all_terms_by_default_and_none_is_idle():
    terms = _terms()
    assert set(terms) == set(TERMS)
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
    preset = COSINE.replace(warmup={"query_flops": 0.5, "document_flops": 0.5})
    values = [_terms(progress=p, preset=preset)["flops"].item() for p in (0.25, 0.5, 1.0)]
    assert values == pytest.approx([values[1] / 4, values[1], values[1]])
    assert values[1] > 0
    assert "flops" not in _terms(progress=0.0, preset=preset)
    off = _terms(["warmup"], progress=0.0, preset=preset)["flops"].item()
    assert off == pytest.approx(values[1])


def test_token_penalty_and_its_switches():
    preset = COSINE
    stop, special = list(TOKENS.stopword_ids), list(TOKENS.special_ids)
    ordinary = torch.ones(TOKENS.vocab_size, dtype=torch.bool)
    ordinary[special] = False
    full = token_penalty(TOKENS, IDF, preset, frozenset())
    assert full[special].eq(preset.special_penalty).all()
    calm = token_penalty(TOKENS, IDF, preset, frozenset(["stopword_penalty"]))
    torch.testing.assert_close(full[stop], calm[stop] * preset.stopword_penalty)
    flat = token_penalty(TOKENS, IDF, preset, frozenset(["stopword_penalty", "idf"]))
    assert flat[ordinary].unique().numel() == 1
    torch.testing.assert_close(flat[ordinary].mean(), calm[ordinary].mean())
    free = token_penalty(TOKENS, IDF, preset, frozenset(["special_penalty"]))
    assert free[special].max() <= 1
