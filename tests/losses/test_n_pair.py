"""N-pair: its formula, its theorems, its edges."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses.functional import info_nce_loss, n_pair_loss
from tests.cases import assert_follows_the_formula
from tests.strategies import draw, seeds, sizes, vectors


@given(st.data(), sizes, st.sampled_from([None, "shared", "per_row"]), st.integers(0, 3))
def test_value_is_the_formula_for_any_negatives(data, batch, kind, count):
    arrays = {name: data.draw(vectors(batch, 3)) for name in ("anchor", "positive")}
    if kind == "shared":
        arrays["negative"] = data.draw(vectors(count, 3))
    if kind == "per_row":
        arrays["negative"] = data.draw(vectors(batch * count, 3)).reshape(batch, count, 3)
    assert_follows_the_formula("n_pair", arrays)


@given(seeds, sizes)
def test_it_is_info_nce_on_dots_at_temperature_one(seed, batch):
    a, p, n = draw(seed, batch, 3), draw(seed + 1, batch, 3), draw(seed + 2, 4, 3)
    options = {"similarity": "dot", "temperature": 1.0, "reduction": "none"}
    rows = n_pair_loss(a, p, reduction="none")
    torch.testing.assert_close(rows, info_nce_loss(a, p, **options))
    rows = n_pair_loss(a, p, n, reduction="none")
    torch.testing.assert_close(rows, info_nce_loss(a, p, n, in_batch=False, **options))
    assert (rows > 0).all()


@given(seeds)
def test_it_sees_differences_of_dots_only(seed):
    a, p, n, shift = draw(seed, 4, 3), draw(seed + 1, 4, 3), draw(seed + 2, 2, 3), draw(seed + 3, 3)
    torch.testing.assert_close(n_pair_loss(a, p + shift, n + shift), n_pair_loss(a, p, n))
    assert n_pair_loss(a, p, n) > 0
