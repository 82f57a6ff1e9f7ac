"""Candidates that are left out: empty negatives, and documents that are a row's own positive."""

from types import SimpleNamespace

import pytest
import torch

from sparse_losses import (
    InfoNCELoss,
    MarginMSELoss,
    RankNetLoss,
    SpladeObjective,
    TripletMarginLoss,
)
from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss
from sparse_losses.objective import terms
from tests.distributed.ranks import run_ranks
from tests.integrations.sentence_transformers.runs import COLUMNS, WARM

B, N, V = 4, 3, 12
CANDIDATES = [[0, 1, 2, 3], [0, 3], [0, 1], [0]]  # of each row; 0 is the positive
# Row 1's mined negative is row 0's positive, rows 0 and 2 have the same positive, and so on.
IDS = torch.tensor([[7, 1, 2, 9], [3, 4, 5, 7], [7, 3, 8, 8], [6, 0, 0, 0]])
ALL = torch.arange(4 * B).reshape(B, 1 + N)  # every document another one


class Given(torch.nn.Module):
    """A model whose texts are their vectors; tokens 0 to 2 are special, 1 is an unknown word."""

    tokenizer = SimpleNamespace(all_special_ids=[2, 0, 1], unk_token_id=1)

    def forward(self, features):
        return {"sentence_embedding": features["vectors"]}


def softmax(in_batch, shared):
    """The mean of ``-log p`` of the positive among the candidates of a row, dot products."""

    def value(vectors, _, ids):
        scores = torch.einsum("iv,cjv->ijc", vectors[0], torch.stack(vectors[1:]))
        rows = []
        for i in range(B):
            of_others = [(j, c) for j in range(B) for c in (CANDIDATES[j] if shared else [0])]
            negatives = [(i, c) for c in CANDIDATES[i][1:]]
            negatives += [(j, c) for j, c in of_others if j != i and in_batch]
            kept = [scores[i, j, c] for j, c in negatives if ids[j, c] != ids[i, 0]]
            rows.append(torch.stack([scores[i, i, 0], *kept]).logsumexp(0) - scores[i, i, 0])
        return torch.stack(rows).mean()

    return value


def of_rows(row):
    """The mean over the rows that have negatives, of a row's own scores and labels."""

    def value(vectors, labels, ids):
        scores = torch.einsum("iv,civ->ic", vectors[0], torch.stack(vectors[1:]))
        values = []
        for i, candidates in enumerate(CANDIDATES):
            own = [0, *(c for c in candidates[1:] if ids[i, c] != ids[i, 0])]
            if len(own) > 1:
                values.append(row(scores[i, own], labels[i, own]))
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


def objective(term, **options):
    return SpladeObjective({"term": (1.0, term)}, **options)


INFO_NCE = InfoNCELoss(similarity="dot", temperature=1.0)
OWN = InfoNCELoss(similarity="dot", temperature=1.0, in_batch=False)
TRIPLET = TripletMarginLoss(similarity="dot")
# By name the loss, its formula, and whether its labels may be ids.
CASES = {
    "info_nce": (INFO_NCE, softmax(True, True), True),
    "info_nce of own": (OWN, softmax(False, False), True),
    "triplet_margin": (TRIPLET, of_rows(hinge), True),
    "margin_mse": (MarginMSELoss(), of_rows(error), False),
    "ranknet": (RankNetLoss(), of_rows(ordered), False),
    "objective, info_nce": (objective(terms.info_nce(INFO_NCE)), softmax(True, False), True),
    "objective, triplet": (objective(terms.triplet_margin(TRIPLET)), of_rows(hinge), True),
    "objective, ranknet": (objective(terms.ranknet(similarity="dot")), of_rows(ordered), False),
}


def features(vectors, ids):
    mask = (ids >= 0).long()
    return {"vectors": vectors, "input_ids": ids.clamp(min=0), "attention_mask": mask}


def batch_of_rows():
    """Vectors, tokenized columns and labels of rows with empty negatives."""
    torch.manual_seed(0)
    vectors = [torch.rand(B, V, dtype=torch.float64).requires_grad_() for _ in range(2 + N)]
    there = torch.tensor([[c in own for c in range(1 + N)] for own in CANDIDATES])
    labels = torch.randn(B, 1 + N, dtype=torch.float64).masked_fill(~there, torch.nan)
    columns = [features(x, torch.tensor([[0, 5, 2, -1]] * B)) for x in vectors]
    for column, own in zip(columns[2:], there.T[1:], strict=True):
        column["input_ids"][~own, 1] = 2  # a text of special tokens
    columns[2]["input_ids"][2, 1] = 1  # an unknown word is one
    return vectors, columns, labels


@pytest.mark.parametrize("cached", [None, 3])
@pytest.mark.parametrize(
    ("name", "has_ids"),
    [(name, flag) for name in CASES for flag in (False, True) if CASES[name][2] or not flag],
)
def test_a_negative_that_is_empty_or_the_positive_is_none(name, has_ids, cached):
    vectors, columns, labels = batch_of_rows()
    loss, formula, _ = CASES[name]
    wrapped = SentenceTransformersLoss(
        Given(), loss, labels_are_ids=has_ids, mini_batch_size=cached
    )
    needs_scores = not CASES[name][2]
    given = IDS if has_ids else labels if needs_scores else None
    value = wrapped(columns, given)
    expected = formula(vectors, labels, IDS if has_ids else ALL)
    torch.testing.assert_close(value, expected)
    value.backward()
    gradients = torch.autograd.grad(expected, vectors, allow_unused=True)
    for x, gradient in zip(vectors, gradients, strict=True):
        torch.testing.assert_close(x.grad, torch.zeros_like(x) if gradient is None else gradient)


def test_ids_of_the_positives_alone_leave_the_negatives_in():
    vectors, columns, _ = batch_of_rows()
    wrapped = SentenceTransformersLoss(Given(), INFO_NCE, labels_are_ids=True)
    ids = ALL.clone()
    ids[:, 0] = IDS[:, 0] + 100
    torch.testing.assert_close(wrapped(columns, ids[:, 0]), softmax(True, True)(vectors, None, ids))
    unread = SentenceTransformersLoss(Given(), INFO_NCE)(columns, ids[:, 0])
    torch.testing.assert_close(unread, softmax(True, True)(vectors, None, ALL))
    for wrong in (None, IDS[:, :2], IDS[:2]):
        with pytest.raises(ValueError, match=r"labels \[4\] or \[4, 4\], ids of documents"):
            wrapped(columns, wrong)


@pytest.mark.parametrize("prompt", [None, "the quick "])
@pytest.mark.parametrize("side", ["right", "left"])
def test_empty_texts_are_seen_beside_a_prompt(prompt, side, sparse):
    model = sparse()
    model.tokenizer.padding_side = side
    anchor, positive = (model.preprocess(COLUMNS[name][:3]) for name in ("anchor", "positive"))
    one, other = [["fox", "", "lazy dog"], ["fox", "lazy dog"]]
    wrapped = SentenceTransformersLoss(model, WARM)
    value = wrapped([anchor, positive, model.preprocess(one, prompt=prompt)])
    embedded = [model(x)["sentence_embedding"] for x in (anchor, positive)]
    negative = model(model.preprocess(other, prompt=prompt))["sentence_embedding"]
    torch.testing.assert_close(value, WARM(*embedded, negative))


def on_ranks(rank, world=2):
    """Values and gradients of losses with ``gather``, of this rank's rows."""
    vectors, columns, _ = batch_of_rows()
    mine, results = slice(rank * B // world, (rank + 1) * B // world), []
    several = {"info_nce": terms.info_nce(INFO_NCE), "triplet": terms.triplet_margin()}
    several = SpladeObjective({name: (1.0, x) for name, x in several.items()}, gather=True)
    alone = InfoNCELoss(similarity="dot", temperature=1.0, gather=True)
    for loss, has_ids in ((alone, False), (alone, True), (several, True)):
        leaves = [x[mine].detach().clone().requires_grad_() for x in vectors]
        own = [{name: x[mine] for name, x in column.items()} for column in columns]
        own = [column | {"vectors": x} for column, x in zip(own, leaves, strict=True)]
        wrapped = SentenceTransformersLoss(Given(), loss, labels_are_ids=has_ids)
        value = wrapped(own, IDS[mine] if has_ids else None)
        gradients = torch.autograd.grad(value, leaves)
        results.append([value.detach(), *(x / world for x in gradients)])
    return results


def test_all_ranks_negatives_are_left_out_as_in_one_process():
    expected = on_ranks(0, world=1)
    for rank, found in enumerate(run_ranks(2, on_ranks)):
        for (value, *gradients), (whole, *parts) in zip(found, expected, strict=True):
            torch.testing.assert_close(value, whole)
            torch.testing.assert_close(gradients, [x.chunk(2)[rank] for x in parts])
