"""A collection on disk: its pairs, the figures of rankings, and what is refused."""

import math
import random

import pytest
import torch

from benchmarks.studies import beir
from tests.benchmarks.studies.conftest import TOPICS


def test_training_reads_documents_alone_and_only_judged_queries_count(folder):
    read = beir.load(folder)
    assert read.queries == [f"{name} zebra" for name in sorted(TOPICS)]
    assert read.relevant[1] == {1: 2, 5: 1, 9: 1, 13: 1, 17: 1}  # grade 0 is not relevant
    assert len(read.pairs) == 3 * 45  # every fourth document gives none
    held_out = {" ".join(sorted(text.split())) for text in read.documents[:: beir.UNSEEN]}
    others = {" ".join(sorted(text.split())) for text in read.documents} - held_out
    assert {" ".join(sorted(" ".join(pair).split())) for pair in read.pairs} == others


def test_pairs_stay_in_their_passage():
    five = "one two three four five"
    first = [f"{five} title", f"{five} a.", "Too short!", f"{five * 13} b."]
    made = list(beir.pairs(first[0], " ".join([*first[1:], f"{five} c.", f"{five} d?"])))
    rest = [" ".join(other for other in first if other != one) for one in first]
    expected = [pair for pair in zip(first, rest, strict=True) if pair[0] != "Too short!"]
    assert made == [*expected, (f"{five} c.", f"{five} d?"), (f"{five} d?", f"{five} c.")]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("corpus.jsonl", '{"_id": "x"}', r"cannot read .*KeyError\('text'\).*has corpus.jsonl"),
        ("qrels/test.tsv", "a\tb\tc\nfile\td99\t1", "cannot read .*d99"),
        ("qrels/test.tsv", "a\tb\tc\n", "has no relevant documents"),
        ("queries.jsonl", None, r"cannot read .*queries\.jsonl"),
    ],
)
def test_a_damaged_folder_ends_with_a_sentence(folder, file, text, message):
    path = folder / file
    path.unlink()
    if text:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=message):
        beir.load(folder)


def test_figures_of_rankings_follow_their_formulas():
    rng = random.Random(1)
    scores = [[rng.random() * rng.randint(0, 1) for _ in range(300)] for _ in range(7)]
    scores.append([0.0] * 300)  # nothing is found
    relevant = [{rng.randrange(300): rng.randint(1, 3) for _ in range(15)} for _ in scores]
    figures = beir.ranked(torch.tensor(scores, dtype=torch.float64), relevant)
    for query, (own, grades) in enumerate(zip(scores, relevant, strict=True)):
        order = sorted((n for n in range(300) if own[n] > 0), key=lambda n: -own[n])[:100]
        best = sorted(grades.values(), reverse=True)[:10]
        gained = sum(grades.get(n, 0) / math.log2(2 + at) for at, n in enumerate(order[:10]))
        ideal = sum(grade / math.log2(2 + at) for at, grade in enumerate(best))
        reciprocal = [1 / (1 + at) for at, n in enumerate(order[:10]) if n in grades]
        recalled = sum(n in grades for n in order) / len(grades)
        expected = (gained / ideal, (reciprocal or [0.0])[0], recalled)
        assert [one[query] for one in figures.values()] == pytest.approx(expected)
