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
    monkeypatch.setattr(
        command,
        "settings_of",
        lambda options: dataclasses.replace(real(options), size=size, **TINY),
    )
    monkeypatch.setattr(docstrings, "load", lambda: corpus)


def test_a_run_is_saved_and_answers_at_once(tiny, corpus, tmp_path, capsys, monkeypatch):
    text = corpus.train[3].text
    folder = tmp_path / "new" / "folder"
    sizes = ["--document-active", "12", "--query-active", "6"]
    arguments = ["--output", str(folder), "--steps", "10", "--seed", "3", *sizes]
    questions = ["--query", text, "--query", "zzzz [b]"]
    command.main([*arguments, *questions])
    printed = " ".join(capsys.readouterr().out.split())
    for expected in (
        "1. Start sparse",
        "2. Learn",
        "3. Prune both sides",
        "-> 12 dimensions",
        "BM25, words",
        "trained, not pruned",
        "MRR@10",
        "products of a pair",
        "? zzzz [b]",
        f"make demo ARGS='--output {folder} --query",
        "examples/train_with_transformers.py",
    ):
        assert expected in printed
    figures = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    assert figures["settings"]["seed"] == 3
    assert figures["calibration"]["after"]["document_active"] == pytest.approx(12, rel=0.05)
    assert figures["calibration"]["after"]["query_active"] == pytest.approx(6, rel=0.05)
    assert len(figures["loss"]) == 10
    assert list(figures["answers"]) == [text, "zzzz [b]"]
    systems = {"untrained model", "BM25, words", "BM25, same subwords", "this model"}
    assert systems < set(figures["test"][0]["rankings"])

    monkeypatch.setattr(docstrings, "load", lambda: pytest.fail("it trained again"))
    command.main(["--output", str(folder), *questions])
    answers = capsys.readouterr().out
    best = figures["answers"][text][0]
    assert f"{best['score']:.2f}  {best['title']}" in answers
