import math

import pytest
import torch

from examples.demo.evaluation import Ranking, bm25_scores, ranking
from examples.demo.model import ModelSize, SparseEncoder
from examples.demo.tokens import pad


def test_ranking_against_a_hand_count():
    scores = (torch.arange(12.0) / 100).repeat(12, 1)  # later columns score higher
    scores[1, 1] = 0.095  # columns 10 and 11 are above: rank 3
    # row 0 has rank 12, which counts nothing; row i: rank 12 - i
    expected = [12, 3, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    reciprocal = sum(1 / rank for rank in expected[1:]) / 12
    assert ranking(scores) == pytest.approx((1 / 12, 11 / 12, reciprocal))
    assert ranking(torch.ones(40, 40)) == Ranking(0.0, 0.0, 0.0)  # a constant score gains nothing


def test_bm25_prefers_the_document_with_the_rare_word():
    documents = [["the", "cat"], ["the", "dog"], ["the", "the", "bird"]]
    scores = bm25_scores([["dog"], ["the", "bird"], ["unknown"]], documents)
    assert scores.argmax(1).tolist()[:2] == [1, 2]
    assert scores[2].eq(0).all()
    # Lucene's BM25 by hand: idf ln(1 + (3 - 1 + .5) / 1.5), k1 = 1.5, b = .75, length 2 of 7/3
    expected = math.log(1 + 2.5 / 1.5) / (1 + 1.5 * (0.25 + 0.75 * 2 / (7 / 3)))
    assert scores[0, 1].item() == pytest.approx(expected, rel=1e-5)


def test_padding_changes_nothing():
    rows, words = [[2, 5, 9, 30, 3], [2, 7, 3]], [f"w{number}" for number in range(50)]
    model = SparseEncoder(words, torch.rand(50) * 4, ModelSize(hidden=16, layers=2, heads=2))
    torch.testing.assert_close(model(**pad(rows[1:])), model(**pad(rows))[1:])
