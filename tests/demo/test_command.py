import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_losses import Finding
from sparse_losses.demo import command, docstrings
from sparse_losses.demo.__main__ import main
from sparse_losses.demo.objective import Weights
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


def test_from_pairs_to_answers_picture_and_figures(tiny, pairs, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    arguments = ["--pairs", str(pairs), "--output", str(folder), "--steps", "10"]
    code = main([*arguments, "--query", "shortest path", "--query", "zzzz [b]", "--seed", "3"])
    printed = capsys.readouterr().out
    assert code == 0
    for expected in ("BM25, words", "untrained model", "MRR@10", "? shortest path", "? zzzz [b]"):
        assert expected in printed
    figures = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    assert figures["settings"]["seed"] == 3
    assert figures["settings"]["steps"] == len(figures["history"]) == 10
    assert list(figures["sources"]) == ["pairs.tsv"]
    assert list(figures["answers"]) == ["shortest path", "zzzz [b]"]
    assert set(figures["test"][0]["rankings"]) == {
        "untrained model",
        "BM25, words",
        "BM25, same subwords",
        "this model",
    }
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == [
        "figures.json",
        "training.png",
    ]


def _error(capsys, *arguments) -> str:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_an_output_folder_that_cannot_be_written_is_found_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(docstrings, "load", lambda: pytest.fail("work began"))
    (tmp_path / "file").write_text("")
    assert "cannot write to the output folder" in _error(
        capsys, "--output", str(tmp_path / "file" / "below")
    )
    assert "cannot write to the output folder" in _error(capsys, "--output", str(tmp_path / "file"))


def test_mistakes_are_told_in_one_sentence(tmp_path, capsys, pairs):
    output = ("--output", str(tmp_path / "out"))
    assert "cannot read" in _error(capsys, "--pairs", str(tmp_path / "absent"), *output)
    with pairs.open("a", encoding="utf-8") as file:
        file.write("no tab\n")
    assert "line 301" in _error(capsys, "--pairs", str(pairs), *output)


def test_a_missing_extra_is_named(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bm25s" else found(name)
    )
    said = _error(capsys, "--output", str(tmp_path))
    assert "needs bm25s; install with: pip install 'sparse-losses[demo]'" in said


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
    ],
)
def test_wrong_options_are_refused_by_the_parser(wrong, capsys):
    with pytest.raises(SystemExit):
        main(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    for block in capsys.readouterr().out.split("\n  --")[1:]:
        assert len(block.split()) > 3, block


def test_the_help_needs_no_optional_package():
    code = (
        "import sys; from sparse_losses.demo.__main__ import make_parser; make_parser(); "
        "print('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_package_does_not_import_the_demo():
    code = (
        "import sys, sparse_losses; "
        "print([m for m in sys.modules if 'demo' in m or m in ('rich', 'tokenizers', 'bm25s')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_target_on_the_command_line(tiny, pairs, tmp_path, capsys):
    arguments = ["--pairs", str(pairs), "--output", str(tmp_path / "out"), "--steps", "12"]
    assert main([*arguments, "--query", "tree", "--target-active", "40"]) == 0
    assert "active of 40 wanted" in capsys.readouterr().out
    assert main([*arguments, "--target-active", "40", "--without", "flops"]) == 1
    assert "--target-active steers the weight of flops" in capsys.readouterr().err


def test_the_queries_have_a_target_of_their_own(tiny, pairs, tmp_path, capsys):
    arguments = ["--pairs", str(pairs), "--output", str(tmp_path / "out"), "--steps", "12"]
    assert main([*arguments, "--query", "tree", "--target-active-query", "30"]) == 0
    printed = capsys.readouterr().out
    assert "Queries: " in printed
    assert "Documents: " not in printed
    settings = json.loads((tmp_path / "out" / "figures.json").read_text())["settings"]
    assert (settings["target_active"], settings["target_active_query"]) == (None, 30)


def test_the_text_length_on_the_command_line(tiny, pairs, tmp_path, capsys):
    arguments = ["--pairs", str(pairs), "--output", str(tmp_path / "out"), "--steps", "1"]
    assert main([*arguments, "--query", "tree", "--max-length", "9"]) == 0
    assert "cut at 7 subwords" in " ".join(capsys.readouterr().out.split())
    settings = json.loads((tmp_path / "out" / "figures.json").read_text())["settings"]
    assert settings["size"]["max_length"] == 9


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


def test_findings_are_shown_once_in_the_course_of_training(
    tiny, pairs, tmp_path, capsys, monkeypatch
):
    tiny_settings = command.settings_of
    weak = Weights(flops=6e-5)
    monkeypatch.setattr(
        command, "settings_of", lambda o: dataclasses.replace(tiny_settings(o), weights=weak)
    )
    arguments = ["--pairs", str(pairs), "--output", str(tmp_path / "out"), "--steps", "50"]
    assert main([*arguments, "--query", "tree"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("documents: texts are not sparse") == 1
    assert "step 10, documents: texts are not sparse" in printed


def test_an_empty_question_is_refused(tiny, pairs, tmp_path, capsys):
    arguments = ["--pairs", str(pairs), "--output", str(tmp_path / "out"), "--steps", "1"]
    assert main([*arguments, "--query", " "]) == 1
    assert "--query" in capsys.readouterr().err
