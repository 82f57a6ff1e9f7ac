"""Rows with fewer negatives than others: an empty text is none."""

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
from tests.distributed.ranks import run_ranks
from tests.integrations.sentence_transformers.runs import COLUMNS, WARM

B, N, V = 4, 3, 12
DOT = {"similarity": "dot", "temperature": 1.0}
CANDIDATES = [[0, 1, 2, 3], [0, 3], [0, 1], [0]]  # of each row; 0 is the positive


class Given(torch.nn.Module):
    """A model whose texts are their vectors; tokens 0 to 2 are special, 1 is an unknown word."""

    tokenizer = SimpleNamespace(all_special_ids=[2, 0, 1], unk_token_id=1)

    def forward(self, features):
        return {"sentence_embedding": features["vectors"]}


def softmax(in_batch, shared):
    """The mean of ``-log p`` of the positive among the candidates of a row, dot products."""

    def value(vectors, _):
        scores = torch.einsum("iv,cjv->ijc", vectors[0], torch.stack(vectors[1:]))
        rows = []
        for i in range(B):
            own = [scores[i, i, CANDIDATES[i]]]
            others = [j for j in range(B) if j != i and in_batch]
            own += [scores[i, j, CANDIDATES[j] if shared else [0]] for j in others]
            rows.append(torch.cat(own).logsumexp(0) - scores[i, i, 0])
        return torch.stack(rows).mean()

    return value


def of_rows(row):
    """The mean over the rows that have negatives, of a row's own scores and labels."""

    def value(vectors, labels):
        scores = torch.einsum("iv,civ->ic", vectors[0], torch.stack(vectors[1:]))
        own = [(scores[i, c], labels[i, c]) for i, c in enumerate(CANDIDATES) if len(c) > 1]
        return torch.stack([row(s, t) for s, t in own]).mean()

    return value


def hinge(s, _):
    return (0.3 + s[1:] - s[0]).relu().mean()


def ordered(s, t):
    return torch.stack(
        [(s[b] - s[a]).exp().log1p() for a in range(len(s)) for b in range(len(s)) if t[a] > t[b]]
    ).mean()


def error(s, t):
    return (s[0] - s[1:] - t[0] + t[1:]).square().mean()


def objective(term, **losses):
    return SpladeObjective({term: 1.0}, **{"info_nce": InfoNCELoss(**DOT), **losses})


CASES = {
    "info_nce": (InfoNCELoss(**DOT), softmax(True, True)),
    "info_nce of own": (InfoNCELoss(**DOT, in_batch=False), softmax(False, False)),
    "triplet_margin": (TripletMarginLoss(similarity="dot"), of_rows(hinge)),
    "margin_mse": (MarginMSELoss(), of_rows(error)),
    "ranknet": (RankNetLoss(), of_rows(ordered)),
    "objective, info_nce": (objective("info_nce"), softmax(True, False)),
    "objective, margin_mse": (objective("margin_mse"), of_rows(error)),
    "objective, ranknet": (objective("ranknet"), of_rows(ordered)),
}


def features(vectors, ids):
    mask = (ids >= 0).long()
    return {"vectors": vectors, "input_ids": ids.clamp(min=0), "attention_mask": mask}


@pytest.mark.parametrize("cached", [None, 3])
@pytest.mark.parametrize("name", CASES)
def test_an_empty_negative_is_not_there(name, cached):
    torch.manual_seed(0)
    loss, formula = CASES[name]
    vectors = [torch.rand(B, V, dtype=torch.float64).requires_grad_() for _ in range(2 + N)]
    there = torch.tensor([[c in own for c in range(1 + N)] for own in CANDIDATES])
    labels = torch.randn(B, 1 + N, dtype=torch.float64).masked_fill(~there, torch.nan)
    columns = [features(x, torch.tensor([[0, 5, 2, -1]] * B)) for x in vectors]
    for column, own in zip(columns[2:], there.T[1:], strict=True):
        column["input_ids"][~own, 1] = 2  # a text of special tokens
    columns[2]["input_ids"][2, 1] = 1  # an unknown word is one
    wrapped = SentenceTransformersLoss(Given(), loss, mini_batch_size=cached)
    value = wrapped(columns, labels)
    value = value if torch.is_tensor(value) else sum(value.values())
    expected = formula(vectors, labels)
    torch.testing.assert_close(value, expected)
    value.backward()
    gradients = torch.autograd.grad(expected, vectors, allow_unused=True)
    for x, gradient in zip(vectors, gradients, strict=True):
        torch.testing.assert_close(x.grad, torch.zeros_like(x) if gradient is None else gradient)


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
    """Values and gradients of two losses with ``gather``, of this rank's rows."""
    torch.manual_seed(0)
    mine = slice(rank * B // world, (rank + 1) * B // world)
    vectors = [torch.rand(B, V, dtype=torch.float64) for _ in range(2 + N)]
    there = torch.tensor([[c in own for c in range(1 + N)] for own in CANDIDATES])
    labels = torch.randn(B, 1 + N, dtype=torch.float64)[mine]
    results = []
    for loss in (InfoNCELoss(**DOT, gather=True), both(gather=True)):
        leaves = [x[mine].clone().requires_grad_() for x in vectors]
        ids = torch.where(there, 5, 2).T[:, mine, None].expand(-1, -1, 2)
        columns = [features(x, own) for x, own in zip(leaves, (ids[0], *ids), strict=True)]
        value = SentenceTransformersLoss(Given(), loss)(columns, labels)
        value = value if torch.is_tensor(value) else sum(value.values())
        gradients = torch.autograd.grad(value, leaves)
        results.append([value.detach(), *(x / world for x in gradients)])
    return results


def both(**options):
    weights = {"info_nce": 1.0, "distillation": 1.0, "triplet_margin": 1.0}
    return SpladeObjective(weights, info_nce=InfoNCELoss(**DOT), **options)


def test_all_ranks_negatives_are_left_out_as_in_one_process():
    expected = on_ranks(0, world=1)
    for rank, found in enumerate(run_ranks(2, on_ranks)):
        for (value, *gradients), (whole, *parts) in zip(found, expected, strict=True):
            torch.testing.assert_close(value, whole)
            torch.testing.assert_close(gradients, [x.chunk(2)[rank] for x in parts])
