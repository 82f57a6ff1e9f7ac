import math

import pytest
import torch

from examples.demo.evaluation import Ranking, anatomy, bm25_scores, ranking, similarities
from examples.demo.tokens import Tokens


def test_ranking_against_a_hand_count():
    scores = (torch.arange(12.0) / 100).repeat(12, 1)  # later columns score higher
    scores[1, 1] = 0.095  # columns 10 and 11 are above: rank 3
    # row 0 has rank 12, which counts nothing; row i: rank 12 - i
    expected = [12, 3, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    figures = ranking(scores)
    assert figures.recall_1 == pytest.approx(1 / 12)
    assert figures.recall_10 == pytest.approx(11 / 12)
    assert figures.mrr_10 == pytest.approx(sum(1 / rank for rank in expected[1:]) / 12)


def test_a_constant_score_gains_nothing():
    assert ranking(torch.ones(40, 40)) == Ranking(0.0, 0.0, 0.0)


def test_only_the_dot_product_depends_on_lengths():
    query = torch.tensor([[3.0, 4.0]])
    documents = torch.tensor([[6.0, 8.0], [1.0, 0.0], [0.0, 0.0]])
    assert similarities(query, documents, "dot").tolist() == [[50.0, 3.0, 0.0]]
    cosines = similarities(query, documents, "cosine")
    assert cosines.tolist() == [pytest.approx([1.0, 0.6, 0.0])]


def test_bm25_prefers_the_document_with_the_rare_word():
    documents = [["the", "cat"], ["the", "dog"], ["the", "the", "bird"]]
    scores = bm25_scores([["dog"], ["the", "bird"], ["unknown"]], documents)
    assert scores.argmax(1).tolist()[:2] == [1, 2]
    assert scores[2].eq(0).all()
    # Lucene's BM25 by hand: idf ln(1 + (3 - 1 + .5) / 1.5), k1 = 1.5, b = .75, length 2 of 7/3
    expected = math.log(1 + 2.5 / 1.5) / (1 + 1.5 * (0.25 + 0.75 * 2 / (7 / 3)))
    assert scores[0, 1].item() == pytest.approx(expected, rel=1e-5)


def test_anatomy_against_a_hand_count():
    tokens = Tokens.learn(["the apple pie", "the cherry pie"] * 3, vocab_size=60)
    the, pie = tokens.ids(["the", "pie"])[0][1], tokens.ids(["pie"])[0][1]
    assert the in tokens.stopword_ids
    assert pie not in tokens.stopword_ids
    rare = tokens.ids(["cherry"])[0][1]
    df = torch.full((tokens.vocab_size,), 6)
    df[rare] = 5
    vectors = torch.zeros(2, tokens.vocab_size)
    vectors[0, [2, the, pie]] = torch.tensor([1.0, 2.0, 3.0])  # 2 is [CLS]
    vectors[1, rare] = 0.5
    rows = [[2, the, pie, 3], [2, pie, 3]]
    look = anatomy(vectors, rows, tokens, df)
    assert look["active"] == 2.0
    assert anatomy(torch.zeros_like(vectors), rows, tokens, df)["rare"] == 0.0  # of nothing
    assert look["stopwords"] == pytest.approx(1 / 4)
    assert look["special"] == pytest.approx(1 / 4)
    assert look["rare"] == pytest.approx(1 / 4)
    assert look["own"] == pytest.approx(2 / 3)  # the, pie; not the second text's pie
