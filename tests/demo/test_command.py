import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.studies import ablation, rescue
from sparse_losses import Finding
from sparse_losses.demo import __main__ as command
from sparse_losses.demo import switches
from sparse_losses.demo.model import ModelSize
from tests.demo.artificial import write_pairs

TINY = {
    "batch_size": 8,
    "vocab_size": 400,
    "size": ModelSize(hidden=32, layers=1, heads=2),
    "probe_every": 5,
    "probe_rows": 20,
}


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
        return dataclasses.replace(asked, **TINY)

    monkeypatch.setattr(command, "settings_of", settings_of)


def test_from_pairs_to_answers_picture_and_figures(tiny, pairs, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    arguments = ["--pairs", str(pairs), "--output", str(folder), "--steps", "10"]
    code = command.main(
        [*arguments, "--query", "shortest path", "--query", "zzzz [b]", "--seed", "3"]
    )
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
        "checkpoint.pt",
        "figures.json",
        "training.png",
    ]


def test_ctrl_c_saves_and_resume_gives_the_same_figures(tiny, pairs, tmp_path, capsys, monkeypatch):
    def figures(folder):
        found = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
        found.pop("seconds")
        return found

    arguments = ["--pairs", str(pairs), "--steps", "9", "--query", "matrix", "--output"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert command.main([*arguments, str(whole)]) == 0

    from sparse_losses.demo.training import Run

    real = Run._take_step

    def take_step(self):
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_take_step", take_step)
        assert command.main([*arguments, str(broken)]) == 130
    said = capsys.readouterr().err
    assert "Stopped after step 4" in said
    assert "--resume" in said
    assert not (broken / "figures.json").exists()
    assert command.main([*arguments, str(broken), "--resume"]) == 0
    assert "Going on from step 4 of 9" in capsys.readouterr().out
    assert figures(broken) == figures(whole)


def _error(capsys, *arguments) -> str:
    assert command.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_an_output_folder_that_cannot_be_written_is_found_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "_prepare", lambda *_: pytest.fail("work began"))
    (tmp_path / "file").write_text("")
    assert "cannot write to the output folder" in _error(
        capsys, "--output", str(tmp_path / "file" / "below")
    )
    assert "cannot write to the output folder" in _error(capsys, "--output", str(tmp_path / "file"))


def test_mistakes_are_told_in_one_sentence(tmp_path, capsys, pairs):
    output = ("--output", str(tmp_path / "out"))
    assert "nothing to resume" in _error(capsys, "--resume", *output)
    assert "cannot read" in _error(capsys, "--pairs", str(tmp_path / "absent"), *output)
    with pairs.open("a", encoding="utf-8") as file:
        file.write("no tab\n")
    assert "line 301" in _error(capsys, "--pairs", str(pairs), *output)


def test_resume_with_other_options_is_refused(tiny, pairs, tmp_path, capsys):
    arguments = ("--pairs", str(pairs), "--output", str(tmp_path / "out"), "--query", "tree")
    assert command.main([*arguments, "--steps", "4"]) == 0
    capsys.readouterr()
    assert "steps was 4, now 6" in _error(capsys, *arguments, "--steps", "6", "--resume")


def test_a_missing_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "EXTRA", ("rich", "no_such_package"))
    said = _error(capsys, "--output", str(tmp_path))
    assert "needs no_such_package; install with: pip install 'sparse-losses[demo]'" in said


@pytest.mark.parametrize(
    "wrong",
    [
        ["--steps", "0"],
        ["--without", "sleep"],
        ["--threads", "two"],
        ["--seed", "-1"],
        ["--flops-factor", "0"],
        ["--flops-factor", "nan"],
        ["--flops-factor", "many"],
    ],
)
def test_wrong_options_are_refused_by_the_parser(wrong, capsys):
    with pytest.raises(SystemExit):
        command.main(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_help_explains_every_option(capsys):
    for main in (command.main, ablation.main, rescue.main):
        with pytest.raises(SystemExit) as stop:
            main(["--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        for block in text.split("\n  --")[1:]:
            assert len(block.split()) > 4, block


def test_the_help_needs_no_optional_package():
    code = "import sys, sparse_losses.demo.__main__ as m; m._parser(); print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_package_does_not_import_the_demo():
    code = (
        "import sys, sparse_losses; "
        "print([m for m in sys.modules if 'demo' in m or m in ('rich', 'tokenizers', 'bm25s')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Ablation ----------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch, corpus):
    from sparse_losses.demo import docstrings

    class Inline:
        """A pool that works at once, in this process."""

        def Pool(self, *_):
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def close(self):
            return None

        join = close

        def imap_unordered(self, work, jobs):
            return map(work, jobs)

    monkeypatch.setattr(docstrings, "load", lambda: corpus)
    monkeypatch.setattr("multiprocessing.get_context", lambda _: Inline())
    for module in (ablation, rescue):

        def settings_of(variant, seed, steps, real=module.settings_of):
            asked = real(variant, seed, steps)
            return dataclasses.replace(asked, **TINY)

        monkeypatch.setattr(module, "settings_of", settings_of)


def test_ablation_writes_tables_and_skips_what_is_finished(small, tmp_path, monkeypatch, capsys):
    arguments = ["--seeds", "0", "1", "--steps", "3", "--output", str(tmp_path)]
    assert ablation.main([*arguments, "--only", "full", "without flops"]) == 0
    content = json.loads((tmp_path / "ablation.json").read_text(encoding="utf-8"))
    assert len(content["runs"]) == 6  # two seeds of two variants and of the untrained model
    full = content["summary"]["full"]["name_mrr_10"]
    values = [row["name_mrr_10"] for row in content["runs"] if row["variant"] == "full"]
    assert full["mean"] == pytest.approx(sum(values) / 2)
    assert full["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    table = (tmp_path / "ablation.md").read_text(encoding="utf-8")
    for start in ("| BM25, words |", "| full |", "| without flops |"):
        assert start in table
    assert len((tmp_path / "ablation.csv").read_text(encoding="utf-8").splitlines()) == 7

    monkeypatch.setattr(ablation, "run_one", lambda job: pytest.fail(f"ran {job} again"))
    assert ablation.main([*arguments, "--only", "full", "without flops"]) == 0


def test_targets_have_a_table_and_a_picture(small, tmp_path, capsys):
    arguments = ["--seeds", "0", "1", "--steps", "12", "--output", str(tmp_path)]
    assert ablation.main([*arguments, "--only", "full", "target 64"]) == 0
    table = (tmp_path / "front.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    results = [
        json.loads((tmp_path / f"target-64-{seed}.json").read_text(encoding="utf-8"))
        for seed in (0, 1)
    ]
    active = [
        sum(task["document_after"]["active"] for task in result["test"]) / 2 for result in results
    ]
    assert f"| target 64 | {sum(active) / 2:.1f} ± " in table
    assert f"{sum(active) / 2 / 64 - 1:+.1%}" in table
    assert results[0]["controller"]["status"] in table
    rows = (tmp_path / "front.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 5
    assert rows[-1].startswith(f"target 64,1,64,{active[1]}")
    assert "<svg" in (tmp_path / "front.svg").read_text(encoding="utf-8")


def test_a_target_on_the_command_line(tiny, pairs, tmp_path, capsys):
    arguments = ["--pairs", str(pairs), "--output", str(tmp_path / "out"), "--steps", "12"]
    assert command.main([*arguments, "--query", "tree", "--target-active", "40"]) == 0
    assert "active of 40 wanted" in capsys.readouterr().out
    assert command.main([*arguments, "--target-active", "40", "--without", "flops"]) == 1
    assert "--target-active steers the weight of flops" in capsys.readouterr().err


def test_both_sides_have_a_target_and_a_factor_on_the_command_line(tiny, pairs, tmp_path, capsys):
    arguments = ["--pairs", str(pairs), "--output", str(tmp_path / "out"), "--steps", "12"]
    arguments += ["--query", "tree", "--target-active-query", "30"]
    assert command.main([*arguments, "--flops-factor", "100"]) == 0
    printed = capsys.readouterr().out
    assert "Queries: " in printed
    assert "Documents: " not in printed
    settings = json.loads((tmp_path / "out" / "figures.json").read_text())["settings"]
    assert settings["weights"]["flops"] == pytest.approx(6.0)
    assert settings["target_active_query"] == 30
    assert command.main([*arguments, "--resume"]) == 1
    said = capsys.readouterr().err
    assert "weights.flops was 6.0, now 0.06;" in said
    assert "warmup" not in said


def test_a_finding_is_told_when_it_is_new_and_when_it_is_gone():
    dense, silent = (Finding(symptom, "9 of 9", ()) for symptom in ("not sparse", "silent"))
    known = {}
    assert list(command._news(known, {"document": [], "query": []})) == []
    told = list(command._news(known, {"document": [dense], "query": [dense]}))
    assert told == ["documents: not sparse (9 of 9): ", "queries: not sparse (9 of 9): "]
    again = dense._replace(evidence="8 of 9")
    assert list(command._news(known, {"document": [again], "query": [again]})) == []
    told = list(command._news(known, {"document": [silent], "query": [again]}))
    assert told == ["documents: no longer: not sparse", "documents: silent (9 of 9): "]


def test_findings_are_shown_once_in_the_course_of_training(tiny, pairs, tmp_path, capsys):
    arguments = ["--pairs", str(pairs), "--output", str(tmp_path / "out"), "--steps", "50"]
    arguments += ["--query", "tree", "--flops-factor", "0.001"]
    assert command.main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("documents: texts are not sparse") == 1
    assert "step 10, documents: texts are not sparse" in printed


def test_ablation_refuses_runs_of_other_settings(small, tmp_path, capsys):
    arguments = ["--seeds", "0", "--output", str(tmp_path), "--only", "full", "--steps"]
    assert ablation.main([*arguments, "2"]) == 0
    assert ablation.main([*arguments, "3"]) == 1
    assert "other settings" in capsys.readouterr().err


def test_every_switch_has_its_ablation():
    changed = [change.get("without", ()) for change in ablation.VARIANTS.values()]
    assert {(switch,) for switch in switches.SWITCHES} <= set(changed)


def test_torch_threads_are_left_as_the_command_says(tiny, pairs, tmp_path):
    arguments = ["--pairs", str(pairs), "--output", str(tmp_path / "out"), "--query", "tree"]
    assert command.main([*arguments, "--steps", "1", "--threads", "1"]) == 0
    assert torch.get_num_threads() == 1


def test_an_unfinished_run_is_not_overwritten_unless_asked(tiny, pairs, tmp_path, capsys):
    folder = tmp_path / "out"
    arguments = ["--pairs", str(pairs), "--output", str(folder), "--query", "tree", "--steps"]
    assert command.main([*arguments, "4"]) == 0
    checkpoint = folder / command.CHECKPOINT
    state = torch.load(checkpoint, weights_only=True)
    torch.save({**state, "step": 2}, checkpoint)  # as Ctrl-C leaves it
    before = checkpoint.read_bytes()

    assert command.main([*arguments, "3"]) == 1
    said = capsys.readouterr().err
    assert "step 2 of 4" in said
    assert "--resume" in said
    assert "--overwrite" in said
    assert checkpoint.read_bytes() == before

    assert command.main([*arguments, "3", "--overwrite"]) == 0
    assert torch.load(checkpoint, weights_only=True)["step"] == 3


def test_other_options_beside_resume_are_named_before_the_texts_are_read(
    tiny, pairs, tmp_path, capsys
):
    folder = tmp_path / "out"
    arguments = ["--output", str(folder), "--query", "tree", "--steps", "2"]
    assert command.main([*arguments, "--pairs", str(pairs)]) == 0
    gone = ["--pairs", str(tmp_path / "gone.tsv"), "--resume", "--seed", "5"]
    assert command.main([*arguments, *gone]) == 1
    said = capsys.readouterr().err
    assert "seed was 0, now 5" in said
    assert "repeat the options of the first run" in said


def test_an_empty_question_is_refused(tiny, pairs, tmp_path, capsys):
    arguments = ["--pairs", str(pairs), "--output", str(tmp_path / "out"), "--steps", "1"]
    assert command.main([*arguments, "--query", " "]) == 1
    assert "--query" in capsys.readouterr().err


# Rescue ------------------------------------------------------------------------------------------


def test_rescue_writes_what_was_said_and_skips_what_is_finished(
    small, tmp_path, monkeypatch, capsys
):
    arguments = ["--seeds", "0", "1", "--steps", "20", "--output", str(tmp_path)]
    assert rescue.main(arguments) == 0
    rows, looks = (
        list(csv.DictReader((tmp_path / name).read_text(encoding="utf-8").splitlines()))
        for name in ("rescue.csv", "rescue-steps.csv")
    )
    assert [row["variant"] for row in rows[::2]] == list(rescue.VARIANTS)
    assert [int(look["step"]) for look in looks[:3]] == [1, 10, 20]
    for row in rows:
        stem = row["variant"].replace(", ", "-").replace(" ", "-")
        result = json.loads((tmp_path / f"{stem}-{row['seed']}.json").read_text(encoding="utf-8"))
        assert float(row["active"]) == result["active"]
        assert row["named_at"] in ("", "1", "10", "20")
        assert bool(row["controller"]) == row["variant"].endswith("steered")
    assert rows[0]["named_at"] == "1"
    assert rows[0]["finding"] == "sparsity rules the training: collapse is near"
    table = (tmp_path / "rescue.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    assert "<svg" in (tmp_path / "rescue.svg").read_text(encoding="utf-8")
    assert not list(tmp_path.glob("*.pt"))

    monkeypatch.setattr(rescue, "run_one", lambda job: pytest.fail(f"ran {job} again"))
    assert rescue.main(arguments) == 0


def test_the_cause_is_the_first_finding_that_turns_flops_the_right_way():
    def look(step, *changes):
        findings = [{"symptom": f"s{step}", "evidence": "", "changes": [c]} for c in changes]
        return {"step": step, "findings": findings}

    looks = [look(1), look(10, ("query_flops", "up")), look(20, ("document_flops", "down"))]
    collapse = {"variant": "collapse", "looks": looks}
    assert rescue.named(collapse) == (20, "s20")
    assert rescue.wrong_way(collapse) == 1
    dense = {"variant": "never sparse, steered", "looks": looks}
    assert rescue.named(dense) == (10, "s10")
    assert rescue.named({"variant": "collapse", "looks": looks[:2]}) is None
