"""Every loss as the loss of a trainer, beside a plain loop.

Where a formula of ours is one of theirs, tests/porting holds them to each other.
"""

import pytest
import torch
from sentence_transformers.sparse_encoder.losses import CachedSpladeLoss, SpladeLoss

from sparse_losses import (
    DistillationLoss,
    FlopsLoss,
    MarginMSELoss,
    SpladeObjective,
    Texts,
)
from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss
from sparse_losses.objective import terms
from tests.integrations.sentence_transformers.runs import (
    ALONE,
    COLUMNS,
    NAME,
    ROWS,
    SCORES,
    VOCABULARY,
    WARM,
    adapter,
    assert_moved,
    assert_same_weights,
    dataset,
    logged,
    of_margins,
    plain_loop,
    splade,
    train,
)

TRAINED = [("sparse", name) for name in ALONE] + [("dense", "info_nce"), ("dense", "margin_mse")]


@pytest.mark.works_with(NAME, "fp32")
@pytest.mark.parametrize(("kind", "name"), TRAINED)
def test_alone_trains_as_a_plain_loop_does(kind, name, request, tmp_path):
    loss, columns, labels, function = ALONE[name]
    encoder = request.getfixturevalue(kind)
    model, reference = encoder(), encoder()
    data = dataset(columns, labels)
    trainer = train(model, adapter(model, loss), data, tmp_path, num_train_epochs=1)
    values = plain_loop(reference, function, columns, labels, epochs=1)
    assert logged(trainer) == pytest.approx(values, rel=1e-3, abs=1e-3)
    assert_same_weights(model, reference)
    assert_moved(model, encoder())


def test_labels_may_be_margins_where_only_margins_matter(sparse):
    vectors = [torch.rand(ROWS, VOCABULARY) for _ in range(4)]
    margins = SCORES[:, :1] - SCORES[:, 1:]
    expected = of_margins([Texts(x) for x in vectors], SCORES)
    wrapped = SentenceTransformersLoss(sparse(), MarginMSELoss())
    for labels in (SCORES, margins):
        value = wrapped.compute_loss_from_embeddings(vectors, labels)
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    values = [
        wrapped.compute_loss_from_embeddings(vectors[:3], x) for x in (margins[:, 0], SCORES[:, :2])
    ]
    torch.testing.assert_close(*values)
    # The z-score of a batch moves with the rows' levels.
    both = {"margin_mse": (1.0, terms.margin_mse()), "distillation": (1.0, terms.distillation())}
    for loss in (DistillationLoss(), SpladeObjective(both)):
        wrapped = SentenceTransformersLoss(sparse(), loss)
        wrapped.compute_loss_from_embeddings(vectors, SCORES)
        with pytest.raises(ValueError, match=r"expected labels \[9, 3\], .* got \[9, 2\]"):
            wrapped.compute_loss_from_embeddings(vectors, margins)


@pytest.mark.works_with(NAME, "cached")
@pytest.mark.parametrize("kind", [SpladeLoss, CachedSpladeLoss])
def test_within_splade_loss_as_loss_and_as_regulariser(kind, sparse):
    model, reference = sparse(), sparse()
    cached = {} if kind is SpladeLoss else {"mini_batch_size": 2}
    loss = splade(model, adapter(model, WARM), FlopsLoss(), kind=kind, **cached)
    features = [model.preprocess(COLUMNS[name][:4]) for name in ("anchor", "positive")]
    values = loss([dict(x) for x in features])
    sum(values.values()).backward()
    vectors = [reference(x)["sentence_embedding"] for x in features]
    flops = [FlopsLoss()(x) for x in vectors]
    expected = [WARM(*vectors), 0.02 * flops[1], 0.05 * flops[0]]
    names = ("base_loss", "document_regularizer_loss", "query_regularizer_loss")
    found = [values[name].double() for name in names]  # their cache sums in fp32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    sum(expected).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
