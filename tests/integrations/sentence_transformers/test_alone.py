"""Every loss as the loss of a trainer, beside a plain loop and beside theirs."""

import pytest
import torch
from datasets import DatasetDict
from sentence_transformers.sentence_transformer import losses as dense_losses
from sentence_transformers.sparse_encoder import losses as theirs

from sparse_losses import (
    DistillationLoss,
    InfoNCELoss,
    MarginMSELoss,
    PairwiseContrastiveLoss,
    SpladeObjective,
    Texts,
    TripletMarginLoss,
)
from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss
from tests.integrations.sentence_transformers.runs import (
    ALONE,
    BATCH,
    COLUMNS,
    DOT,
    MNRL,
    NAME,
    ROWS,
    SAME,
    SCORES,
    VOCABULARY,
    adapter,
    assert_moved,
    assert_same_weights,
    dataset,
    logged,
    mse_of_margins,
    plain_loop,
    random_columns,
    train,
)


@pytest.mark.works_with(NAME, "fp32")
@pytest.mark.parametrize("name", ALONE)
def test_alone_trains_as_a_plain_loop_does(name, sparse, tmp_path):
    loss, columns, labels, function = ALONE[name]
    model, reference = sparse(), sparse()
    trainer = train(model, adapter(model, loss), dataset(columns, labels), tmp_path)
    values = plain_loop(reference, function, columns, labels)
    assert logged(trainer) == pytest.approx(values, rel=1e-3, abs=1e-3)
    assert_same_weights(model, reference)
    assert_moved(model, sparse())


@pytest.mark.works_with(NAME, "fp32")
@pytest.mark.parametrize(
    "name", ["info_nce", "n_pair", "triplet_margin", "pairwise_contrastive", "margin_mse"]
)
def test_dense_encoders_train_too(name, dense, tmp_path):
    loss, columns, labels, function = ALONE[name]
    model, reference = dense(), dense()
    trainer = train(model, adapter(model, loss), dataset(columns, labels), tmp_path)
    values = plain_loop(reference, function, columns, labels)
    assert logged(trainer) == pytest.approx(values, rel=1e-3, abs=1e-3)
    assert_same_weights(model, reference)
    assert_moved(model, dense())


@pytest.mark.works_with(NAME, "fp32")
def test_the_loss_falls(sparse, tmp_path):
    model = sparse()
    loss = SentenceTransformersLoss(model, InfoNCELoss(temperature=0.1))
    trainer = train(
        model, loss, dataset(2), tmp_path, optim="adamw_torch", learning_rate=5e-3, max_steps=30
    )
    values = logged(trainer)[::3]  # full batches; the single row has a loss of 0
    assert values[-1] < 0.5 * values[0]


def test_a_callable_makes_the_loss(sparse, tmp_path):
    loss, columns, _, function = ALONE["info_nce"]
    model, reference = sparse(), sparse()
    train(model, lambda encoder: adapter(encoder, loss), dataset(columns), tmp_path)
    plain_loop(reference, function, columns)
    assert_same_weights(model, reference)


def test_a_dict_of_losses_takes_each_its_dataset(sparse, tmp_path):
    model, reference = sparse(), sparse()
    data = DatasetDict({"triples": dataset(3), "pairs": dataset(2, SAME)})
    losses = {
        "triples": lambda encoder: adapter(encoder, ALONE["triplet_margin"][0]),
        "pairs": adapter(model, ALONE["pairwise_contrastive"][0]),
    }
    settings = {"multi_dataset_batch_sampler": "round_robin", "num_train_epochs": 1}
    trainer = train(model, losses, data, tmp_path, **settings)
    rows = [range(i, min(i + BATCH, ROWS)) for i in range(0, ROWS, BATCH)]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.01)
    values = []
    for some in rows:
        for columns, labels, loss in (
            (3, None, ALONE["triplet_margin"][0]),
            (2, SAME, ALONE["pairwise_contrastive"][0]),
        ):
            texts = [[COLUMNS[name][i] for i in some] for name in list(COLUMNS)[:columns]]
            vectors = [reference(reference.preprocess(x))["sentence_embedding"] for x in texts]
            value = loss(*vectors, *([] if labels is None else [labels[list(some)]]))
            value.backward()
            values.append(value.item())
            optimizer.step()
            optimizer.zero_grad()
    assert logged(trainer) == pytest.approx(values, rel=1e-3, abs=1e-3)
    assert_same_weights(model, reference)


def test_margins_do_where_only_they_matter(sparse):
    vectors = [torch.rand(ROWS, VOCABULARY) for _ in range(4)]
    margins = SCORES[:, :1] - SCORES[:, 1:]
    expected = mse_of_margins([Texts(x) for x in vectors], SCORES)
    for loss in (MarginMSELoss(), SpladeObjective({"margin_mse": 1.0}, info_nce=DOT)):
        wrapped = SentenceTransformersLoss(sparse(), loss)
        for labels in (SCORES, margins):
            found = wrapped.compute_loss_from_embeddings(vectors, labels)
            found = found if torch.is_tensor(found) else found["margin_mse"]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    one = SentenceTransformersLoss(sparse(), MarginMSELoss())
    found = [
        one.compute_loss_from_embeddings(vectors[:3], x) for x in (margins[:, 0], SCORES[:, :2])
    ]
    torch.testing.assert_close(*found)
    # The z-score of a batch moves with the rows' levels.
    for loss in (DistillationLoss(), SpladeObjective({"margin_mse": 1.0, "distillation": 1.0})):
        wrapped = SentenceTransformersLoss(sparse(), loss)
        wrapped.compute_loss_from_embeddings(vectors, SCORES)
        with pytest.raises(ValueError, match=r"expected labels \[9, 3\], .* got \[9, 2\]"):
            wrapped.compute_loss_from_embeddings(vectors, margins)


def test_labels_may_be_ids_of_the_positives(sparse):
    vectors, ids = [torch.rand(4, VOCABULARY) for _ in range(2)], torch.tensor([7, 7, 1, 2])
    expected = InfoNCELoss()(*vectors, positive_ids=ids)
    for loss in (InfoNCELoss(), SpladeObjective({"info_nce": 1.0})):
        wrapped = SentenceTransformersLoss(sparse(), loss, labels_are_positive_ids=True)
        found = wrapped.compute_loss_from_embeddings(vectors, ids)
        assert (found if torch.is_tensor(found) else found["info_nce"]) == expected
        unread = SentenceTransformersLoss(sparse(), loss)
        found = unread.compute_loss_from_embeddings(vectors, ids)
        assert (found if torch.is_tensor(found) else found["info_nce"]) != expected


LIKE_THEIRS = {
    "MNRL, pairs": (lambda m: MNRL(m), InfoNCELoss(temperature=1.0, similarity="dot"), 2, None),
    "MNRL, scale 20": (
        lambda m: MNRL(m, scale=20.0),
        InfoNCELoss(temperature=1 / 20, similarity="dot"),
        3,
        None,
    ),
    "MNRL, negatives": (
        lambda m: MNRL(m, scale=0.5),
        InfoNCELoss(temperature=2.0, similarity="dot"),
        4,
        None,
    ),
    "dense MNRL": (
        lambda m: dense_losses.MultipleNegativesRankingLoss(m),
        InfoNCELoss(temperature=1 / 20),
        3,
        None,
    ),
    "dense symmetric": (
        lambda m: dense_losses.MultipleNegativesRankingLoss(
            m, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        ),
        InfoNCELoss(temperature=1 / 20, symmetric=True),
        2,
        None,
    ),
    "MarginMSE, scores": (lambda m: theirs.SparseMarginMSELoss(m), MarginMSELoss(), 4, SCORES[:6]),
    "MarginMSE, margins": (
        lambda m: theirs.SparseMarginMSELoss(m),
        MarginMSELoss(),
        4,
        SCORES[:6, :1] - SCORES[:6, 1:],
    ),
    "MarginMSE, one": (lambda m: theirs.SparseMarginMSELoss(m), MarginMSELoss(), 3, SCORES[:6, 0]),
    "DistillKLDiv": (
        lambda m: theirs.SparseDistillKLDivLoss(m),
        DistillationLoss(temperature=2.0, alpha_kl=1.0, alpha_mse=0.0),
        4,
        SCORES[:6],
    ),
    "DistillKLDiv, 4": (
        lambda m: theirs.SparseDistillKLDivLoss(m, temperature=4.0),
        DistillationLoss(temperature=4.0, alpha_kl=1.0, alpha_mse=0.0),
        3,
        SCORES[:6, :2],
    ),
    "Triplet": (
        lambda m: theirs.SparseTripletLoss(
            m, distance_metric=dense_losses.TripletDistanceMetric.COSINE, triplet_margin=0.5
        ),
        TripletMarginLoss(margin=0.5),
        3,
        None,
    ),
}


@pytest.mark.parametrize("name", LIKE_THEIRS)
def test_where_the_formulas_coincide_values_and_gradients_do(name, sparse):
    make, ours, columns, labels = LIKE_THEIRS[name]
    model = sparse()
    found, expected = random_columns(columns), random_columns(columns)
    one = SentenceTransformersLoss(model, ours).compute_loss_from_embeddings(found, labels)
    other = make(model).compute_loss_from_embeddings(expected, labels)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    one.backward()
    other.backward()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


def test_contrastive_is_theirs_without_the_half(sparse):
    vectors, model = random_columns(2), sparse()
    metric = dense_losses.SiameseDistanceMetric.EUCLIDEAN
    other = dense_losses.ContrastiveLoss(model, distance_metric=metric, margin=4.0)
    ours = SentenceTransformersLoss(model, PairwiseContrastiveLoss(margin=4.0))
    found = ours.compute_loss_from_embeddings(vectors, SAME[:6])
    expected = 2.0 * other.compute_loss_from_embeddings(vectors, SAME[:6])
    torch.testing.assert_close(found, expected)
