"""docs/porting.md, from naver's SPLADE, OpenSearch and papers: our own reading of their formulas.

They are written here in NumPy from papers and descriptions; no code of theirs is called, or copied.
"""

import numpy as np
import pytest
import torch

import sparse_losses as sl
from sparse_losses.functional import flops_loss
from sparse_losses.objective import terms
from tests.porting.compare import N, Q, V, activations, assert_follows

LAMBDA_Q, LAMBDA_D = 0.3, 0.1


def positive(*shape, seed=0):
    """Where an activation is 0, their |x| has no derivative; ours has the one from above."""
    return (activations(*shape, seed=seed).detach() + 0.01).requires_grad_()


@pytest.fixture
def triplets():
    """Queries, positives and one negative of each: ``[Q, V]``."""
    return [positive(Q, V, seed=seed) for seed in range(3)]


def flops(*groups):
    """The rows of all groups together."""
    return (np.abs(np.concatenate(groups)).mean(0) ** 2).sum()


def negative_log_softmax(scores):
    """Of the first candidate, a mean over the queries ``[Q, C]``."""
    return (np.log(np.exp(scores).sum(1)) - scores[:, 0]).mean()


def test_naver_flops_of_positives_and_negatives_averaged(triplets):
    """Two calls with half the weight each."""

    def theirs(query, positive, negative):
        return LAMBDA_Q * flops(query) + LAMBDA_D * (flops(positive) + flops(negative)) / 2

    query, *documents = triplets
    documents = sum(map(flops_loss, documents))
    ours = LAMBDA_Q * flops_loss(query) + LAMBDA_D / 2 * documents
    assert_follows(theirs, ours, *triplets)


def test_naver_l1_of_queries_and_joint_flops_of_documents(triplets):
    """The L1 of queries is a language penalty of 1 a token."""

    def theirs(query, positive, negative):
        return LAMBDA_Q * np.abs(query).sum(1).mean() + LAMBDA_D * flops(positive, negative)

    query, *documents = triplets
    l1 = sl.LanguagePenaltyLoss(torch.ones(V))(query)
    ours = LAMBDA_Q * l1 + LAMBDA_D * flops_loss(torch.cat(documents))
    assert_follows(theirs, ours, *triplets)


@pytest.mark.parametrize("others", ["positives", "none", "negatives"])
def test_naver_softmax(triplets, others):
    """Over the own pair, and the batch's positives, nobody's, or all negatives."""

    def theirs(query, positive, negative):
        own = (query * positive).sum(1), (query * negative).sum(1)
        if others == "negatives":
            return negative_log_softmax(np.column_stack([own[0], query @ negative.T]))
        scores = [np.delete(row, i) for i, row in enumerate(query @ positive.T)]
        columns = [own[0], scores, own[1]] if others == "positives" else own
        return negative_log_softmax(np.column_stack(columns))

    query, positive, negative = triplets
    info_nce, n_pair = sl.InfoNCELoss(temperature=1.0, similarity="dot"), sl.NPairLoss()
    ours = {
        "positives": lambda: info_nce(query, positive, negative[:, None]),
        "none": lambda: n_pair(query, positive, negative[:, None]),
        "negatives": lambda: n_pair(*triplets),
    }
    assert_follows(theirs, ours[others](), *triplets)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_divergence_without_the_squared_temperature(temperature):
    """naver's at temperature 1, OpenSearch's at any: the weight of ours is 1 / T^2."""
    teacher = np.random.default_rng(0).normal(size=(Q, 1 + N), scale=3)

    def log_softmax(x):
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    def theirs(scores):
        p, q = log_softmax(teacher / temperature), log_softmax(scores / temperature)
        return (np.exp(p) * (p - q)).sum(1).mean()

    scores = activations(Q, 1 + N)
    ours = sl.DistillationLoss(temperature=temperature, alpha_kl=1 / temperature**2, alpha_mse=0.0)
    assert_follows(theirs, ours(scores, torch.from_numpy(teacher)), scores)


def test_opensearch_flops_of_every_group():
    """The g-th documents of all queries are a group; groups are added up, not averaged."""
    documents = positive(Q, N, V)

    def theirs(x):
        return sum(flops(x[:, g]) for g in range(N))

    ours = sum(flops_loss(documents[:, g]) for g in range(N))
    assert_follows(theirs, ours, documents)
    joint = flops_loss(documents.flatten(0, 1))
    assert ours > N * joint
    alike = documents[:, :1].expand(-1, N, -1)
    total = sum(flops_loss(alike[:, g]) for g in range(N))
    torch.testing.assert_close(total, N * flops_loss(alike.flatten(0, 1)))


@pytest.mark.parametrize("first", [0, 1], ids=["ours", "naver and OpenSearch"])
def test_quadratic_warm_up(first):
    """Theirs counts the step that is taken, from 1: tell ours of a step before the first."""
    steps, total = 8, 5
    objective = sl.SpladeObjective({"document_flops": (LAMBDA_D, terms.flops("document"))})
    schedule = sl.TrainingSchedule(
        objective, warmups={"document_flops": sl.Warmup(total, "quadratic")}
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    schedule.attach(optimizer)
    for _ in range(first):
        schedule.step()
    for taken in range(first, steps + first):
        expected = LAMBDA_D * min(1, taken / total) ** 2
        assert objective.weights["document_flops"] == pytest.approx(expected, rel=1e-12)
        optimizer.step()
