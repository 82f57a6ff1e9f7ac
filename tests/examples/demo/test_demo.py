"""The demonstration on short artificial texts: its corpus, model, figures and command."""

import dataclasses
import json
import math
import re

import pytest
import torch

from examples.demo import __main__ as command
from examples.demo import docstrings
from examples.demo.corpus import split
from examples.demo.evaluation import Ranking, bm25_scores, ranking
from examples.demo.model import ModelSize, SparseEncoder
from examples.demo.retriever import Retriever
from examples.demo.tokens import pad
from examples.demo.training import Run, Settings
from tests.examples.demo.artificial import TINY, make_rows

SIZE = ModelSize(hidden=32, layers=1, heads=2)


@pytest.fixture(scope="module")
def corpus():
    return split(make_rows(), ("name → document", "summary → rest"), {"artificial": "1"}, 40)


@pytest.fixture
def settings():
    return Settings(steps=12, size=SIZE, document_active=12, query_active=6, **TINY)


def test_a_run_is_saved_and_answers_at_once(corpus, tmp_path, capsys, monkeypatch):
    real, small = command.settings_of, {"size": SIZE, **TINY}  # a model that trains in a second
    monkeypatch.setattr(command, "settings_of", lambda x: dataclasses.replace(real(x), **small))
    monkeypatch.setattr(docstrings, "load", lambda: corpus)
    text = corpus.train[3].text
    folder = tmp_path / "new" / "folder"
    sizes = ["--document-active", "12", "--query-active", "6"]
    arguments = ["--output", str(folder), "--steps", "10", "--seed", "3", *sizes]
    questions = ["--query", text, "--query", "zzzz [b]"]
    command.main([*arguments, *questions])
    printed = " ".join(capsys.readouterr().out.split())
    for expected in ("-> 12 dimensions", "trained, not pruned", "MRR@10", "? zzzz [b]"):
        assert expected in printed
    figures = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    assert figures["settings"]["seed"] == 3
    assert len(figures["loss"]) == 10
    assert list(figures["answers"]) == [text, "zzzz [b]"]
    systems = {"untrained model", "BM25, words", "BM25, same subwords", "this model"}
    assert systems < set(figures["test"][0]["rankings"])

    monkeypatch.setattr(docstrings, "load", lambda: pytest.fail("it trained again"))
    command.main(["--output", str(folder), *questions])
    answers = capsys.readouterr().out
    best = figures["answers"][text][0]
    assert f"{best['score']:.2f}  {best['title']}" in answers


def finished(corpus, settings):
    run = Run(corpus, settings)
    run.start()
    run.train()
    run.prune()
    return run


def test_a_run_depends_on_its_seed_alone(corpus, settings):
    first = finished(corpus, settings)
    torch.manual_seed(99)  # whatever else the process has drawn must not matter
    second = finished(corpus, settings)
    assert first.losses == second.losses
    assert first.model.thresholds == second.model.thresholds
    states = (run.model.state_dict() for run in (first, second))
    torch.testing.assert_close(*states, rtol=0, atol=0)
    other = Run(corpus, dataclasses.replace(settings, seed=1))
    assert not torch.equal(other.order, first.order)


def test_the_start_is_sparse_the_loss_falls_and_both_sides_are_pruned(corpus, settings):
    longer = {"steps": 60, "batch_size": 16, "learning_rate": 5e-3}
    run = Run(corpus, dataclasses.replace(settings, **longer))
    started = run.start()
    assert started.before.document_active > 200
    assert started.after.document_active == pytest.approx(settings.start_active, rel=0.02)
    run.train()
    first, last = (sum(part) for part in (run.losses[:5], run.losses[-5:]))
    assert 0 < last < 0.8 * first
    pruned = run.prune().after
    assert pruned.document_active == pytest.approx(settings.document_active, rel=0.02)
    assert pruned.query_active == pytest.approx(settings.query_active, rel=0.05)


def test_search_ranks_by_dot_products_also_when_saved(corpus, settings, tmp_path):
    retriever = finished(corpus, settings).retriever()
    retriever.index(corpus.rows)
    text = corpus.train[3].text
    documents = retriever.encode([row.text for row in corpus.rows], "document")
    dots = documents @ retriever.encode([text], "query")[0]
    best, row = retriever.search(text)[0], corpus.rows[dots.argmax()]
    assert best["score"] == pytest.approx(dots.max().item(), rel=1e-4)
    assert (best["title"], best["text"]) == (row.title, row.text)
    assert len(retriever.search("graph", count=3)) == 3
    (tokens,) = retriever.top_tokens(["shortest path"], count=4)
    assert 0 < len(tokens) <= 4
    retriever.save(tmp_path)
    again = Retriever.load(tmp_path)
    assert again.search(text) == retriever.search(text)
    assert torch.equal(again.encode([text]), retriever.encode([text]))


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
    assert scores[1].argmax() == 2
    assert scores[2].eq(0).all()
    # Lucene's BM25 by hand: idf ln(1 + (3 - 1 + .5) / 1.5), k1 = 1.5, b = .75, length 2 of 7/3
    expected = math.log(1 + 2.5 / 1.5) / (1 + 1.5 * (0.25 + 0.75 * 2 / (7 / 3)))
    assert scores[0, 1].item() == pytest.approx(expected, rel=1e-5)


def test_padding_changes_nothing():
    rows, words = [[2, 5, 9, 30, 3], [2, 7, 3]], [f"w{number}" for number in range(50)]
    model = SparseEncoder(words, torch.rand(50) * 4, ModelSize(hidden=16, layers=2, heads=2))
    torch.testing.assert_close(model(**pad(rows[1:])), model(**pad(rows))[1:])


def _docstring(summary, topic):
    words = " ".join(f"{topic}{chr(97 + i % 26)}{chr(97 + i * 7 % 26)}" for i in range(30))
    return f"{summary}\n\nThe rest is about {words}."


def test_a_name_leaks_into_neither_query_nor_document():
    text = _docstring("Sort the list with sorted, see Sorted and sorted_list.", "order")
    (row,) = docstrings.to_rows([("builtins.sorted", text)])
    name, summary = row.pairs
    assert name.query == "sorted"
    for leaking in (name.document, summary.query, summary.document):
        assert not re.search(r"\bsorted\b", leaking, re.IGNORECASE)
    assert "sorted_list" in name.document  # another object's name stays
    assert "Sort the list" not in summary.document


def test_a_leaf_name_is_never_on_both_sides_of_the_split():
    entries = [
        (f"pkg.{owner}.{leaf}", _docstring(f"Do the thing {owner} to {leaf}.", f"{owner}{leaf}"))
        for leaf in (f"leaf_{letter}" for letter in "abcdefghijklmnop")
        for owner in ("first", "second", "third")
    ]
    corpus = split(docstrings.to_rows(entries), docstrings.TASKS, {}, held_out=4)
    sides = [{row.group for row in side} for side in (corpus.train, corpus.validation, corpus.test)]
    assert [len(side) for side in sides] == [8, 4, 4]
    assert len(set.union(*sides)) == 16
    assert len(corpus.test) == 4  # one of the three namesakes: a query has one right answer
    rows = make_rows(100)
    assert split(rows, (), {}, 10) == split(reversed(rows), (), {}, 10), "it depends on names only"


def test_sources_are_parsed_not_imported(tmp_path):
    for folder in ("tests", "_private"):
        (tmp_path / folder).mkdir()
    for name, source in {
        "_impl.py": 'raise RuntimeError\ndef seen(): "Public."\ndef _hidden(): "Private."\n'
        'class Box:\n  "A box."\n  def open(self): "Opens."\n',
        "broken.py": "def (:\n",
        "escape.py": 'def odd(): "A \\d."\n',
        "tests/module.py": 'def never(): "No."\n',
        "_private/module.py": 'def never(): "No."\n',
    }.items():
        (tmp_path / name).write_text(source)
    found = dict(docstrings.parse_folder(tmp_path, "pkg"))
    of_box = {"pkg.Box": "A box.", "pkg.Box.open": "Opens."}
    assert found == {"pkg.seen": "Public.", **of_box, "pkg.escape.odd": "A \\d."}
