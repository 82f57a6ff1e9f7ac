"""Our losses and regularisers inside SpladeLoss and CachedSpladeLoss.

With theirs the same value and gradient: test_splade_loss of tests/porting.
"""

import pytest
from sentence_transformers.sparse_encoder import losses as theirs

from tests.integrations.sentence_transformers.runs import (
    ALONE,
    NAME,
    adapter,
    assert_moved,
    assert_same_weights,
    dataset,
    logged,
    plain_loop,
    splade,
    train,
)

REGULARISERS = ("flops", "idf_flops", "min_activation", "language_penalty")


def ramp(step, warm_up=2):
    """Their warm-up: quadratic, over a third of (here) six steps."""
    return min(1.0, step / warm_up) ** 2


KINDS = {
    "SpladeLoss": {},
    "CachedSpladeLoss": {"kind": theirs.CachedSpladeLoss, "mini_batch_size": 3},
}


@pytest.mark.works_with(NAME, "fp32")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("SpladeLoss", name) for name in REGULARISERS),
        pytest.param("CachedSpladeLoss", "idf_flops", marks=pytest.mark.works_with(NAME, "cached")),
    ],
)
def test_within_splade_loss_as_loss_and_regulariser(kind, name, sparse, tmp_path):
    regulariser, _, _, formula = ALONE[name]
    loss, columns, labels, function = ALONE["info_nce"]
    model, reference = sparse(), sparse()
    wrapped = splade(model, adapter(model, loss), regulariser, **KINDS[kind])
    trainer = train(model, wrapped, dataset(columns), tmp_path)
    terms = []

    def whole(texts, labels):
        base, factor = function(texts, labels), ramp(len(terms))
        of_documents = 0.02 * factor * formula(texts[1:], None)
        of_queries = 0.05 * factor * formula(texts[:1], None)
        terms.append((base.item(), of_documents.item(), of_queries.item()))
        return base + of_documents + of_queries

    values = plain_loop(reference, whole, columns, labels)
    assert logged(trainer) == pytest.approx(values, rel=1e-3, abs=1e-3)
    assert_same_weights(model, reference)
    assert_moved(model, sparse())


WITHOUT_IDS = sorted(ALONE.keys() - {"self_reconstruction", "positive_activation", "objective"})


@pytest.mark.works_with(NAME, "fp32", "cached")
@pytest.mark.parametrize("name", WITHOUT_IDS)
def test_every_loss_of_vectors_is_a_base_of_splade_loss_cached_or_not(name, sparse, tmp_path):
    loss, columns, labels, function = ALONE[name]
    columns = 2 if name == "min_activation" else columns  # SpladeLoss wants documents
    model, cached = sparse(), sparse()
    data = dataset(columns, labels)
    one = splade(model, adapter(model, loss))
    trainer = train(model, one, data, tmp_path, num_train_epochs=1)
    values = plain_loop(sparse(), function, columns, labels, epochs=1, batch=4, count=4)
    assert logged(trainer, "base_loss")[0] == pytest.approx(values[0], rel=1e-3, abs=1e-3)
    other = splade(cached, adapter(cached, loss), **KINDS["CachedSpladeLoss"])
    train(cached, other, data, tmp_path, num_train_epochs=1)
    assert_same_weights(model, cached)
