"""The battery of short trainings: its rows, and every model with what it needs."""

import dataclasses

import pytest

from benchmarks.run.table import read
from benchmarks.studies import battery

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def texts():
    made = battery.Texts()
    made.queries, made.documents = made.queries[:40], made.documents[:40]
    return made


def test_rows_differ_and_a_third_is_held_back():
    names = [row.name for row in battery.ROWS]
    assert len(set(names)) == len(names) == 36
    held = sum(row.held_back for row in battery.ROWS)
    assert 0.2 < held / len(names) < 0.5
    assert all(row.held_back for row in battery.NEW)


@pytest.mark.parametrize("model", ["bag", "static", "decoder"])
def test_every_model_starts_sparse_and_is_pruned_to_its_number(model, texts):
    row = dataclasses.replace(battery.Row(model), steps=2, batch=4)
    rows = list(battery.run(row, battery.ARMS["shift"], texts))
    assert [one["asked_document"] for one in rows] == ["", 32, 16]
    assert rows[0]["first_active"] == pytest.approx(battery.V / 4, rel=0.2)
    assert [one["document"] for one in rows[1:]] == pytest.approx([32, 16], rel=0.1)
    assert all(0 <= one["recall_10"] <= 1 for one in rows)


def test_targets_share_a_training_that_does_not_use_them(texts, monkeypatch, tmp_path):
    alike = [dataclasses.replace(battery.Row("bag"), steps=2, batch=4, target=n) for n in (32, 64)]
    monkeypatch.setattr(battery, "ROWS", alike)
    monkeypatch.setattr(battery, "Texts", lambda: texts)
    path = tmp_path / "battery.csv"
    assert battery.main(["--arms", "prune", "gain", "--output", str(path)]) == 0
    rows = read(path)
    assert [(row["arm"], row["asked_document"]) for row in rows] == [
        *(("nothing", asked) for asked in ("", "32", "16.0", "64", "32.0")),
        *(("start 1/4, gain 32", asked) for asked in ("", "32", "16.0")),
        *(("start 1/4, gain 64", asked) for asked in ("", "64", "32.0")),
    ]
    battery.main(["--arms", "prune", "--output", str(path)])
    assert read(path) == rows, "finished trainings are kept"
