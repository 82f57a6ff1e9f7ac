import dataclasses
import json

import pytest

from examples.demo import __main__ as command
from examples.demo import docstrings
from examples.demo.model import ModelSize
from tests.examples.demo.artificial import TINY


def test_docstrings_become_answers_and_figures(corpus, tmp_path, capsys, monkeypatch):
    """With a model that trains in a second."""
    real, size = command.settings_of, ModelSize(hidden=32, layers=1, heads=2)
    monkeypatch.setattr(
        command,
        "settings_of",
        lambda options: dataclasses.replace(real(options), size=size, **TINY),
    )
    monkeypatch.setattr(docstrings, "load", lambda: corpus)
    folder = tmp_path / "new" / "folder"
    arguments = ["--output", str(folder), "--steps", "10", "--seed", "3"]
    command.main([*arguments, "--query", "shortest path", "--query", "zzzz [b]"])
    printed = " ".join(capsys.readouterr().out.split())
    for expected in (
        "BM25, words",
        "untrained model",
        "MRR@10",
        "? shortest path",
        "? zzzz [b]",
        "document_flops: ",
        "active of 64 wanted",
    ):
        assert expected in printed
    figures = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    assert figures["settings"]["seed"] == 3
    assert figures["settings"]["preset"]["target_active"] == {"document_flops": 64}
    assert len(figures["history"]) == 10
    assert list(figures["answers"]) == ["shortest path", "zzzz [b]"]
    systems = {"untrained model", "BM25, words", "BM25, same subwords", "this model"}
    assert set(figures["test"][0]["rankings"]) == systems
    assert [path.name for path in folder.iterdir()] == ["figures.json"]


def test_terms_and_target_are_those_of_the_options():
    options = command.parser().parse_args(["--without", "document_flops", "query_flops"])
    preset = command.settings_of(options).preset
    assert preset.weights.keys() == {"info_nce", "distillation"}
    assert preset.target_active == {}
    options = command.parser().parse_args(["--target-active", "0"])
    assert command.settings_of(options).preset.target_active == {}


def test_the_folder_is_made_before_work_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "load", lambda: pytest.fail("work began"))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        command.main(["--output", str(tmp_path / "file" / "below")])
