"""docs/porting.md, from sentence-transformers: its losses, called, and ours, on one input."""

from types import SimpleNamespace

import pytest
import torch
from sentence_transformers import util
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss
from sentence_transformers.sentence_transformer.losses.triplet import TripletDistanceMetric
from sentence_transformers.sparse_encoder import losses
from sentence_transformers.sparse_encoder.callbacks import SpladeRegularizerWeightSchedulerCallback

import sparse_losses as sl
import sparse_losses.functional as F
from sparse_losses.objective import terms
from tests.porting.compare import N, Q, V, activations, assert_equal
from tests.representation.tiny_models import tokenizer

# Queries, positives and N negatives, [Q, V] each, and a teacher's scores of the documents.
COLUMNS = [activations(Q, V, seed=seed) for seed in range(2 + N)]
TEACHER = 5 * activations(Q, 1 + N, seed=9).detach()
MARGINS = TEACHER[:, :1] - TEACHER[:, 1:]
HALF = {"temperature": 0.5, "similarity": "dot"}
RANKING = losses.SparseMultipleNegativesRankingLoss


class Given(torch.nn.Module):
    """A model whose texts are their vectors, by a key; with the tokenizer that GIST asks for."""

    max_seq_length = 9

    def __init__(self, key="vectors"):
        super().__init__()
        self.key, self.tokenizer = key, tokenizer("wordpiece")

    def forward(self, features):
        return {"sentence_embedding": features[self.key]}


def of(loss, labels=None):
    """The value of their loss, as a function of columns."""
    return lambda *columns: loss.compute_loss_from_embeddings([*columns], labels)


def ranking(scale, similarity):
    """`scale` is 1 / temperature; every document of the batch is a candidate of every query."""
    function = {"dot": util.dot_score, "cosine": util.cos_sim}[similarity]
    ours = sl.InfoNCELoss(temperature=1 / scale, similarity=similarity)
    theirs = RANKING(None, scale=scale, similarity_fct=function)
    return of(theirs), lambda q, p, *n: ours(q, p, torch.cat(n) if n else None)


def distill(own, teacher_scale=1.0, **options):
    """Both multiply by T^2, both are means over the queries."""
    ours = sl.DistillationLoss(temperature=own, alpha_kl=1.0, alpha_mse=0.0)
    theirs = of(losses.SparseDistillKLDivLoss(None, **options), TEACHER)
    return theirs, lambda *columns: ours(scores_of(*columns), teacher_scale * TEACHER)


def scores_of(query, *documents):
    """``[Q, 1 + N]``: each query with its own documents."""
    return torch.stack([(query * document).sum(-1) for document in documents], 1)


def margin_mse(positive, negative):
    """A mean over queries and negatives alike, of scores or of margins, whose positives are 0."""

    def ours(*columns):
        scores = scores_of(*columns)
        teacher = positive, negative[:, : len(columns) - 2]
        return F.margin_mse_loss(scores[:, 0], scores[:, 1:], *teacher)

    return ours


def both_directions(query, positive, *negatives):
    """Their second direction has no negatives: with some, ours is the mean of two calls."""
    loss = sl.InfoNCELoss(**HALF)
    return (loss(query, positive, torch.cat(negatives)) + loss(positive, query)) / 2


def squared(x, y):
    return (x - y).square().sum(-1)


BOTH = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
BOTH_WAYS = RANKING(None, scale=2.0, **BOTH)
JOINT = {"directions": ("query_to_doc", "query_to_query", "doc_to_doc")}
COSINE = {"distance_metric": TripletDistanceMetric.COSINE, "triplet_margin": 0.3}
FAR = sl.TripletMarginLoss(margin=5.0, similarity="euclidean")
ALL = 2 + N
PAIRS = {  # the number of columns, their loss of them, and ours
    **{
        f"ranking-{similarity}-{scale}-{number}": (number, *ranking(scale, similarity))
        for similarity in ("dot", "cosine")
        for scale in (1.0, 20.0)
        for number in (2, ALL)
    },
    "ranking-both-directions": (2, of(BOTH_WAYS), sl.InfoNCELoss(**HALF, symmetric=True)),
    "ranking-both-with-negatives": (ALL, of(BOTH_WAYS), both_directions),
    "ranking-from-both-sides": (
        2,
        of(RANKING(None, scale=2.0, **JOINT)),
        sl.InfoNCELoss(**HALF, negatives_from=("document", "query", "positive")),
    ),
    "distill-default": (ALL, *distill(2.0)),
    "distill-one-temperature": (ALL, *distill(5.0, temperature=5.0)),
    # The student's multiplies the loss; the teacher's divides its scores.
    "distill-two": (ALL, *distill(3.0, 6.0, student_temperature=3.0, teacher_temperature=0.5)),
    "margin-mse": (
        ALL,
        of(losses.SparseMarginMSELoss(None), TEACHER),
        margin_mse(TEACHER[:, 0], TEACHER[:, 1:]),
    ),
    "margin-mse-of-margins": (
        3,
        of(losses.SparseMarginMSELoss(None), MARGINS[:, :1]),
        margin_mse(torch.zeros(Q), -MARGINS),
    ),
    "triplet-on-cosines": (3, of(losses.SparseTripletLoss(None, **COSINE)), sl.TripletMarginLoss()),
    "triplet-on-squares": (3, of(losses.SparseTripletLoss(None, distance_metric=squared)), FAR),
    "flops": (1, lambda x: losses.FlopsLoss(None).compute_loss_from_embeddings(x), sl.FlopsLoss()),
    # Rows with few active tokens leave the sum, not the number of rows.
    "flops-threshold": (
        1,
        lambda x: losses.FlopsLoss(None, threshold=5).compute_loss_from_embeddings(x),
        sl.FlopsLoss(threshold=5),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_loss(name):
    number, theirs, ours = PAIRS[name]
    columns = COLUMNS[:number]
    assert_equal(theirs(*columns), ours(*columns), *columns)


def splade_loss(**options):
    """The sum of what theirs returns, as their trainer adds it up."""
    features = [{"vectors": column} for column in COLUMNS]
    return sum(losses.SpladeLoss(Given(), RANKING(Given()), **options)(features, None).values())


def test_splade_loss():
    """Both document columns together are the documents; the weights are the same."""
    theirs = splade_loss(document_regularizer_weight=0.3, query_regularizer_weight=0.7)
    info_nce = sl.InfoNCELoss(temperature=1.0, similarity="dot")
    built = {"info_nce": (1.0, terms.info_nce(info_nce))}
    built |= {"document_flops": (0.3, terms.flops("document"))}
    objective = sl.SpladeObjective(built | {"query_flops": (0.7, terms.flops("query"))})
    query, positive = map(sl.Texts, COLUMNS[:2])
    ours, _ = objective(sl.SpladeBatch(query, positive, sl.Texts(torch.cat(COLUMNS[2:]))))
    assert_equal(theirs, ours, *COLUMNS)

    theirs = splade_loss(use_document_regularizer_only=True, document_regularizer_weight=0.3)
    ours = info_nce(COLUMNS[0], COLUMNS[1], torch.cat(COLUMNS[2:]))
    assert_equal(theirs, ours + 0.3 * F.flops_loss(torch.cat(COLUMNS)), *COLUMNS)


@pytest.mark.parametrize(
    ("strategy", "margin", "bound"),
    [
        ("absolute", 0.0, {"margin": 0.0}),
        ("absolute", 0.1, {"margin": -0.1}),
        ("relative", 0.05, {"ratio": 0.95}),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_gist(strategy, margin, bound, alone):
    """By default the guide judges each block of scores by itself; its margin is a stricter one."""
    guides, columns = [activations(Q, V, seed=20 + n) for n in range(3)], COLUMNS[:3]
    options = {"margin_strategy": strategy, "margin": margin, "temperature": 0.2}
    options |= {"contrast_anchors": not alone, "contrast_positives": not alone}
    features = [{"x": x, "guide": y} for x, y in zip(columns, guides, strict=True)]
    theirs = GISTEmbedLoss(Given("x"), Given("guide"), **options)(features, None)

    def scores(query, positive, negative):
        pairs = [(query, positive), (query, query), (positive, positive), (query, negative)]
        return torch.cat([util.cos_sim(*pair) for pair in (pairs[::3] if alone else pairs)], 1)

    guide, value = scores(*guides), scores(*columns)
    positive_mask = torch.eye(*value.shape)
    mask = F.false_negative_mask(guide, positive_mask, **bound)
    assert 0 < (~mask).sum() < mask.numel() - Q
    ours = F.info_nce_from_scores(value, positive_mask, candidate_mask=mask, temperature=0.2)
    if alone:
        torch.testing.assert_close(
            F.info_nce_loss(*columns, temperature=0.2, candidate_mask=mask), ours
        )
    assert_equal(theirs, ours, *columns)


def test_triplet_on_distances_is_another_loss():
    """Theirs takes distances, ours their squares."""
    theirs = of(losses.SparseTripletLoss(None))(*COLUMNS[:3])
    assert (theirs - FAR(*COLUMNS[:3])).abs() > 0.1


@pytest.mark.parametrize("shape", ["linear", "quadratic"])
def test_warm_up(shape):
    """Theirs by default over a third of the steps; ours is told how many."""
    loss = losses.SpladeLoss(Given(), RANKING(Given()), 0.3, 0.7)
    callback = SpladeRegularizerWeightSchedulerCallback(loss, scheduler_type=shape)
    state = SimpleNamespace(max_steps=30, global_step=0)
    callback.on_train_begin(None, state, None)
    ramp = sl.Warmup(30 // 3, shape)
    for state.global_step in range(15):
        callback.on_step_begin(None, state, None)
        assert loss.query_regularizer_weight == pytest.approx(0.7 * ramp(state.global_step), abs=0)
        document = 0.3 * ramp(state.global_step)
        assert loss.document_regularizer_weight == pytest.approx(document, abs=0)
