"""Columns of texts to a batch."""

import pytest
import torch

from sparse_losses import SpladeBatch, SpladeEncoder, Texts
from tests.representation import tiny_models

B, N, S, V = 3, 2, 4, 9
CSR = {"layout": torch.sparse_csr}
PAIRS = {"anchor": list("abcd"), "positive": ["a e", "b f", "c g", "d h"]}


def column(*rows):
    ids = torch.randint(1, V, (*rows, S))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def encoder(input_ids, attention_mask, return_logits=False):
    assert input_ids.ndim == attention_mask.ndim == 2
    hot = torch.nn.functional.one_hot(input_ids, V).amax(1).float()
    return (hot, hot - 0.5) if return_logits else hot


@pytest.fixture(scope="module")
def splade():
    return SpladeEncoder(*tiny_models.pair("bert"), max_length=12).eval()


@pytest.mark.parametrize("return_logits", [False, True])
@pytest.mark.parametrize("negatives", [None, (N,), (B, N)])
def test_columns_are_encoded_and_keep_their_shapes(negatives, return_logits):
    columns = {"anchor": column(B), "positive": column(B), "teacher_scores": torch.rand(B, B)}
    columns["negative"] = None if negatives is None else column(*negatives)
    lists = {"positive_ids": [3, 3, 4], "candidate_mask": [[1, 0, 1]] * B}
    options = {"return_logits": True} if return_logits else {}
    batch = SpladeBatch.from_columns(encoder, columns | lists, **options)
    assert batch.teacher_scores is columns["teacher_scores"]
    assert (batch.positive_ids.tolist(), batch.candidate_mask.shape) == ([3, 3, 4], (B, B))
    assert (batch.negative is None) == (negatives is None)
    for side, texts in zip(("anchor", "positive", "negative"), batch[:3], strict=True):
        if texts is not None:
            expected = torch.nn.functional.one_hot(texts.input_ids, V).amax(-2).float()
            assert torch.equal(texts.activations, expected)
            assert {"input_ids": texts[1], "attention_mask": texts[2]} == columns[side]
            logits = expected - 0.5 if return_logits else None
            torch.testing.assert_close(texts.logits, logits)


@pytest.mark.parametrize("own", [True, False])
def test_texts_are_tokenized_as_the_encoder_does(splade, own):
    texts, long = ["서울 맛집", ""], ["a " * 100, "sparse"]
    negatives = ["", "over the", "one weight a", "a"]
    columns = {"anchor": texts, "positive": long}
    columns["negative"] = [negatives[:2], negatives[2:]] if own else negatives
    batch = SpladeBatch.from_columns(splade, columns)
    for side, expected in (("anchor", texts), ("positive", long), ("negative", negatives)):
        got, ids = getattr(batch, side), splade.tokenize(expected)
        shape = (2, 2) if own and side == "negative" else (len(expected),)
        assert torch.equal(got.input_ids, ids["input_ids"].view(*shape, -1))
        assert torch.equal(got.attention_mask, ids["attention_mask"].view(*shape, -1))
        vectors = splade(**ids).view(*shape, -1)
        torch.testing.assert_close(got.activations, vectors, rtol=1e-5, atol=1e-6)
        if not own:
            sparse = getattr(SpladeBatch.from_columns(splade, columns, **CSR), side).activations
            torch.testing.assert_close(sparse.to_dense(), vectors, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"anchor": []}, r"'anchor' to be texts, .*got \[\]"),
        ({"negative": [["a"], ["b", "c"]]}, "'negative' to be texts, as many in every row, got"),
        ({"negative": [["a"], [None]]}, "'negative' to be texts"),
        ({"labels": [1, 2]}, "`column` to be one of 'anchor'"),
        ({"negative": [["a"], ["b"]]}, r"\[N, S\] with CSR, got \[2, 1, "),
    ],
)
def test_wrong_columns_are_errors(splade, change, message):
    columns = {"anchor": ["a", "b"], "positive": ["c", "d"], **change}
    with pytest.raises(ValueError, match=message):
        SpladeBatch.from_columns(splade, columns, **CSR)


def overlap(query, document):
    """A teacher of texts: the number of letters that they share."""
    rows = [[len({*q} & {*d} - {" "}) for d in document["texts"]] for q in query["texts"]]
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("negative", "others"),
    [
        (None, torch.empty(4, 0)),
        (["a f"] * 4, torch.tensor([[1.0], [0.0], [0.0], [0.0]]).expand(4, 4)),
        ([["a f", "h"]] * 4, torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])),
    ],
)
def test_teacher_scores_all_candidates(splade, negative, others):
    columns = {**PAIRS, "negative": negative}
    batch = SpladeBatch.from_columns(splade, columns, teacher=overlap, score_anchors=True)
    expected = torch.cat([torch.eye(4), others], 1).double()
    torch.testing.assert_close(batch.teacher_scores, expected)
    torch.testing.assert_close(batch.teacher_anchor_scores, torch.eye(4).double())
    assert batch.teacher_candidates == "batch"
    assert not batch.teacher_scores.requires_grad
    with pytest.raises(ValueError, match="no `teacher` beside `teacher_scores`"):
        SpladeBatch.from_columns(splade, {**PAIRS, "teacher_scores": [1.0]}, teacher=overlap)
    with pytest.raises(ValueError, match=r"the teacher's scores as \[4, 4\], got \[4\]"):
        SpladeBatch.from_columns(splade, PAIRS, teacher=lambda query, document: torch.ones(4))


def test_documents_are_positives_and_then_negatives():
    columns = {"anchor": column(B), "positive": column(B), "negative": column(B, N)}
    batch = SpladeBatch.from_columns(encoder, columns)
    expected = torch.cat([batch.positive.activations, batch.negative.activations.flatten(0, 1)])
    assert torch.equal(batch.texts("document").activations, expected)
    assert batch.texts("query") is batch.anchor
    with pytest.raises(ValueError, match="expected `activations` of both texts in one layout"):
        batch.anchor.join(Texts(torch.ones(1, V).to_sparse_csr(), *batch.anchor[1:]))
    joined = Texts(torch.ones(1, V), torch.ones(1, 2), torch.ones(1, 2)).join(batch.anchor)
    assert joined.input_ids[0].tolist() == joined.attention_mask[0].tolist() == [1, 1, 0, 0]
