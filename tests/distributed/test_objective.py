"""SpladeObjective(gather=True), every term active: one process with all ranks' texts, to 1e-9.

Every form of negatives and of teacher's scores, in fp64.
"""

import functools

import pytest
import torch

import sparse_losses as sl
from tests.distributed.threads import run_threads
from tests.objective import making
from tests.objective.making import B, N

WORLD = 2
# Negatives, and what the teacher scores: all candidates of the rank, or each anchor's own.
FORMS = [(None, "batch"), ("shared", "batch"), ("one", "batch"), ("own", "batch")]
FORMS += [("one", "own"), ("own", "own")]


def objective(negative, *, gather):
    """Every term that these negatives allow, each with another weight, and hidden tokens."""
    weights = {name: 0.3 + 0.1 * number for number, name in enumerate(making.CALLS)}
    if negative in (None, "shared"):
        del weights["triplet_margin"], weights["margin_mse"]
    settings = {"stopword_ids": [7, 8], "special_token_ids": [0, 1], "score_scale": 3.0}
    made = making.objective(weights, gather=gather, **settings)
    learned = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    made.terms["info_nce"].loss.temperature = learned
    return made


def of_rank(rank, negative, teacher, masked):
    """A rank's batch; two documents stand there twice, and on both ranks."""
    torch.manual_seed(5 + rank)
    batch = making.batch(negative, logits=True)._replace(teacher_candidates=teacher)
    others = batch.teacher_scores.shape[1] - B
    if teacher == "own":
        scores = torch.randn(B, 2 if negative == "one" else 1 + N, dtype=torch.float64)
        scores[0, 1] = scores[-1, 0] = -torch.inf  # one negative and one positive less
        batch = batch._replace(teacher_scores=scores)
    if masked:
        columns = WORLD * B + others * (1 if negative == "own" else WORLD)
        batch = batch._replace(candidate_mask=torch.rand(B, columns) < 0.8)
    return batch


def diagonal(blocks):
    """The candidates of the other ranks are none."""
    whole = torch.block_diag(*blocks)
    return whole.masked_fill(torch.block_diag(*map(torch.ones_like, blocks)) == 0, -torch.inf)


def whole(batches, negative, teacher):
    """The batch of all ranks."""
    sides = [
        None if parts[0] is None else sl.Texts(*map(torch.cat, zip(*parts, strict=True)))
        for parts in list(zip(*batches, strict=True))[:3]
    ]
    scores = [batch.teacher_scores for batch in batches]
    if teacher == "own":
        scores = torch.cat(scores)
    else:
        others = [x[:, B:] for x in scores]
        others = torch.cat(others) if negative == "own" else diagonal(others)
        scores = torch.cat([diagonal([x[:, :B] for x in scores]), others], 1)
    masks = [batch.candidate_mask for batch in batches]
    return sl.SpladeBatch(
        *sides,
        positive_ids=torch.cat([batch.positive_ids for batch in batches]),
        teacher_scores=scores,
        teacher_anchor_scores=diagonal([batch.teacher_anchor_scores for batch in batches]),
        teacher_candidates=teacher,
        candidate_mask=None if masks[0] is None else torch.cat(masks),
    )


def gradients(loss, batch):
    """Total, terms, and gradients by activations and logits, and by the temperature."""
    leaves, sides = [], []
    for side in batch[:3]:
        if side is not None:
            pair = [x.detach().clone().requires_grad_() for x in (side.activations, side.logits)]
            leaves += pair
            side = side._replace(activations=pair[0], logits=pair[1])
        sides.append(side)
    total, terms = loss(sl.SpladeBatch(*sides, *batch[3:]))
    *grads, held = torch.autograd.grad(total, [*leaves, loss.terms["info_nce"].loss.temperature])
    return total, terms, grads, held


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])  # by `candidate_mask`
@pytest.mark.parametrize(("negative", "teacher"), FORMS)
def test_values_and_averaged_gradients_are_those_of_one_process(negative, teacher, masked):
    batches = [of_rank(rank, negative, teacher, masked) for rank in range(WORLD)]
    everything = whole(batches, negative, teacher)
    expected = gradients(objective(negative, gather=False), everything)
    made = objective(negative, gather=True)
    found = run_threads(WORLD, lambda own: gradients(made, batches[own]))
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    for own, (total, terms, by_texts, _) in enumerate(found):
        close((total, terms), expected[:2])
        assert all(x.any() for x in by_texts)
        close([x / WORLD for x in by_texts], [x.chunk(WORLD)[own] for x in expected[2]])
    close(sum(by_held for *_, by_held in found) / WORLD, expected[3])
