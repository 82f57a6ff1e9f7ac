import dataclasses
import json

import pytest

from examples.demo import __main__ as command
from examples.demo import docstrings
from examples.demo.model import ModelSize
from tests.examples.demo.artificial import TINY


@pytest.fixture
def tiny(corpus, monkeypatch):
    """A corpus and a model that trains in a second."""
    real, size = command.settings_of, ModelSize(hidden=32, layers=1, heads=2)
    small = lambda options: dataclasses.replace(real(options), size=size, **TINY)  # noqa: E731
    monkeypatch.setattr(command, "settings_of", small)
    monkeypatch.setattr(docstrings, "load", lambda: corpus)


def test_a_run_is_saved_and_answers_at_once(tiny, corpus, tmp_path, capsys, monkeypatch):
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
