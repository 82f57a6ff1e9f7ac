"""docs/porting.md, from naver's SPLADE, OpenSearch and papers: our own reading of their formulas.

They are written here from papers and descriptions; no code of theirs is called, or copied.
"""

import pytest
import torch

import sparse_losses as sl
from sparse_losses.functional import flops_loss
from sparse_losses.objective import terms
from tests.porting.compare import N, Q, V, activations, assert_equal
from tests.strategies import draw

LAMBDA_Q, LAMBDA_D = 0.3, 0.1
INFO_NCE, N_PAIR = sl.InfoNCELoss(temperature=1.0, similarity="dot"), sl.NPairLoss()


def positive(*shape, seed=0):
    """Where an activation is 0, their |x| has no derivative; ours has the one from above."""
    return (activations(*shape, seed=seed).detach() + 0.01).requires_grad_()


def flops(*groups):
    """The rows of all groups together."""
    return torch.cat(groups).abs().mean(0).square().sum()


def softmax_of(others):
    """Over the own pair, and the batch's positives, nobody's, or all negatives."""

    def theirs(query, positive, negative):
        own = (query * positive).sum(1, keepdim=True), (query * negative).sum(1, keepdim=True)
        rest = (query @ positive.T)[~torch.eye(Q, dtype=torch.bool)].view(Q, Q - 1)
        scores = {
            "positives": [own[0], rest, own[1]],
            "nobody": own,
            "negatives": [own[0], query @ negative.T],
        }
        return -torch.cat([*scores[others]], 1).softmax(1)[:, 0].log().mean()

    return theirs


TRIPLETS = {  # of queries, positives and one negative of each, [Q, V]: theirs, ours
    "flops of positives and negatives averaged": (
        lambda q, p, n: LAMBDA_Q * flops(q) + LAMBDA_D * (flops(p) + flops(n)) / 2,
        lambda q, p, n: LAMBDA_Q * flops_loss(q) + LAMBDA_D / 2 * (flops_loss(p) + flops_loss(n)),
    ),
    "l1 of queries, a language penalty of 1 a token, and joint flops of documents": (
        lambda q, p, n: LAMBDA_Q * q.abs().sum(1).mean() + LAMBDA_D * flops(p, n),
        lambda q, p, n: (
            LAMBDA_Q * sl.LanguagePenaltyLoss(torch.ones(V))(q)
            + LAMBDA_D * flops_loss(torch.cat([p, n]))
        ),
    ),
    "softmax over the batch": (softmax_of("positives"), lambda q, p, n: INFO_NCE(q, p, n[:, None])),
    "softmax over the pair": (softmax_of("nobody"), lambda q, p, n: N_PAIR(q, p, n[:, None])),
    "softmax over all negatives": (softmax_of("negatives"), N_PAIR),
}


@pytest.mark.parametrize("name", TRIPLETS)
def test_naver(name):
    theirs, ours = TRIPLETS[name]
    tensors = [positive(Q, V, seed=seed) for seed in range(3)]
    assert_equal(theirs(*tensors), ours(*tensors), *tensors)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_divergence_without_the_squared_temperature(temperature):
    """naver's at temperature 1, OpenSearch's at any: the weight of ours is 1 / T^2."""
    teacher, scores = 3 * draw(0, Q, 1 + N), activations(Q, 1 + N)
    p, q = ((x / temperature).softmax(1) for x in (teacher, scores))
    theirs = (p * (p.log() - q.log())).sum(1).mean()
    ours = sl.DistillationLoss(temperature=temperature, alpha_kl=1 / temperature**2, alpha_mse=0.0)
    assert_equal(theirs, ours(scores, teacher), scores)


def test_opensearch_flops_of_every_group():
    """The g-th documents of all queries are a group; groups are added up, not averaged."""
    documents = positive(Q, N, V)
    ours = sum(flops_loss(documents[:, g]) for g in range(N))
    assert_equal(sum(flops(documents[:, g]) for g in range(N)), ours, documents)
    assert ours > N * flops_loss(documents.flatten(0, 1))


@pytest.mark.parametrize("first", [0, 1], ids=["ours", "naver and OpenSearch"])
def test_quadratic_warm_up(first):
    """Theirs counts the step that is taken, from 1: tell ours of a step before the first."""
    objective = sl.SpladeObjective({"document_flops": (LAMBDA_D, terms.flops("document"))})
    warmups = {"document_flops": sl.Warmup(5, "quadratic")}
    schedule = sl.TrainingSchedule(objective, warmups=warmups)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    schedule.attach(optimizer)
    for _ in range(first):
        schedule.step()
    for taken in range(first, 8 + first):
        expected = LAMBDA_D * min(1, taken / 5) ** 2
        assert objective.weights["document_flops"] == pytest.approx(expected, rel=1e-12)
        optimizer.step()
