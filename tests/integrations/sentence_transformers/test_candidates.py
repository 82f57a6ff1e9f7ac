"""Candidates that are left out: a row's own positive among others, and scores of ``-inf``."""

import pytest
import torch

import sparse_losses as sl
from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss
from sparse_losses.objective import terms
from tests.distributed.ranks import run_ranks

B, N, V = 4, 3, 12
# Row 1's mined negative is row 0's positive, rows 0 and 2 have the same positive, and so on.
IDS = torch.tensor([[7, 1, 2, 9], [3, 4, 5, 7], [7, 3, 8, 7], [6, 0, 0, 0]])
ALL = torch.arange(4 * B).reshape(B, 1 + N)  # every document another one
CANDIDATES = [[0, 1, 2, 3], [0, 3], [0, 1], [0]]  # of each row, by a teacher; 0 is the positive


class Given(torch.nn.Module):
    """A model whose texts are their vectors."""

    def forward(self, features):
        return {"sentence_embedding": features["vectors"]}


def softmax(in_batch, shared):
    """The mean of ``-log p`` of the positive among the candidates of a row, dot products."""

    def value(vectors, ids):
        scores = torch.einsum("iv,cjv->ijc", vectors[0], torch.stack(vectors[1:]))
        rows = []
        for i in range(B):
            negatives = [(i, c) for c in range(1, 1 + N)]
            of_others = range(1 + N) if shared else [0]
            negatives += [(j, c) for j in range(B) for c in of_others if j != i and in_batch]
            kept = [scores[i, j, c] for j, c in negatives if ids[j, c] != ids[i, 0]]
            rows.append(torch.stack([scores[i, i, 0], *kept]).logsumexp(0) - scores[i, i, 0])
        return torch.stack(rows).mean()

    return value


def of_rows(row, candidates=None):
    """The mean over the rows that have negatives, of a row's own scores and labels."""

    def value(vectors, labels):
        scores = torch.einsum("iv,civ->ic", vectors[0], torch.stack(vectors[1:]))
        own = candidates or [[0, *(x != x[0]).nonzero()[:, 0].tolist()] for x in labels]
        values = [row(scores[i, x], labels[i, x]) for i, x in enumerate(own) if len(x) > 1]
        return torch.stack(values).mean()

    return value


def hinge(s, _):
    return (0.3 + s[1:] - s[0]).relu().mean()


def ordered(s, t):
    return torch.stack(
        [(s[b] - s[a]).exp().log1p() for a in range(len(s)) for b in range(len(s)) if t[a] > t[b]]
    ).mean()


def error(s, t):
    return (s[0] - s[1:] - t[0] + t[1:]).square().mean()


def objective(term):
    return sl.SpladeObjective({"term": (1.0, term)})


INFO_NCE = sl.InfoNCELoss(similarity="dot", temperature=1.0)
OWN = sl.InfoNCELoss(similarity="dot", temperature=1.0, in_batch=False)
TRIPLET, RANKNET = sl.TripletMarginLoss(similarity="dot"), terms.ranknet(similarity="dot")
# By name the loss, its formula, and whether its labels are ids or scores.
CASES = {
    "info_nce": (INFO_NCE, softmax(True, True), True),
    "info_nce of own": (OWN, softmax(False, False), True),
    "triplet_margin": (TRIPLET, of_rows(hinge), True),
    "margin_mse": (sl.MarginMSELoss(), of_rows(error, CANDIDATES), False),
    "ranknet": (sl.RankNetLoss(), of_rows(ordered, CANDIDATES), False),
    "objective, info_nce": (objective(terms.info_nce(INFO_NCE)), softmax(True, False), True),
    "objective, triplet": (objective(terms.triplet_margin(TRIPLET)), of_rows(hinge), True),
    "objective, ranknet": (objective(RANKNET), of_rows(ordered, CANDIDATES), False),
}


def rows():
    """Vectors and a teacher's scores."""
    torch.manual_seed(0)
    vectors = [torch.rand(B, V, dtype=torch.float64).requires_grad_() for _ in range(2 + N)]
    there = torch.tensor([[c in own for c in range(1 + N)] for own in CANDIDATES])
    return vectors, torch.randn(B, 1 + N, dtype=torch.float64).where(there, -torch.inf)


@pytest.mark.parametrize("cached", [None, 3])
@pytest.mark.parametrize("name", CASES)
def test_what_is_no_negative_of_a_row_is_left_out(name, cached):
    vectors, scores = rows()
    loss, formula, has_ids = CASES[name]
    options = {"labels_are_ids": has_ids, "mini_batch_size": cached}
    wrapped = SentenceTransformersLoss(Given(), loss, **options)
    value = wrapped([{"vectors": x} for x in vectors], IDS if has_ids else scores)
    expected = formula(vectors, IDS if has_ids else scores)
    torch.testing.assert_close(value, expected)
    value.backward()
    gradients = torch.autograd.grad(expected, vectors)
    torch.testing.assert_close([x.grad for x in vectors], list(gradients))


def test_ids_of_the_positives_alone_leave_the_negatives_in():
    vectors, _ = rows()
    columns = [{"vectors": x} for x in vectors]
    wrapped = SentenceTransformersLoss(Given(), INFO_NCE, labels_are_ids=True)
    ids = ALL.clone()
    ids[:, 0] = IDS[:, 0] + 100
    torch.testing.assert_close(wrapped(columns, ids[:, 0]), softmax(True, True)(vectors, ids))
    for wrong in (None, IDS[:, :2], IDS[:2]):
        with pytest.raises(ValueError, match=r"expected labels as \[\[4\], \[4, 4\]\], got"):
            wrapped(columns, wrong)


def on_ranks(rank, world=2):
    """Values and gradients of losses with ``gather``, of this rank's rows."""
    mine, results = slice(rank * B // world, (rank + 1) * B // world), []
    several = {"info_nce": terms.info_nce(INFO_NCE), "triplet": terms.triplet_margin()}
    several = sl.SpladeObjective({name: (1.0, x) for name, x in several.items()}, gather=True)
    for loss in (sl.InfoNCELoss(similarity="dot", temperature=1.0, gather=True), several):
        leaves = [x[mine].detach().clone().requires_grad_() for x in rows()[0]]
        wrapped = SentenceTransformersLoss(Given(), loss, labels_are_ids=True)
        value = wrapped([{"vectors": x} for x in leaves], IDS[mine])
        gradients = torch.autograd.grad(value, leaves)
        results.append([value.detach(), *(x / world for x in gradients)])
    return results


def test_all_ranks_negatives_are_left_out_as_in_one_process():
    expected = on_ranks(0, world=1)
    for rank, found in enumerate(run_ranks(2, on_ranks)):
        for (value, *gradients), (whole, *parts) in zip(found, expected, strict=True):
            torch.testing.assert_close(value, whole)
            torch.testing.assert_close(gradients, [x.chunk(2)[rank] for x in parts])
