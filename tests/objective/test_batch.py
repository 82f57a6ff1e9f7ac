"""Columns of texts to a batch."""

import pytest
import torch

from sparse_losses import SpladeBatch

B, N, S, V = 3, 2, 4, 9


def column(*rows):
    ids = torch.randint(1, V, (*rows, S))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def encoder(input_ids, attention_mask, return_logits=False):
    assert input_ids.ndim == attention_mask.ndim == 2
    hot = torch.nn.functional.one_hot(input_ids, V).amax(1).float()
    return (hot, hot - 0.5) if return_logits else hot


@pytest.mark.parametrize("return_logits", [False, True])
@pytest.mark.parametrize("negatives", [None, (N,), (B, N)])
def test_columns_are_encoded_and_keep_their_shapes(negatives, return_logits):
    columns = {"anchor": column(B), "positive": column(B), "teacher_scores": torch.rand(B, B)}
    columns["negative"] = None if negatives is None else column(*negatives)
    options = {"return_logits": True} if return_logits else {}
    batch = SpladeBatch.from_columns(encoder, columns, **options)
    assert batch.teacher_scores is columns["teacher_scores"]
    assert batch.positive_ids is batch.teacher_candidates is None
    for side in ("anchor", "positive", "negative"):
        texts, known = getattr(batch, side), columns[side]
        if known is None:
            assert texts is None
            continue
        expected = torch.nn.functional.one_hot(known["input_ids"], V).amax(-2).float()
        assert torch.equal(texts.activations, expected)
        assert texts.input_ids is known["input_ids"]
        assert texts.attention_mask is known["attention_mask"]
        assert (texts.logits is not None) == return_logits
        assert not return_logits or torch.equal(texts.logits, expected - 0.5)


def test_unknown_columns_are_an_error():
    with pytest.raises(TypeError, match="labels"):
        SpladeBatch.from_columns(
            encoder, {"anchor": column(B), "positive": column(B), "labels": torch.zeros(B)}
        )
