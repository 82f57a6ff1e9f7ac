"""Language penalty: its formula, its theorems, its edges."""

import numpy as np
from hypothesis import given

from tests.cases import assert_follows_the_formula
from tests.strategies import activations, seeds


@given(activations(), seeds)
def test_value_is_the_formula_for_any_penalty(x, seed):
    penalty = np.random.default_rng(seed).choice([0.0, 1.5, 100.0], size=x.shape[1])
    assert_follows_the_formula("language_penalty", {"activations": x, "token_penalty": penalty})
