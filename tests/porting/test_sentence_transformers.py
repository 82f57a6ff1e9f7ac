"""docs/porting.md, from sentence-transformers: its losses, called, and ours, on one input."""

from types import SimpleNamespace

import pytest
import torch
from sentence_transformers import util
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss
from sentence_transformers.sentence_transformer.losses.triplet import TripletDistanceMetric
from sentence_transformers.sparse_encoder.callbacks import SpladeRegularizerWeightSchedulerCallback
from sentence_transformers.sparse_encoder.losses import FlopsLoss as TheirFlopsLoss
from sentence_transformers.sparse_encoder.losses import (
    SparseDistillKLDivLoss,
    SparseMarginMSELoss,
    SparseMultipleNegativesRankingLoss,
    SparseTripletLoss,
    SpladeLoss,
)

import sparse_losses as sl
import sparse_losses.functional as F
from sparse_losses.objective import terms
from tests.porting.compare import N, Q, V, activations, assert_equal
from tests.representation.tiny_models import tokenizer

DOT = {"temperature": 0.5, "similarity": "dot"}


class Given(torch.nn.Module):
    """A model whose texts are their vectors, by a key; with the tokenizer that GIST asks for."""

    max_seq_length = 9

    def __init__(self, key="vectors"):
        super().__init__()
        self.key, self.tokenizer = key, tokenizer("wordpiece")

    def forward(self, features):
        return {"sentence_embedding": features[self.key]}


@pytest.fixture
def columns():
    """Queries, positives and N negatives: ``[Q, V]`` each."""
    return [activations(Q, V, seed=seed) for seed in range(2 + N)]


def scores_of(columns):
    """``[Q, 1 + N]``: each query with its own documents."""
    return torch.stack([(columns[0] * column).sum(-1) for column in columns[1:]], 1)


@pytest.mark.parametrize("threshold", [None, 5])
def test_flops(threshold):
    """Rows with few active tokens leave the sum, not the number of rows."""
    x = activations(6, V, seed=5)
    assert 0 < ((x != 0).sum(1) > 5).sum() < 6
    theirs = TheirFlopsLoss(None, threshold=threshold).compute_loss_from_embeddings(x)
    assert_equal(theirs, sl.FlopsLoss(threshold=threshold)(x), x)


def splade_loss(columns, loss, labels=None, **options):
    """The sum of what theirs returns, as their trainer adds it up."""
    features = [{"vectors": column} for column in columns]
    return sum(SpladeLoss(Given(), loss, **options)(features, labels).values())


def test_splade_loss(columns):
    """Both document columns together are the documents; the weights are the same."""
    theirs = splade_loss(
        columns,
        SparseMultipleNegativesRankingLoss(Given()),
        document_regularizer_weight=0.3,
        query_regularizer_weight=0.7,
    )
    objective = sl.SpladeObjective(
        {
            "info_nce": (1.0, terms.info_nce(sl.InfoNCELoss(temperature=1.0, similarity="dot"))),
            "document_flops": (0.3, terms.flops("document")),
            "query_flops": (0.7, terms.flops("query")),
        }
    )
    query, positive = map(sl.Texts, columns[:2])
    ours, _ = objective(sl.SpladeBatch(query, positive, sl.Texts(torch.cat(columns[2:]))))
    assert_equal(theirs, ours, *columns)


def test_splade_loss_of_documents_only(columns):
    options = {"use_document_regularizer_only": True, "document_regularizer_weight": 0.3}
    theirs = splade_loss(columns, SparseMultipleNegativesRankingLoss(Given()), **options)
    info_nce = sl.InfoNCELoss(temperature=1.0, similarity="dot")
    ours = info_nce(columns[0], columns[1], torch.cat(columns[2:]))
    assert_equal(theirs, ours + 0.3 * F.flops_loss(torch.cat(columns)), *columns)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("negatives", [0, N])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_multiple_negatives_ranking(columns, similarity, negatives, scale):
    """`scale` is 1 / temperature; every document of the batch is a candidate of every query."""
    columns = columns[: 2 + negatives]
    function = {"dot": util.dot_score, "cosine": util.cos_sim}[similarity]
    loss = SparseMultipleNegativesRankingLoss(None, scale=scale, similarity_fct=function)
    theirs = loss.compute_loss_from_embeddings(columns, None)
    shared = torch.cat(columns[2:]) if negatives else None
    ours = sl.InfoNCELoss(temperature=1 / scale, similarity=similarity)
    assert_equal(theirs, ours(columns[0], columns[1], shared), *columns)


def test_multiple_negatives_ranking_in_both_directions(columns):
    """Their second direction has no negatives: with some, ours is the mean of two calls."""
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    loss = SparseMultipleNegativesRankingLoss(None, scale=2.0, **both)
    query, positive, *negatives = columns
    theirs = loss.compute_loss_from_embeddings([query, positive], None)
    assert_equal(theirs, sl.InfoNCELoss(**DOT, symmetric=True)(query, positive), query, positive)

    theirs = loss.compute_loss_from_embeddings(columns, None)
    info_nce = sl.InfoNCELoss(**DOT)
    forth, back = info_nce(query, positive, torch.cat(negatives)), info_nce(positive, query)
    assert_equal(theirs, (forth + back) / 2, *columns)


def test_multiple_negatives_ranking_with_negatives_from_both_sides(columns):
    joint = {"directions": ("query_to_doc", "query_to_query", "doc_to_doc")}
    loss = SparseMultipleNegativesRankingLoss(None, scale=2.0, **joint)
    theirs = loss.compute_loss_from_embeddings(columns[:2], None)
    ours = sl.InfoNCELoss(**DOT, negatives_from=("document", "query", "positive"))
    assert_equal(theirs, ours(*columns[:2]), *columns[:2])


def gist(columns, guides, **options):
    features = [{"x": x, "guide": y} for x, y in zip(columns, guides, strict=True)]
    return GISTEmbedLoss(Given("x"), Given("guide"), temperature=0.2, **options)(features, None)


BOUNDS = [("absolute", 0.0, {"margin": 0.0}), ("absolute", 0.1, {"margin": -0.1})]
BOUNDS += [("relative", 0.05, {"ratio": 0.95})]


@pytest.mark.parametrize(("strategy", "margin", "bound"), BOUNDS)
@pytest.mark.parametrize("negatives", [0, 1])
def test_gist(columns, strategy, margin, bound, negatives):
    """Their margin makes the bound stricter, ours of a positive number looser."""
    columns, guides = columns[: 2 + negatives], [activations(Q, V, seed=20 + n) for n in range(3)]
    options = {"margin_strategy": strategy, "margin": margin}
    alone = {"contrast_anchors": False, "contrast_positives": False}
    theirs = gist(columns, guides[: 2 + negatives], **options, **alone)
    scores = util.cos_sim(guides[0], torch.cat(guides[1 : 2 + negatives]))
    mask = F.false_negative_mask(scores, torch.eye(*scores.shape), **bound)
    assert 0 < (~mask).sum() < mask.numel() - Q
    ours = F.info_nce_loss(*columns, temperature=0.2, candidate_mask=mask)
    assert_equal(theirs, ours, *columns)


@pytest.mark.parametrize(("strategy", "margin", "bound"), BOUNDS)
def test_gist_with_anchors_and_positives_as_negatives(columns, strategy, margin, bound):
    """Their default: the guide judges each block of scores by itself."""
    guides = [activations(Q, V, seed=20 + n) for n in range(3)]
    theirs = gist(columns[:3], guides, margin_strategy=strategy, margin=margin)

    def scores(query, positive, negative):
        pairs = (query, positive), (query, query), (positive, positive), (query, negative)
        return torch.cat([util.cos_sim(*pair) for pair in pairs], 1)

    positive_mask = torch.eye(Q, 4 * Q)
    mask = F.false_negative_mask(scores(*guides), positive_mask, **bound)
    value = scores(*columns[:3])
    ours = F.info_nce_from_scores(value, positive_mask, candidate_mask=mask, temperature=0.2)
    assert_equal(theirs, ours, *columns[:3])


@pytest.mark.parametrize("labels", ["scores", "margins"])
@pytest.mark.parametrize("negatives", [1, N])
def test_margin_mse(columns, labels, negatives):
    """A mean over queries and negatives alike; margins are teacher scores of the positive, or 0."""
    columns = columns[: 2 + negatives]
    teacher = 5 * activations(Q, 1 + negatives, seed=9).detach()
    margins = teacher[:, :1] - teacher[:, 1:]
    target = teacher if labels == "scores" else margins
    theirs = SparseMarginMSELoss(None).compute_loss_from_embeddings(columns, target)
    scores = scores_of(columns)
    t = (teacher[:, 0], teacher[:, 1:]) if labels == "scores" else (torch.zeros(Q), -margins)
    assert_equal(theirs, F.margin_mse_loss(scores[:, 0], scores[:, 1:], *t), *columns)


def test_margin_mse_of_the_objective(columns):
    teacher = 5 * activations(Q, 1 + N, seed=9).detach()
    theirs = SparseMarginMSELoss(None).compute_loss_from_embeddings(columns, teacher)
    objective = sl.SpladeObjective({"margin_mse": (1.0, terms.margin_mse(similarity="dot"))})
    own = sl.Texts(torch.stack(columns[2:], 1))
    batch = sl.SpladeBatch(sl.Texts(columns[0]), sl.Texts(columns[1]), own, teacher_scores=teacher)
    batch = batch._replace(teacher_candidates="own")  # as many as there are positives
    assert_equal(theirs, objective(batch).total, *columns)


@pytest.mark.parametrize(
    ("options", "temperature", "teacher_scale"),
    [
        ({}, 2.0, 1.0),  # their default
        ({"temperature": 5.0}, 5.0, 1.0),
        # The student's multiplies the loss; the teacher's divides its scores.
        ({"student_temperature": 3.0, "teacher_temperature": 0.5}, 3.0, 3.0 / 0.5),
    ],
    ids=["default", "one temperature", "two"],
)
def test_distill_kl_div(columns, options, temperature, teacher_scale):
    """Both multiply by T^2, both are means over the queries."""
    teacher = 5 * activations(Q, 1 + N, seed=9).detach()
    theirs = SparseDistillKLDivLoss(None, **options).compute_loss_from_embeddings(columns, teacher)
    ours = sl.DistillationLoss(temperature=temperature, alpha_kl=1.0, alpha_mse=0.0)
    assert_equal(theirs, ours(scores_of(columns), teacher_scale * teacher), *columns)


def test_triplet_on_cosines(columns):
    metric = TripletDistanceMetric.COSINE
    theirs = SparseTripletLoss(None, distance_metric=metric, triplet_margin=0.3)
    value = theirs.compute_loss_from_embeddings(columns[:3], None)
    assert_equal(value, sl.TripletMarginLoss(margin=0.3)(*columns[:3]), *columns[:3])


def test_triplet_on_distances_is_another_loss(columns):
    """Theirs takes distances, ours their squares, unless its distance is squared."""
    theirs = SparseTripletLoss(None).compute_loss_from_embeddings(columns[:3], None)
    ours = sl.TripletMarginLoss(margin=5.0, similarity="euclidean")
    assert (theirs - ours(*columns[:3])).abs() > 0.1
    squared = SparseTripletLoss(None, distance_metric=lambda x, y: (x - y).square().sum(-1))
    value = squared.compute_loss_from_embeddings(columns[:3], None)
    assert_equal(value, ours(*columns[:3]), *columns[:3])


@pytest.mark.parametrize("shape", ["linear", "quadratic"])
def test_warm_up(shape):
    """Theirs by default over a third of the steps; ours is told how many."""
    loss = SpladeLoss(Given(), SparseMultipleNegativesRankingLoss(Given()), 0.3, 0.7)
    callback = SpladeRegularizerWeightSchedulerCallback(loss, scheduler_type=shape)
    state = SimpleNamespace(max_steps=30, global_step=0)
    callback.on_train_begin(None, state, None)
    ramp = sl.Warmup(30 // 3, shape)
    for step in range(15):
        state.global_step = step
        callback.on_step_begin(None, state, None)
        assert loss.query_regularizer_weight == pytest.approx(0.7 * ramp(step), abs=0)
        assert loss.document_regularizer_weight == pytest.approx(0.3 * ramp(step), abs=0)
