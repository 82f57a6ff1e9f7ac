import csv
import dataclasses
import json

import pytest
import torch

from benchmarks.studies import ablation, rescue, targets
from sparse_losses.demo import docstrings
from sparse_losses.demo.corpus import pair_texts, split
from sparse_losses.demo.evaluation import cosine, ranking
from sparse_losses.demo.objective import loss_of
from sparse_losses.demo.training import Run
from tests.demo.artificial import make_rows

TINY = {
    "batch_size": 8,
    "vocab_size": 400,
    "probe_every": 5,
    "probe_rows": 20,
}


def _tiny(settings):
    size = dataclasses.replace(settings.size, hidden=32, layers=1, heads=2)
    return dataclasses.replace(settings, size=size, **TINY)


@pytest.fixture
def small(inline, monkeypatch):
    """Artificial texts, and settings with which a model trains in a second."""
    corpus = split(make_rows(), ("name → document", "summary → rest"), {"artificial": "1"}, 40)
    monkeypatch.setattr(docstrings, "load", lambda: pytest.fail("work began"))
    for study in (ablation, targets, rescue):
        monkeypatch.setattr(
            study,
            "settings_of",
            lambda *run, real=study.settings_of: _tiny(real(*run)),
        )
        monkeypatch.setattr(
            study,
            "run_all",
            lambda *rest, real=study.run_all, **_: real(*rest, load=lambda: corpus),
        )


def _rows(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize("wrong", [["--only", "nothing"], ["--steps", "0"], ["--seeds", "-1"]])
def test_wrong_options_are_refused_by_the_parser(wrong, capsys):
    with pytest.raises(SystemExit):
        ablation.main(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_every_loss_of_the_preset_has_its_ablation():
    full = ablation.settings_of("full", 0, 10)
    losses = {loss_of(term) for term in full.preset.weights}
    assert {f"without {loss}" for loss in losses} < set(ablation.VARIANTS)
    settings = [ablation.settings_of(variant, 0, 10) for variant in ablation.VARIANTS]
    assert all(one != full for one in settings[1:])


def test_ablation_writes_tables_and_skips_what_is_finished(small, tmp_path, monkeypatch, capsys):
    arguments = ["--seeds", "0", "1", "--steps", "3", "--output", str(tmp_path)]
    arguments += ["--only", "full", "without flops"]
    assert ablation.main(arguments) == 0
    content = json.loads((tmp_path / "ablation.json").read_text(encoding="utf-8"))
    assert len(content["runs"]) == 6  # two seeds of two variants and of the untrained model
    full = content["summary"]["full"]["name_mrr_10"]
    values = [row["name_mrr_10"] for row in content["runs"] if row["variant"] == "full"]
    assert full["mean"] == pytest.approx(sum(values) / 2)
    assert full["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    table = (tmp_path / "ablation.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    starts = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    systems = ["BM25, words", "BM25, same subwords", "untrained model"]
    assert starts == [*systems, "full", "without flops"]
    assert len({line.count("|") for line in table.splitlines()}) == 1
    assert [row["seed"] for row in _rows(tmp_path / "ablation.csv")] == ["0", "1"] * 3

    monkeypatch.setattr(ablation, "run_one", lambda *job: pytest.fail(f"ran {job} again"))
    assert ablation.main(arguments) == 0


def test_runs_of_other_settings_or_texts_are_refused(small, tmp_path, capsys):
    arguments = ["--output", str(tmp_path), "--only", "full", "--steps"]
    assert ablation.main([*arguments, "1", "--seeds", "0"]) == 0
    assert ablation.main([*arguments, "2", "--seeds", "0"]) == 1
    assert "other settings" in capsys.readouterr().err
    (path,) = (tmp_path / "runs").glob("*.json")
    path.write_text(path.read_text(encoding="utf-8").replace('"artificial": "1"', '"other": "2"'))
    assert ablation.main([*arguments, "1", "--seeds", "1"]) == 1
    assert "different installed versions" in capsys.readouterr().err


def test_targets_have_a_table_and_a_picture(small, tmp_path, capsys):
    arguments = ["--seeds", "0", "1", "--steps", "12", "13", "--corpora", "docstrings"]
    arguments += ["--output", str(tmp_path), "--only"]
    variants = ["dense, a fixed weight", "sparse, target 64"]
    assert targets.main([*arguments, *variants]) == 0
    table = (tmp_path / "targets.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    runs = tmp_path / "docstrings-12" / "runs"
    results = [
        json.loads((runs / f"sparse,-target-64-{seed}.json").read_text(encoding="utf-8"))
        for seed in (0, 1)
    ]
    active = [one["trained"]["active"] for one in results]
    miss = max((one / 64 - 1 for one in active), key=abs)
    got = f"| {active[0]:.1f} {active[1]:.1f} | {miss:+.1%} |"
    assert f"| docstrings | sparse | 12 | 64 {got}" in table
    assert results[0]["controllers"]["document"]["status"] in table
    rows = _rows(tmp_path / "targets.csv")
    assert [(row["steps"], row["target"]) for row in rows[::2]] == [
        (steps, target) for steps in ("12", "13") for target in ("", "64")
    ]
    assert [float(row["active"]) for row in rows[2:4]] == active
    assert rows[0]["sources"] == "artificial 1"
    assert "<svg" in (tmp_path / "front.svg").read_text(encoding="utf-8")

    read = [targets.read_rows(tmp_path / name) for name in ("targets.csv", "calibrated.csv")]
    tables = targets.asked_and_got(read[0]), targets.calibration(read[1], read[0])
    assert table == "\n".join(tables)
    assert [(row["steps"], row["seed"], row["given"], row["to"]) for row in read[1]] == [
        (steps, seed, split, to)
        for steps in (12, 13)
        for seed in (0, 1)
        for split in ("train", "validation")
        for to in (32, 64)
    ]
    for row in read[1]:
        assert row["active_given"] == pytest.approx(row["to"], rel=0.02)
    worst = [max((row["active"] / 32 - 1 for row in read[1][n:8:4]), key=abs) for n in (2, 0)]
    line = next(one for one in table.splitlines() if one.startswith("| docstrings | 12 | 64 | 32 "))
    assert " | ".join(f"{one:+.1%}" for one in worst) in line


def test_a_calibrated_model_is_one_with_another_bias():
    corpus = split(make_rows(), ("name → document", "summary → rest"), {"artificial": "1"}, 40)
    run = Run(corpus, _tiny(targets.settings_of("dense, target 32", 0, 3)))
    texts = pair_texts(corpus.test, 0)
    given = [targets.lifted_logits(run, side) for side in texts]
    for threshold in (0.7, -0.3):
        both = [targets.figures(threshold, [given], name) for name in ("cosine", "dot")]
        with torch.no_grad():
            run.model.bias.sub_(threshold)
        queries, documents = (run.encode(side) for side in texts)
        with torch.no_grad():
            run.model.bias.add_(threshold)
        for found, scores in zip(
            both, (cosine(queries, documents), queries @ documents.T), strict=True
        ):
            assert found["active"] == (documents > 0).sum(1).double().mean().item()
            assert found["active_query"] == (queries > 0).sum(1).double().mean().item()
            assert found["mrr_10"] == pytest.approx(ranking(scores).mrr_10)


def test_a_target_keeps_what_was_said_on_the_way(small, monkeypatch):
    corpus = split(make_rows(), ("name → document", "summary → rest"), {"artificial": "1"}, 40)
    monkeypatch.setattr(targets, "SAID_AT", 3)
    found = targets.run_one(targets.settings_of("dense, target 32", 0, 6), corpus)
    assert found["early"]["document"]["step"] == 3
    assert found["controllers"]["document"]["step"] == 6


def test_rescue_writes_what_was_said(small, tmp_path, capsys):
    arguments = ["--seeds", "0", "1", "--steps", "20", "--output", str(tmp_path)]
    assert rescue.main(arguments) == 0
    rows, looks = (_rows(tmp_path / name) for name in ("rescue.csv", "rescue-steps.csv"))
    assert [row["variant"] for row in rows[::2]] == rescue.VARIANTS
    assert [int(look["step"]) for look in looks[:3]] == [1, 10, 20]
    for row in rows:
        assert row["named_at"] in ("", "1", "10", "20")
        assert bool(row["controller"]) == row["variant"].endswith("steered")
    assert rows[0]["named_at"] == "1"
    assert rows[0]["finding"] == "FLOPS dominates the gradient"
    assert (tmp_path / "rescue.md").read_text(encoding="utf-8") in capsys.readouterr().out
    assert "<svg" in (tmp_path / "rescue.svg").read_text(encoding="utf-8")


def test_the_cause_is_the_first_finding_that_turns_flops_the_right_way():
    def look(step, *changes):
        return {
            "step": step,
            "findings": [{"symptom": f"s{step}", "changes": [c]} for c in changes],
        }

    looks = [look(1), look(10, ("query_flops", "up")), look(20, ("document_flops", "down"))]
    collapse = {"variant": "collapse", "looks": looks}
    assert rescue.asked_for(collapse, right=True) == [(20, "s20")]
    assert rescue.asked_for(collapse, right=False) == [(10, "s10")]
    dense = {"variant": "never sparse, steered", "looks": looks}
    assert rescue.asked_for(dense, right=True) == [(10, "s10")]
    assert rescue.asked_for({"variant": "collapse", "looks": looks[:1]}, right=True) == []
