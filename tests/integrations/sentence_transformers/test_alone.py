"""Every loss as a loss of sentence-transformers, beside its formula."""

import pytest
import torch
from sentence_transformers.sparse_encoder.losses import CachedSpladeLoss, SpladeLoss

import sparse_losses as sl
from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss
from sparse_losses.integrations.sentence_transformers.loss import LOSSES
from sparse_losses.objective import terms
from tests import cases
from tests.integrations.sentence_transformers import runs


def test_every_loss_is_known_and_tried_or_named_here():
    """A new loss needs a row in ``LOSSES`` of the adapter and one in ``runs.ALONE``."""
    known = {kind.__name__ for kind in LOSSES}
    assert {type(loss).__name__ for loss, *_ in runs.ALONE.values()} == known
    others = {"InfoNCEFromScoresLoss", "MaskedLogitMSELoss", "NWSLoss"}  # not of columns alone
    losses = {loss.module for loss in cases.LOSSES.values()}
    assert losses - known == others


ALONE = [*(("sparse", name, None) for name in runs.ALONE), ("dense", "margin_mse", None)]
ALONE += [("sparse", name, 4) for name in ("info_nce", "n_pair", "ranknet", "objective")]


@pytest.mark.parametrize(("kind", "name", "mini_batch_size"), ALONE)
def test_alone_it_is_its_formula(kind, name, mini_batch_size, request):
    loss, columns, labels, function = runs.ALONE[name]
    encoder = request.getfixturevalue(kind)
    model = encoder()
    wrapped = runs.adapter(model, loss, mini_batch_size=mini_batch_size)
    features = runs.preprocessed(model, columns)
    runs.assert_same_step(wrapped, features, labels, encoder(), function)


def test_labels_may_be_margins_where_only_margins_matter(sparse):
    vectors = [torch.rand(runs.ROWS, runs.VOCABULARY) for _ in range(4)]
    margins = runs.SCORES[:, :1] - runs.SCORES[:, 1:]
    expected = runs.of_margins([sl.Texts(x) for x in vectors], runs.SCORES)
    loss = SentenceTransformersLoss(sparse(), sl.MarginMSELoss()).compute_loss_from_embeddings
    for labels in (runs.SCORES, margins):
        torch.testing.assert_close(loss(vectors, labels), expected, rtol=1e-4, atol=1e-5)
    of_two = [loss(vectors[:3], x) for x in (margins[:, 0], runs.SCORES[:, :2])]
    torch.testing.assert_close(*of_two)
    with pytest.raises(ValueError, match=r"got \[2, 9\]"):  # as many numbers
        loss(vectors, margins.T)
    # The z-score of a batch moves with the rows' levels.
    both = {"margin_mse": (1.0, terms.margin_mse()), "distillation": (1.0, terms.distillation())}
    for loss in (sl.DistillationLoss(), sl.SpladeObjective(both)):
        wrapped = SentenceTransformersLoss(sparse(), loss)
        wrapped.compute_loss_from_embeddings(vectors, runs.SCORES)
        with pytest.raises(ValueError, match=r"labels as \[\[9, 3\]\], got \[9, 2\]"):
            wrapped.compute_loss_from_embeddings(vectors, margins)


@pytest.mark.works_with(runs.NAME, "cached")
@pytest.mark.parametrize("kind", [SpladeLoss, CachedSpladeLoss])
def test_within_splade_loss_as_loss_and_as_regulariser(kind, sparse):
    model, reference = sparse(), sparse()
    cached = {} if kind is SpladeLoss else {"mini_batch_size": 2}
    loss = runs.splade(model, runs.adapter(model, runs.WARM), sl.FlopsLoss(), kind=kind, **cached)
    features = [model.preprocess(runs.COLUMNS[name][:4]) for name in ("anchor", "positive")]
    values = loss([dict(x) for x in features])
    sum(values.values()).backward()
    vectors = [reference(x)["sentence_embedding"] for x in features]
    flops = [sl.FlopsLoss()(x) for x in vectors]
    expected = [runs.WARM(*vectors), 0.02 * flops[1], 0.05 * flops[0]]
    names = ("base_loss", "document_regularizer_loss", "query_regularizer_loss")
    found = [values[name].double() for name in names]  # their cache sums in fp32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    sum(expected).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
