"""What the functions of this room cannot take is refused by the name of the argument."""

import itertools

import pytest
import torch

from sparse_losses import (
    ActivationFrequency,
    bm25_scores,
    idf_penalty,
    label_similarity,
    language_penalty,
    language_token_ids,
)

V = 5
IDF = torch.tensor([0.5, 1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
NAN, INF = float("nan"), float("inf")


def bm25(**changes):
    names = itertools.product(("query", "document"), ("input_ids", "attention_mask"))
    sides = {"_".join(name): torch.ones(2, 3, dtype=int) for name in names}
    return bm25_scores(**sides | {"idf": IDF, "mean_length": 2.0} | changes)


OWN = dict.fromkeys(("document_input_ids", "document_attention_mask"), torch.ones(3, 2, 3).long())
COUNTER = ActivationFrequency(V)
WRONG = [
    (lambda: bm25(query_attention_mask=torch.ones(2, 4)), "query_attention_mask"),
    (lambda: bm25(**OWN), "B = 2 from"),
    (lambda: bm25(idf=torch.arange(V)), "`idf` to be floating point"),
    (lambda: bm25(query_input_ids=torch.full((2, 3), V)), "query_input_ids.*V = 5, got 5"),
    (lambda: bm25(ignore_token_ids=[V]), "ignore_token_ids"),
    (lambda: bm25(mean_length=0), "mean_length"),
    (lambda: bm25(b=1.1), r"`b` in \[0, 1\], got 1.1"),
    (lambda: idf_penalty(torch.ones(2, 3)), "idf"),
    (lambda: idf_penalty(torch.ones(3).long()), "idf"),
    (lambda: idf_penalty(IDF + NAN), "`idf` to be finite"),
    (lambda: idf_penalty(IDF + INF), "`idf` to be finite"),
    (lambda: idf_penalty(IDF, shape="quadratic"), "'exponential', 'linear'"),
    (lambda: idf_penalty(IDF, minimum=1.5), "minimum"),
    (lambda: idf_penalty(IDF, special_token_ids=[1, V]), "special_token_ids`.*V = 5, got 5"),
    (lambda: idf_penalty(IDF, stopword_ids="ab"), "stopword_ids`"),
    (lambda: idf_penalty(IDF, stopword_ids=torch.ones(2)), "stopword_ids` to be integers"),
    (lambda: idf_penalty(IDF, stopword_ids=IDF > 1), "stopword_ids` to be integers"),  # a mask
    (lambda: language_penalty(V, torch.tensor([-1])), "allowed_ids`.*got -1"),
    (lambda: language_penalty(0, []), "vocab_size"),
    (lambda: language_penalty(3, [], penalty=-1.0), "penalty"),
    (lambda: language_token_ids(["a"], ["Latin", "Hangeul"]), "`scripts` .*, got 'Hangeul'"),
    (lambda: language_token_ids(["a"], "Hangul"), "`scripts`.*'Hangul'"),
    (lambda: language_token_ids(3, ["Latin"]), "`tokenizer`"),
    (lambda: label_similarity(torch.ones(3)), r"`labels` of shape \[N, L\], got \[3\]"),
    (lambda: label_similarity(torch.eye(2) / 2), "0 or 1, got 0.5"),
    (lambda: label_similarity(torch.eye(2) * -1), "0 or 1, got -1"),
    (lambda: label_similarity(torch.eye(2) * NAN), "0 or 1, got nan"),
    (lambda: label_similarity([[1, 0]]), "labels"),
    (lambda: label_similarity(torch.eye(2), method="pmi"), "'npmi', 'jaccard', got 'pmi'"),
    (lambda: ActivationFrequency(0), "vocab_size"),
    (lambda: ActivationFrequency(V, decay=1.0), "decay"),
    (lambda: COUNTER.update(torch.zeros(2, V + 1)), "activations"),
    (lambda: COUNTER.merge(ActivationFrequency(V + 1)), "vocab_size"),
    (lambda: COUNTER.merge(ActivationFrequency(V, decay=0.5)), "decay"),
    (lambda: COUNTER.penalty(alpha=1.0), "alpha"),
    (lambda: COUNTER.penalty(beta=0.0), "beta"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
