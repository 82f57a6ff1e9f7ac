import math

import pytest
import torch

from examples.demo.evaluation import Ranking, bm25_scores, ranking


def test_ranking_against_a_hand_count():
    scores = (torch.arange(12.0) / 100).repeat(12, 1)  # later columns score higher
    scores[1, 1] = 0.095  # columns 10 and 11 are above: rank 3
    # row 0 has rank 12, which counts nothing; row i: rank 12 - i
    expected = [12, 3, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    figures = ranking(scores)
    assert figures.recall_1 == pytest.approx(1 / 12)
    assert figures.recall_10 == pytest.approx(11 / 12)
    assert figures.mrr_10 == pytest.approx(sum(1 / rank for rank in expected[1:]) / 12)
    assert ranking(torch.ones(40, 40)) == Ranking(0.0, 0.0, 0.0)  # a constant score gains nothing


def test_bm25_prefers_the_document_with_the_rare_word():
    documents = [["the", "cat"], ["the", "dog"], ["the", "the", "bird"]]
    scores = bm25_scores([["dog"], ["the", "bird"], ["unknown"]], documents)
    assert scores.argmax(1).tolist()[:2] == [1, 2]
    assert scores[2].eq(0).all()
    # Lucene's BM25 by hand: idf ln(1 + (3 - 1 + .5) / 1.5), k1 = 1.5, b = .75, length 2 of 7/3
    expected = math.log(1 + 2.5 / 1.5) / (1 + 1.5 * (0.25 + 0.75 * 2 / (7 / 3)))
    assert scores[0, 1].item() == pytest.approx(expected, rel=1e-5)
