import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_losses import Finding
from sparse_losses.demo import command, debian, docstrings
from sparse_losses.demo.__main__ import main
from sparse_losses.demo.options import UserError
from tests.demo.artificial import write_pairs


@pytest.fixture
def pairs(tmp_path) -> Path:
    path = tmp_path / "pairs.tsv"
    write_pairs(path)
    return path


@pytest.fixture
def tiny(monkeypatch):
    """The command with a model that trains in a second."""
    real = command.settings_of

    def settings_of(options):
        asked = real(options)
        return dataclasses.replace(
            asked,
            batch_size=8,
            vocab_size=400,
            size=dataclasses.replace(asked.size, hidden=32, layers=1, heads=2),
            probe_every=5,
            probe_rows=20,
        )

    monkeypatch.setattr(command, "settings_of", settings_of)


def test_from_pairs_to_answers_picture_and_figures(tiny, pairs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "news", lambda known, findings: ["documents: so dense"])
    folder = tmp_path / "new" / "folder"
    arguments = ["--pairs", str(pairs), "--output", str(folder), "--steps", "10", "--seed", "3"]
    arguments += ["--target-active-query", "30", "--max-length", "9"]
    code = main([*arguments, "--query", "shortest path", "--query", "zzzz [b]"])
    printed = " ".join(capsys.readouterr().out.split())
    assert code == 0
    for expected in (
        "BM25, words",
        "untrained model",
        "MRR@10",
        "? shortest path",
        "? zzzz [b]",
        "documents: so dense",
        "Queries: ",
        "Documents: ",
        "active of 64 wanted",
        "active of 30 wanted",
        "cut at 7 subwords",
    ):
        assert expected in printed
    figures = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    settings = figures["settings"]
    assert settings["seed"] == 3
    assert settings["steps"] == len(figures["history"]) == 10
    assert (settings["target_active"], settings["target_active_query"]) == (64, 30)
    assert settings["size"]["max_length"] == 9
    assert list(figures["sources"]) == ["pairs.tsv"]
    assert list(figures["answers"]) == ["shortest path", "zzzz [b]"]
    systems = {"untrained model", "BM25, words", "BM25, same subwords", "this model"}
    assert set(figures["test"][0]["rankings"]) == systems
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == ["figures.json", "training.png"]


def _error(capsys, *arguments) -> str:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_mistakes_are_told_in_one_sentence(tmp_path, capsys, pairs, monkeypatch):
    monkeypatch.setattr(docstrings, "load", lambda: pytest.fail("work began"))
    output = ("--output", str(tmp_path / "out"))
    for folder in (pairs, pairs / "below"):
        said = _error(capsys, "--output", str(folder))
        assert "cannot write to the output folder" in said
    assert "cannot read" in _error(capsys, "--pairs", str(tmp_path / "absent"), *output)
    assert "--query" in _error(capsys, "--pairs", str(pairs), *output, "--query", " ")
    with pairs.open("a", encoding="utf-8") as file:
        file.write("no tab\n")
    assert "line 301" in _error(capsys, "--pairs", str(pairs), *output)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bm25s" else found(name)
    )
    said = _error(capsys, *output)
    assert "needs bm25s; install with: pip install 'sparse-losses[demo]'" in said


def test_the_corpus_is_chosen_and_pairs_are_another(capsys, tmp_path, monkeypatch):
    def chosen():
        raise UserError("debian was chosen")

    monkeypatch.setattr(debian, "load", chosen)
    said = _error(capsys, "--corpus", "debian", "--output", str(tmp_path))
    assert said == "error: debian was chosen\n"
    with pytest.raises(SystemExit):
        main(["--corpus", "debian", "--pairs", "mine.tsv"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_ctrl_c_ends_the_command(tmp_path, capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(docstrings, "load", interrupted)
    assert main(["--output", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"


@pytest.mark.parametrize(
    "wrong",
    [
        ["--steps", "0"],
        ["--without", "sleep"],
        ["--steps", "two"],
        ["--seed", "-1"],
        ["--seed", str(2**63)],
        ["--max-length", "2"],
        ["--corpus", "wikipedia"],
    ],
)
def test_wrong_options_are_refused_by_the_parser(wrong, capsys):
    with pytest.raises(SystemExit):
        main(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_the_package_does_not_import_the_demo_and_its_help_needs_no_optional_package():
    code = (
        "import sys, sparse_losses; assert not [m for m in sys.modules if 'demo' in m]; "
        "from sparse_losses.demo.__main__ import make_parser; make_parser(); "
        "assert not {'rich', 'tokenizers', 'bm25s'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_finding_is_told_when_it_is_new_and_when_it_is_gone():
    dense, silent = (Finding(symptom, "9 of 9", ()) for symptom in ("not sparse", "silent"))
    known = {}
    assert list(command.news(known, {"document": [], "query": []})) == []
    told = list(command.news(known, {"document": [dense], "query": [dense]}))
    assert told == ["documents: not sparse (9 of 9): ", "queries: not sparse (9 of 9): "]
    again = dense._replace(evidence="8 of 9")
    assert list(command.news(known, {"document": [again], "query": [again]})) == []
    told = list(command.news(known, {"document": [silent], "query": [again]}))
    assert told == ["documents: no longer: not sparse", "documents: silent (9 of 9): "]
