"""The studies' stored runs, and the tables of the study of targets."""

import csv
import json

import pytest
import torch

from benchmarks.studies import targets
from examples.demo.corpus import pair_texts
from examples.demo.evaluation import ranking, similarities
from examples.demo.training import Run


def _rows(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def _arguments(folder, *variants, steps=("3",), seeds=("0",)):
    words = ["--seeds", *seeds, "--steps", *steps, "--corpora", "docstrings"]
    return [*words, "--output", str(folder), "--only", *variants]


def test_finished_runs_are_kept_and_others_refused(small, tmp_path, monkeypatch):
    small(targets)
    arguments = _arguments(tmp_path, "dense, target 32")
    targets.main(arguments)
    monkeypatch.setattr(targets, "run_one", lambda *job: pytest.fail("ran again"))
    targets.main(arguments)
    (path,) = (tmp_path / "docstrings-3").glob("*.json")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"batch_size": 8', '"batch_size": 9'), encoding="utf-8")
    with pytest.raises(SystemExit, match="other settings"):
        targets.main(arguments)
    other = text.replace('"artificial": "1"', '"other": "2"').replace('"seed": 0', '"seed": 1')
    path.write_text(text, encoding="utf-8")
    path.with_name("dense,-target-32-1.json").write_text(other, encoding="utf-8")
    with pytest.raises(SystemExit, match="different installed versions"):
        targets.main(arguments)


def test_targets_are_rows_and_a_table(small, tmp_path, capsys):
    small(targets)
    variants = ["dense, a fixed weight", "sparse, target 64"]
    targets.main(_arguments(tmp_path, *variants, steps=("12", "13"), seeds=("0", "1")))
    table = (tmp_path / "targets.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    results = [
        json.loads((tmp_path / f"docstrings-12/sparse,-target-64-{seed}.json").read_text("utf-8"))
        for seed in (0, 1)
    ]
    active = [one["trained"]["active"] for one in results]
    miss = max((one / 64 - 1 for one in active), key=abs)
    got = f"| {active[0]:.1f} {active[1]:.1f} | {miss:+.1%} |"
    assert f"| docstrings | sparse | 12 | 64 {got}" in table
    assert results[0]["controllers"]["document"]["status"].partition(":")[0] in table
    rows = _rows(tmp_path / "targets.csv")
    assert [(row["steps"], row["target"]) for row in rows[::2]] == [
        (steps, target) for steps in ("12", "13") for target in ("", "64")
    ]
    assert [float(row["active"]) for row in rows[2:4]] == active
    assert rows[0]["sources"] == "artificial 1"

    read = [targets.read_rows(tmp_path / name) for name in ("targets.csv", "calibrated.csv")]
    tables = targets.asked_and_got(read[0]), targets.calibration(read[1])
    assert table == "\n".join(tables)
    names = ("steps", "seed", "given", "to", "method")
    pruned = [row for row in read[1] if row["method"] != "train"]
    assert [tuple(row[name] for name in names) for row in pruned] == [
        (steps, seed, split, to, method)
        for steps in (12, 13)
        for seed in (0, 1)
        for split in ("train", "validation")
        for to in (16, 32, 64)
        for method in ("shift", "prune", "largest")
    ]
    for row in pruned:
        assert row["active_given"] <= row["to"] * 1.02 or row["method"] == "shift"
    own = [row for row in read[1] if (row["steps"], row["to"], row["target"]) == (12, 64, 64)]
    worst = []
    for given in ("validation", "train"):
        kept = [row for row in own if (row["method"], row["given"]) == ("prune", given)]
        worst.append(f"{max((row['active'] / 64 - 1 for row in kept), key=abs):+.1%}")
    assert "| docstrings | 12 | 64 | 64 | 2 | " in table
    assert f" | {' | '.join(worst)} | " in table
    recall = [row["recall_10"] for row in own if row["method"] == "train"]
    assert f" | {sum(recall) / 2:.3f} | " in table


@pytest.mark.parametrize("threshold", [1.5, -1.0])
def test_methods_keep_the_weights_that_stay(threshold):
    logits = torch.tensor([[-1.0, 0.5, 1.6, 3.0]])
    vectors = logits.relu().log1p()
    ways = targets.methods(threshold, 2)
    made = {name: of_document(logits + targets.LIFT) for name, (_, of_document) in ways.items()}
    torch.testing.assert_close(made["shift"], (logits - threshold).relu().log1p())
    torch.testing.assert_close(made["prune"], vectors.where(logits > threshold, 0.0))
    torch.testing.assert_close(made["largest"], vectors.where(logits > 1.0, 0.0))
    for name in ("prune", "largest"):
        torch.testing.assert_close(ways[name][0](logits + targets.LIFT), vectors)


def test_a_calibrated_model_is_one_with_another_bias(small, corpus):
    small(targets)
    run = Run(corpus, targets.settings_of("dense, target 32", 0, 3))
    texts = pair_texts(corpus.test, 0)
    lifted = [targets.lifted_logits(run, side) for side in texts]
    for threshold in (0.7, -0.3):
        with torch.no_grad():
            run.model.bias.sub_(threshold)
        queries, documents = (run.encode(side) for side in texts)
        with torch.no_grad():
            run.model.bias.add_(threshold)
        for name in ("cosine", "dot"):
            both = [targets.shifted(threshold)] * 2
            figures = targets.figures([lifted], name, *both)
            assert figures["active"] == (documents > 0).sum(1).double().mean().item()
            assert figures["active_query"] == (queries > 0).sum(1).double().mean().item()
            expected = ranking(similarities(queries, documents, name)).mrr_10
            assert figures["mrr_10"] == pytest.approx(expected)
